"""`agentd --reap`: the workers that it ends or spares, and its messages."""

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
from rlinf_actors.net import holders

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
def test_spared_decides_by_result_and_stop_request(result, stop_asked, why):
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
def test_reap_of_a_missing_directory_says_so(run_dir):
    done = reap(f"{run_dir}/none")
    assert done.returncode == 0
    assert "there is nothing to reap" in done.stderr
    assert not os.path.exists(f"{run_dir}/none")


@pytest.mark.live
def test_reap_leaves_a_running_agentd_alone(run_dir):
    held = RunDir.open(run_dir, {})
    done = reap(run_dir)
    held.close()
    assert done.returncode == 78
    assert f"is used by another agentd, {holders.process(os.getpid())}: end that one" in done.stderr


@pytest.mark.live
def test_reap_removes_the_mark_of_a_stop(run_dir):
    held = RunDir.open(run_dir, {})
    held.mark_stopping()
    held.mark_stopping()
    assert was_stopping(run_dir)
    held.close()
    assert reap(run_dir, SERVICE_RESULT="success").returncode == 0
    assert not was_stopping(run_dir)


def test_starting_agentd_removes_the_mark_of_an_earlier_stop(run_dir):
    held = RunDir.open(run_dir, {})
    held.mark_stopping()
    held.begin()
    held.begin()
    assert not was_stopping(run_dir)
    held.close()
