"""The simulation of a cluster, at a small size: every phase has its figures, and no process is left. Never a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import agent_processes, cluster, folder, report

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
    sizes = ("--agents", "8", "--workers", "3", "--seconds", "0.1")
    done = scale("cluster", *sizes, "--skip", "node", "--json", str(path), *keys)
    assert done.returncode == 0, done.stdout + done.stderr
    (size,) = json.loads(path.read_text())["sizes"]
    assert (size["agents"], size["per_agent"], size["keys"]) == (8, 3, bool(keys))
    for part, name, _, _, _ in report.ROWS:
        assert part not in QUICK or size["figures"][part][name] >= 0, (part, name)


def test_agents_are_split_over_processes_that_have_descriptors_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str, dict[str, Any]]] = []

    class Process:
        def __init__(self, first: int, count: int) -> None:
            self.first, self.count = first, count

        def give(self, order: str, **given: Any) -> None:
            asked.append((self.first, order, given))

        def answer(self, order: str) -> Any:
            return {"times": [float(self.first + n) for n in range(self.count)]}

        def ask(self, order: str, **given: Any) -> Any:
            self.give(order, **given)
            return {f"{self.first}-{n}": 0.0 for n in range(given.get("count", 0))}

    monkeypatch.setattr(agent_processes.resource, "getrlimit", lambda kind: (1024, 2000))
    agents = agent_processes.AgentProcesses(Process, agents=250, per_agent=10)  # type: ignore[arg-type]
    assert [(one.first, one.count) for one in agents._processes] == [(0, 100), (100, 100), (200, 50)]  # type: ignore[attr-defined]
    assert agents.registrations("join", limit_s=1.0) == {"first_s": 0.0, "half_s": 125.0, "all_s": 249.0}
    assert len(agents.kill_workers(20, 0.0)) == 20
    asked.clear()
    agents.ask_of("lose", 249)
    assert asked == [(200, "lose", {"node": 249})]


def test_phase_that_needs_more_descriptors_than_the_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.resource, "getrlimit", lambda kind: (1024, 20000))
    cluster.check_descriptors(5000, "the head has a connection to each agent")
    with pytest.raises(RuntimeError, match=r"the hard limit is 20000 file descriptors .*--skip"):
        cluster.check_descriptors(50000, "the driver has a connection to each worker")


def test_folder_of_a_killed_run_is_removed_and_that_of_a_living_run_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{folder.PREFIX}left"
    left.mkdir()
    (left / folder.LOCK).touch()
    (tmp_path / f"{folder.PREFIX}other").mkdir()  # not a run's
    with folder.folder_of_run() as living:
        assert not left.exists()
        folder.remove_left()
        assert os.path.isdir(living)
    assert [path.name for path in tmp_path.iterdir()] == [f"{folder.PREFIX}other"]


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
