"""The harness itself, on the quickest raw case: the shape of what it writes, never a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOTYPE = pytest.mark.nightly("only benchmarks use the prototype that figures are compared with")


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLINF_BENCH")}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_compare_writes_every_sample_and_the_ratios(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    done = benchmarks("compare", "one_call", "--reps", "1", "--backends", "zmq", "--json", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["schema"] == 2
    assert report["backends"] == ["zmq"]
    assert report["repetitions"] == 1
    assert report["machine"]["processors"] >= 1
    (session,) = report["sessions"]
    assert (session["case"], session["backend"], session["repetition"]) == ("one_call", "zmq", 1)
    assert session["error"] == ""
    assert session["figures"].keys() == {"ping_pong"}
    assert session["left_running"] == []
    assert session["left_files"] == []
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["await"]["raw"] == session["figures"]["ping_pong"] > 0
    assert rows["await"]["ours"] is None
    assert rows["await"]["reached"] is None
    assert "wait() from a plain script" in done.stdout


@PROTOTYPE
@pytest.mark.live
def test_the_prototype_measures_its_cases() -> None:
    done = benchmarks("compare", "one_call", "in_flight", "fan_out", "--reps", "1", "--backends", "prototype")
    assert done.returncode == 0, done.stderr


@PROTOTYPE
def test_the_prototype_measures_transfers() -> None:
    code = "from benchmarks.raw import prototype; prototype.RUNS = {1: 4}; assert len(prototype.transfers()) == 2"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr


@PROTOTYPE
@pytest.mark.parametrize("size", [100, 1 << 20])
@pytest.mark.parametrize("window", [1, 16])
def test_queue_of_the_prototype_passes_all_items(size: int, window: int) -> None:
    code = f"from benchmarks.raw.prototype import rate; assert rate({size}, 50, {window}) > 0"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr


def test_an_unknown_case_or_backend_is_named_with_those_that_exist() -> None:
    done = benchmarks("compare", "one_cal", "--backends", "zmq")
    assert done.returncode == 64
    assert "one_cal" in done.stderr
    assert "one_call" in done.stderr
    done = benchmarks("compare", "one_call", "--backends", "zqm")
    assert done.returncode == 64
    assert "zqm" in done.stderr
    assert "ours, zmq, prototype, ray" in done.stderr


def test_a_named_interpreter_for_ray_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = benchmarks("compare", "one_call", "--backends", "ray", "--ray-python", str(tmp_path / "python"))
    assert done.returncode == 64
    assert str(tmp_path / "python") in done.stderr
