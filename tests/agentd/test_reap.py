"""`agentd --reap`: whom it ends, whom it spares, and what it says where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pace
import pytest

from agentd.adoption import spared
from agentd.run_dir import RunDir, was_stopping

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("result", "stop_asked", "why"),
    [
        ("", False, ""),
        ("", True, ""),
        ("success", True, ""),
        ("signal", True, ""),
        ("timeout", False, ""),
        ("success", False, "it handed over"),
        ("signal", False, "it ended unasked (signal)"),
        ("watchdog", False, "it ended unasked (watchdog)"),
        ("oom-kill", False, "it ended unasked (oom-kill)"),
        ("exit-code", False, "it ended unasked (exit-code)"),
    ],
)
def test_who_is_spared(result, stop_asked, why):
    assert spared(result, stop_asked).startswith(why)
    assert bool(spared(result, stop_asked)) == bool(why)


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="rp-") as path:
        yield path


def reap(run_dir: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLINF")}
    return subprocess.run(
        [sys.executable, "-m", "agentd", "--reap", "--run-dir", run_dir],
        env={**clean, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True, check=False,
        timeout=pace.PATIENCE_S,
    )  # fmt: skip


@pytest.mark.live
def test_where_there_is_nothing_it_says_so(run_dir):
    done = reap(f"{run_dir}/none")
    assert done.returncode == 0
    assert "there is nothing to reap" in done.stderr
    assert not os.path.exists(f"{run_dir}/none")


@pytest.mark.live
def test_an_agentd_that_runs_is_left_alone(run_dir):
    held = RunDir.open(run_dir, {})
    done = reap(run_dir)
    held.close()
    assert done.returncode == 78
    assert "is used by another agentd" in done.stderr


@pytest.mark.live
def test_the_mark_of_a_stop_goes_with_what_it_was_for(run_dir):
    held = RunDir.open(run_dir, {})
    held.mark_stopping()
    held.mark_stopping()
    assert was_stopping(run_dir)
    held.close()
    assert reap(run_dir, SERVICE_RESULT="success").returncode == 0
    assert not was_stopping(run_dir)


def test_an_agentd_that_begins_forgets_what_the_last_one_was_told(run_dir):
    held = RunDir.open(run_dir, {})
    held.mark_stopping()
    held.begin()
    held.begin()
    assert not was_stopping(run_dir)
    held.close()
