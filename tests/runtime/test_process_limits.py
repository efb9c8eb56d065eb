"""Errors of exhausted processes or threads name the limit and how to raise it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlinf_actors import exhaustion
from rlinf_actors.wire import failure


class Machine:
    """A /proc and the pids controllers that it names."""

    def __init__(self, root: Path, own: str, version: int = 2) -> None:
        self.proc, self.top = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,pids")
        (self.proc / "self/mountinfo").write_text(f"30 25 0:26 / {self.top} rw,relatime - {kind} {kind} {options}\n")
        (self.proc / "self/cgroup").write_text(f"{'0:' if version == 2 else '8:pids'}:/{own}\n")

    def cgroup(self, path: str, limit: str, now: int, hits: int = 0) -> Path:
        directory = self.top / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("max", limit), ("current", now), ("events", f"max {hits}")):
            (directory / f"pids.{name}").write_text(f"{text}\n")
        return directory

    def processes(self, count: int) -> None:
        for pid in range(1, count + 1):
            (self.proc / f"{pid}/task/{pid}").mkdir(parents=True)


@pytest.mark.parametrize("version", [1, 2])
def test_workers_own_limit_is_reported_as_pids_limit(tmp_path, version):
    machine = Machine(tmp_path, "user/rlinf-actors/1.2.3.w-0", version)
    directory = machine.cgroup("user/rlinf-actors/1.2.3.w-0", "24", 4, hits=3)
    said = exhaustion.no_process(machine.proc)
    assert said.startswith("pids_limit=24 of this worker is exhausted")
    assert f"cgroup {directory} may have 24 processes and threads together, and has 4 now" in said
    assert "raise pids_limit of launch()" in said


def test_limit_of_a_parent_cgroup_is_found(tmp_path):
    machine = Machine(tmp_path, "system/agentd.service/main")
    machine.cgroup("system/agentd.service/main", "max", 90)
    above = machine.cgroup("system/agentd.service", "100", 100)
    machine.cgroup("system", "200", 150)
    said = exhaustion.no_process(machine.proc)
    assert f"cgroup {above} may have 100" in said
    assert f"raise {above}/pids.max (TasksMax= of a systemd unit" in said


@pytest.mark.parametrize("used", [20, 40])
def test_exhausted_ulimit_u_is_named(tmp_path, monkeypatch, used):
    machine = Machine(tmp_path, "")
    machine.cgroup("", "max", 1)
    machine.processes(used)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid or 1)
    monkeypatch.setattr(exhaustion, "_threads_of", lambda proc, uid: used)
    said = exhaustion.no_process(machine.proc)
    if used == 40:
        assert "ulimit -u is exhausted" in said
        assert "may have 40 processes and threads, and has 40 now" in said
    else:
        assert said.startswith("a limit of processes and threads is met: pids.max of a cgroup")


def test_all_threads_of_the_user_are_counted():
    tasks = len(os.listdir("/proc/self/task"))
    assert exhaustion._threads_of(Path("/proc"), os.getuid()) >= tasks


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RuntimeError("can't start new thread"), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (RuntimeError("another"), False),
        (OSError(errno.ENOENT, "No such file"), False),
    ],
)
def test_the_error_of_a_call_names_the_limit(monkeypatch, error, named):
    monkeypatch.setattr(exhaustion, "_met", lambda proc: "pids_limit=24 of this worker is exhausted")
    raised, _ = failure.encode(1, error)
    assert raised.text == (f"{error}: pids_limit=24 of this worker is exhausted" if named else str(error))


def test_eagain_of_a_descriptor_is_not_reported_as_a_limit(monkeypatch):
    monkeypatch.setattr(exhaustion, "_met", lambda proc: "")
    assert exhaustion.cause(BlockingIOError(errno.EAGAIN, "would block")) == ""
    assert "ulimit -u" in exhaustion.cause(RuntimeError("can't start new thread"))


def test_threads_of_the_check_have_ended_when_it_returns():
    """libzmq creates its threads next, and aborts the process if one cannot start."""
    source = """
        import os
        from rlinf_actors import exhaustion as scarce
        for _ in range(200):
            scarce.check_threads(2)
            print(len(os.listdir("/proc/self/task")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1"] * 200, done.stderr


def test_error_reports_that_the_user_may_have_no_more_threads():
    if os.getuid():
        pytest.skip("needs root, to become a user of whom nothing else runs")
    source = """
        import os, resource
        from rlinf_actors import exhaustion as scarce
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        os.setresuid(54321, 54321, 54321)
        try:
            scarce.check_threads(2)
        except RuntimeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("can't start new thread: ulimit -u is exhausted: user 54321 may have 1"), done.stderr
