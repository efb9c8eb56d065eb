"""Locks of what a node keeps: they end with their holders, survive removals, and keep what templates run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pace
import pytest

from rlinf_actors.codesync import locks
from rlinf_actors.settings import CODE_DIR


def held(lock: locks.Lock | None) -> locks.Lock:
    assert lock is not None
    return lock


def test_users_share_and_exclude_a_remover(tmp_path):
    entry = str(tmp_path / "entry")
    first, second = held(locks.hold(entry)), held(locks.hold(entry))
    assert locks.take(entry, wait=False) is None
    first.release()
    assert locks.take(entry, wait=False) is None
    second.release()
    alone = held(locks.take(entry, wait=False))
    assert locks.hold(entry, wait=False) is None
    assert alone.share()
    held(locks.hold(entry, wait=False)).release()
    alone.release()
    alone.release()  # harmless


def test_waiting_process_does_not_get_the_lock_of_a_removed_entry(tmp_path):
    entry = str(tmp_path / "entry")
    remover = held(locks.take(entry))
    got: list[locks.Lock | None] = []
    waiting = threading.Thread(target=lambda: got.append(locks.hold(entry)))
    waiting.start()
    remover.remove()
    remover.release()
    waiting.join(pace.PATIENCE_S)
    assert os.fstat(held(got[0])._fd).st_ino == os.stat(entry + locks.SUFFIX).st_ino
    held(got[0]).release()


HOLDER = """
import os, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
from rlinf_actors.codesync import locks
assert locks.hold_own({"RLINF_ACTORS_CODE_DIR": sys.argv[1]}, sys.prefix) == ""
if os.fork() == 0:  # as a template forks a worker
    print("held", flush=True)
    sys.stdin.read()
    os._exit(0)
os._exit(0)
"""


def test_worker_holds_what_its_template_held(tmp_path):
    entry = tmp_path / "tree"
    entry.mkdir()
    command = [sys.executable, "-c", HOLDER, str(entry), os.pathsep.join(sys.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as template:
        assert template.stdout is not None
        assert template.stdin is not None
        assert template.stdout.readline() == "held\n"
        assert template.wait(pace.PATIENCE_S) == 0
        assert locks.take(str(entry), wait=False) is None  # the forked process lives
        template.stdin.close()
    held(locks.take(str(entry))).release()


def test_killed_holder_holds_nothing(tmp_path):
    entry = tmp_path / "tree"
    entry.mkdir()
    code = HOLDER.replace("if os.fork() == 0:", "if True:")
    command = [sys.executable, "-c", code, str(entry), os.pathsep.join(sys.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert locks.take(str(entry), wait=False) is None
        holder.send_signal(signal.SIGKILL)
    held(locks.take(str(entry), wait=False)).release()


class TestHoldOwn:
    @pytest.fixture(autouse=True)
    def released(self, monkeypatch):
        kept: list[locks.Lock] = []
        monkeypatch.setattr(locks, "_own", kept)
        yield kept
        for lock in kept:
            lock.release()

    def test_code_and_environment_are_held(self, tmp_path, released):
        code, prefix = tmp_path / "code", tmp_path / "env"
        code.mkdir()
        prefix.mkdir()
        held(locks.hold(str(prefix))).release()  # its builder made the lock
        assert locks.hold_own({CODE_DIR: str(code)}, str(prefix)) == ""
        assert len(released) == 2
        assert locks.take(str(code), wait=False) is locks.take(str(prefix), wait=False) is None
        assert locks.last_used(str(code)) > 0

    def test_interpreter_without_a_lock_is_nobodys_environment(self, tmp_path, released):
        assert locks.hold_own({}, str(tmp_path)) == ""
        assert released == []
        assert not (tmp_path.parent / f"{tmp_path.name}.lock").exists()

    def test_removed_code_is_told(self, tmp_path):
        assert "launch the group again" in locks.hold_own({CODE_DIR: str(tmp_path / "gone")}, str(tmp_path))
