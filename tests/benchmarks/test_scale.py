"""The simulation of a cluster, at a small size: every phase has its figures, and no process is left. Never a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale import cluster, report

ROOT = Path(__file__).resolve().parents[2]
QUICK = [phase for phase in cluster.PHASES if phase != "node"]
"""All phases except the one that waits for the lease of a node, 10 s."""


def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "scale", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)


@pytest.mark.live
@pytest.mark.parametrize("keys", [(), ("--keys",)], ids=["plain", "keys"])
def test_every_phase_has_its_figures(keys: tuple[str, ...], tmp_path: Path, rlinf_leak_check: None) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--agents", "20", "--workers", "3", "--seconds", "0.2")
    done = scale("cluster", *sizes, "--skip", "node", "--json", str(path), *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    (size,) = json.loads(path.read_text())["sizes"]
    assert (size["agents"], size["per_agent"], size["keys"]) == (20, 3, bool(keys))
    for part, name, _, _, _ in report.ROWS:
        assert part not in QUICK or size["figures"][part][name] >= 0, (part, name)


def test_parts_without_processes_have_their_figures() -> None:
    done = scale("placement", "tables", "--agents", "5,10", "--workers", "8")
    assert done.returncode == 0, done.stderr
    heading = done.stdout.splitlines()[0]
    assert "5 × 8" in heading
    assert "10 × 8" in heading
    titles = [title for part, _, title, _, _ in report.ROWS if part == "tables" or part.startswith("placement")]
    assert all(title in done.stdout for title in titles)


def test_a_phase_that_fails_is_named_and_does_not_hide_the_figures_before() -> None:
    figures = {"join": {"all_s": 0.5}, "idle": {"error": "RuntimeError: the head ended with 1"}}
    shown = report.text([{"agents": 10, "per_agent": 2, "keys": False, "figures": figures}])
    assert "500 ms" in shown
    assert "10 × 2: idle: RuntimeError: the head ended with 1" in shown


def test_unknown_parts_phases_and_sizes_are_named() -> None:
    for arguments, named in (
        (("clusters",), "clusters"), (("--skip", "rest"), "rest"), (("--agents", "many"), "many"),
    ):  # fmt: skip
        done = scale(*arguments)
        assert done.returncode == 64
        assert named in done.stderr
