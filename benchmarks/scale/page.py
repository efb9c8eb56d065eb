"""Measure `rlinf-actors serve` on a simulated cluster: ``python -m benchmarks.scale.page [--agents N] [--workers N]``.

Needs the extra `test` and Chromium. The agents are simulated at the head's real sockets; each has 8 accelerators. The
figures are the head's CPU time with and without the page, and what a browser measures of first paint and updates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.processes import cpu_s
from benchmarks.scale.cluster import Simulation, Size
from benchmarks.scale.folder import folder_of_run

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PAINT = "performance.getEntriesByName('first-contentful-paint').map(one => one.startTime)"
UPDATES = "performance.getEntriesByName('update').map(one => one.duration)"


def measure(agents: int, workers: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a cluster of *agents* nodes with *workers* workers each, watched for *seconds*."""
    with folder_of_run() as folder:
        simulation = Simulation(Size(agents, workers), folder)
        try:
            simulation.join()
            simulation.launch()
            before = simulation._load(seconds)
            arguments = ["--head", simulation._head.address, "--listen", "127.0.0.1:0"]
            server = subprocess.Popen(
                [sys.executable, "-m", "rlinf_actors.cli.main", "serve", *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **simulation._environment},
            )
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                time.sleep(6)
                with_page = simulation._load(seconds)
                spent, start = cpu_s(server.pid), time.monotonic()
                found = _browse(url, seconds)
                found["server_cpu_percent"] = 100 * (cpu_s(server.pid) - spent) / (time.monotonic() - start)
            finally:
                server.terminate()
                server.wait()
            head = {"head_idle_percent": before["head_cpu_percent"], "head_percent": with_page["head_cpu_percent"]}
            return {"agents": agents, "workers": agents * workers, **head, **found}
        finally:
            simulation.close()


def _browse(url: str, seconds: float) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        for path in ("", "workers"):
            page.goto(url.partition("?")[0] + path)
            page.wait_for_timeout(seconds * 1000)
            updates = page.evaluate(UPDATES)
            found[f"page {path or 'overview'}"] = {
                "first_paint_ms": page.evaluate(PAINT)[0],
                "updates": len(updates),
                "update_ms": statistics.median(updates) if updates else None,
                "longest_update_ms": max(updates, default=None),
                "rows": page.locator("tbody tr").count(),
                "bytes": page.evaluate("performance.getEntriesByType('navigation')[0].encodedBodySize"),
            }
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8, help="of each agent")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    print(json.dumps(measure(given.agents, given.workers, given.seconds), indent=1))


if __name__ == "__main__":
    main()
