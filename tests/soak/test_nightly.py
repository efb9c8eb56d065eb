"""tests/nightly.py, the command that runs the long forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nightly
import pace
import pytest
from nightly import LEGS, Leg

HIDDEN = """
import subprocess, sys, time
print("begun", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
time.sleep(1000)
"""
REPORTS = """
import sys
sys.path.insert(0, "tests")
from nightly import Figures
for n in range(3):
    Figures("one", sys.argv[1]).done(n, 5, "rounds")
Figures("other", sys.argv[1]).done(5, 5, "rounds")
Figures("other", sys.argv[1]).add("p99", "3 ms")
"""


def python(name: str, code: str, limit_s: float = pace.PATIENCE_S) -> Leg:
    return Leg(name, (sys.executable, "-c", code, "{figures}"), 1, "times", limit_s)


def main(legs: list[Leg], folder: Path, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    code = nightly.main(["--report", str(folder), *arguments], legs)
    return code, json.loads((folder / "report.json").read_text())["legs"]


def test_every_leg_is_listed_and_none_runs(capsys):
    assert nightly.main(["--list"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [leg.name for leg in LEGS]


@pytest.mark.parametrize("leg", LEGS, ids=lambda leg: leg.name)
def test_options_and_files_of_a_leg_exist(leg, request):
    for word in leg.command[len(nightly.PYTEST) :]:
        if word.startswith("--"):
            request.config.getoption(word)  # raises if the file is missing
        elif "/" in word:
            assert (nightly.ROOT / word).exists()


def test_failed_leg_does_not_stop_the_others(tmp_path, capsys):
    legs = [python("fails", "print('why'); raise SystemExit(3)"), python("reports", REPORTS)]
    code, (fails, reports) = main(legs, tmp_path, "--parallel", "1", "--seed", "7")
    assert code == 1
    assert fails["outcome"] == "failed (exit code 3)"
    assert (reports["outcome"], reports["done"]) == ("passed", ["7 of 10 rounds"])
    assert reports["figures"] == [["p99", "3 ms"]]
    assert (tmp_path / "fails.log").read_text() == "why\n"
    text = (tmp_path / "report.md").read_text()
    assert "| reports | 1 times | 7 of 10 rounds | passed |" in text
    assert "## fails: failed (exit code 3)" in text
    assert "why" in text
    assert text in capsys.readouterr().out


def test_leg_that_times_out_fails_keeps_its_output_and_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(nightly, "INTERRUPTED_S", 0.5)
    monkeypatch.setattr(nightly, "LEFT_S", 0.5)
    marks = []
    monkeypatch.setattr(nightly, "_marked", lambda mark, marked=nightly._marked: marks.append(mark) or marked(mark))
    code, (leg,) = main([python("hangs", HIDDEN, limit_s=2.0 * pace.slowness)], tmp_path)
    assert code == 1
    assert str(leg["outcome"]).startswith("took longer than ")
    assert (tmp_path / "hangs.log").read_text().startswith("begun\n")
    monkeypatch.undo()
    assert pace.again_like(lambda: [list(nightly._marked(mark)) for mark in marks], [[]]) == [[]]


def test_leg_that_leaves_a_process_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(nightly, "LEFT_S", 0.5)
    code, (leg,) = main([python("leaves", HIDDEN.rpartition("time.sleep")[0])], tmp_path)
    assert code == 1
    assert str(leg["outcome"]).startswith("left processes: python")


def test_leg_without_any_work_fails(tmp_path):
    code, (leg,) = main([python("skipped", "")], tmp_path)
    assert (code, leg["outcome"]) == (1, "nothing was done")


def test_an_unknown_leg_is_named(capsys):
    with pytest.raises(SystemExit):
        nightly.main(["--only", "sauna"])
    assert "no leg sauna; the legs are chaos, " in capsys.readouterr().err


@pytest.mark.live
def test_nightly_command_runs_one_short_leg(tmp_path):
    command = [sys.executable, "-m", "tests.nightly", "--only", "calls", "--scale", "0.0001", "--report", str(tmp_path)]
    done = subprocess.run(command, cwd=nightly.ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (leg,) = json.loads((tmp_path / "report.json").read_text())["legs"]
    assert leg["outcome"] == "passed"
    assert "1 of 1 tests" in leg["done"]
    assert "1,000 of 1,000 calls" in (tmp_path / "report.md").read_text()
