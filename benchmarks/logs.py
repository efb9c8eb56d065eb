"""Measure a flood of log lines: ``python -m benchmarks.logs [--lines 50000] [--seconds 30] [--workers 8]``.

Workers on a node of their own print lines at a rate. The figures: the rate that they reached; whether their log files
are byte-exact; the growth of the resident memory of their agentd and of the head, from before to the highest value; and
how many lines the driver showed, held back and left out, which must be all together.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker
from rlinf_actors.testing import LocalCluster

TICK_S = 0.01
"""Seconds between two bursts of a worker."""
PAD = "loss 0.123456 reward 0.987654 tokens 4096 sample throughput ok"
GROUP = "flood"
_SHOWN = re.compile(rf"\[{GROUP}:\d+@[^] ]*\] ")
_HELD = re.compile(r"([\d,]+) lines held back")
_LEFT = re.compile(r"([\d,]+) lines were left out")


class Flooder(Worker):
    def flood(self, lines_s: float, seconds: float) -> dict[str, Any]:
        """Print *lines_s* lines a second, and return how many they were, their hash, and the seconds that it took."""
        digest, number, start = hashlib.sha256(), 0, time.monotonic()
        while (now := time.monotonic()) < start + seconds:
            due = int((now - start + TICK_S) * lines_s)
            for n in range(number, due):
                line = f"rank {self._rank} step {n} {PAD}"
                print(line)
                digest.update(f"{line}\n".encode())
            number = due
            sys.stdout.flush()
            time.sleep(TICK_S)
        return {"lines": number, "sha256": digest.hexdigest(), "seconds": time.monotonic() - start}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The result.

    Attributes:
        lines: number of lines that the workers printed.
        lines_s: lines a second.
        exact: True if every log file has what its worker printed, and nothing else.
        agentd_mib, head_mib: growth of the resident memory.
        shown, held, left: lines that the driver printed, held back, and left out at its end.
        counted: True if the driver knew at its end how many lines each node has not sent.
    """

    lines: int
    lines_s: float
    exact: bool
    agentd_mib: float
    head_mib: float
    shown: int
    held: int
    left: int
    counted: bool


def measure(workers: int, lines_s: float, seconds: float, folder: Path) -> Figures:
    """Measure *workers* workers that print *lines_s* lines a second together. *folder* gets the driver's output."""
    with LocalCluster(2) as local:
        head, node = local.nodes
        said = [folder / "stdout", folder / "stderr"]
        command = [
            sys.executable,
            "-m",
            "benchmarks.logs",
            "--drive",
            str(workers),
            str(lines_s / workers),
            str(seconds),
        ]
        with said[0].open("wb") as out, said[1].open("wb") as err:
            driver = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, env={**os.environ, **local.driver_env}
            )
        before = None
        while driver.poll() is None:
            text = said[1].read_text(errors="replace")
            if before is None and "ready" in text:
                before = [_resident(one.pid, "VmRSS") for one in (node, head)]
                assert driver.stdin is not None
                driver.stdin.close()
            time.sleep(0.1)
        after = [_resident(one.pid, "VmHWM") for one in (node, head)]
        assert before is not None, said[1].read_text()
        out_text, err_text = (path.read_text(errors="replace") for path in said)
        results = json.loads(next(line for line in out_text.splitlines() if line.startswith("[{")))
        files = [_sha256(Path(node.log_dir), rank) for rank in range(workers)]
    lines = sum(one["lines"] for one in results)
    return Figures(
        lines,
        lines / max(one["seconds"] for one in results),
        files == [one["sha256"] for one in results],
        (after[0] - before[0]) / 1024,
        (after[1] - before[1]) / 1024,
        len(_SHOWN.findall(out_text)),
        _sum(_HELD, err_text),
        _sum(_LEFT, err_text),
        "not every node has said" not in err_text,
    )


def _sum(pattern: re.Pattern[str], text: str) -> int:
    return sum(int(number.replace(",", "")) for number in pattern.findall(text))


def _resident(pid: int, key: str) -> int:
    """Return the resident memory of a process in KiB: "VmRSS" now, "VmHWM" at most."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(f"{key}:")).split()[1])


def _sha256(logs: Path, rank: int) -> str:
    """Return the hash of a worker's log file, with its older part first."""
    (path,) = logs.glob(f"*/{GROUP}-{rank}.out")
    digest = hashlib.sha256()
    for part in (path.with_name(f"{path.name}.1"), path):
        if part.exists():
            with part.open("rb") as file:
                while data := file.read(1 << 20):
                    digest.update(data)
    return digest.hexdigest()


def drive(workers: int, lines_s: float, seconds: float) -> None:
    """Be the driver: launch the workers, say "ready", wait for the end of stdin, flood, and print their results."""
    with Cluster(num_nodes=2) as cluster:
        group: Any = Flooder.create_group().launch(cluster, NodePlacementStrategy([1] * workers), name=GROUP)
        group.flood(1, 0.0).wait()
        print("ready", file=sys.stderr, flush=True)
        sys.stdin.read()
        print(json.dumps(group.flood(lines_s, seconds).wait(seconds + 60)), flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.logs")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lines", type=float, default=50_000, help="lines a second of all workers")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--keep", metavar="DIR", default=".", help="directory for the output of the driver")
    parser.add_argument("--drive", nargs=3, metavar=("WORKERS", "LINES", "SECONDS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(int(given.drive[0]), float(given.drive[1]), float(given.drive[2]))
        return
    found = measure(given.workers, given.lines, given.seconds, Path(given.keep))
    for name, value in dataclasses.asdict(found).items():
        print(f"{name:<12}{value:>14,.1f}" if isinstance(value, float) else f"{name:<12}{value!s:>14}")


if __name__ == "__main__":
    main()
