"""Search for a place for workers' cgroups, on invented machines: a directory stands for the kernel's file system."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from agentd.launch_plan import LaunchPlan, Rules, Site, TemplateKey
from agentd.users import User
from agentd.worker_process import WorkerProcess
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker_cgroup import Cgroup, prepare
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import WorkerSpec
from rlinf_actors.wire.worker_questions import RecordTrace


@pytest.fixture
def machine(tmp_path):
    """Return a function that builds a machine, with `find` for it."""

    def build(*mounts, own="", two="memory pids", enabled="", events=True, processes=""):
        proc, fs = tmp_path / "proc", tmp_path / "fs"
        (proc / "self").mkdir(parents=True)
        lines = []
        for name in mounts:
            directory = fs / name / own
            directory.mkdir(parents=True)
            kind = "cgroup2" if name == "unified" else "cgroup"
            lines.append(f"30 25 0:26 / {fs / name} rw,relatime - {kind} {kind} rw,{name}")
            (directory / "cgroup.procs").write_text(processes)
            if kind == "cgroup2":
                (directory / "cgroup.controllers").write_text(two)
                (directory / "cgroup.subtree_control").write_text(enabled)
                if events:
                    (directory / "cgroup.events").write_text("populated 1\n")
        (proc / "self/mountinfo").write_text("\n".join([*lines, "29 25 0:30 / /dev/shm rw - tmpfs shm rw"]))
        paths = [f"{n}:{'' if name == 'unified' else name}:/{own}" for n, name in enumerate(mounts)]
        (proc / "self/cgroup").write_text("".join(f"{path}\n" for path in paths))

        def here(wanted="auto", under_systemd=False):
            return find(wanted, str(proc), under_systemd)

        return SimpleNamespace(find=here, fs=fs, own=fs / "unified" / own)

    return build


def test_enabled_controllers_are_enforced(machine):
    made = machine("unified", own="a/b", enabled="pids memory", processes="1\n")
    assert made.find() == Roots(str(made.own), ("memory", "pids"))


def test_root_cgroup_with_processes_enforces_its_controllers(machine):
    made = machine("unified", events=False, processes="1\n")
    assert made.find().enforced == ("memory", "pids")


def test_cgroup_with_processes_enforces_no_limits(machine):
    found = machine("unified", own="box", processes="1\n").find()
    assert found.unified
    assert found.enforced == ()
    assert "cgroup" not in found.why
    assert "make an empty cgroup beside it" in found.missing(1 << 30, None)
    assert found.missing(None, None) == ""


def test_controllers_missing_in_v2_are_found_in_v1(machine):
    made = machine("unified", "memory", "pids", own="box", two="")
    found = made.find()
    assert found.unified == str(made.own)
    assert found.enforced == ()
    assert found.why == {}
    assert found.v1 == {name: str(made.fs / name / "box") for name in ("memory", "pids")}
    assert found.limits(5, None) == {"memory": 5}


def test_error_without_cgroups_says_how_to_mount_them(machine):
    found = machine().find()
    assert found.directories() == []
    assert set(found.why) == {"cgroup", "memory", "pids"}
    assert "mount -t cgroup2" in found.missing(None, 100)


def test_cgroup_that_systemd_did_not_delegate_is_not_used(machine):
    made = machine("unified", own="system.slice/agentd.service", events=True)
    found = made.find(under_systemd=True)
    assert found.directories() == []
    assert "delegated" in found.why["cgroup"]


def test_delegated_scope_enforces_limits(machine):
    made = machine("unified", own="run-7.scope", enabled="memory pids")
    try:
        os.setxattr(made.own, "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system has no user attributes")
    assert made.find(under_systemd=True).unified == str(made.own)


def test_the_unit_around_a_keepers_leaf_has_limits(machine):
    made = machine("unified", own="system.slice/rlinf-workers@lab.service/keeper", processes="1\n")
    unit = made.own.parent
    (unit / "cgroup.procs").write_text("")
    (unit / "cgroup.controllers").write_text("memory pids")
    (unit / "cgroup.events").write_text("populated 1\n")
    found = made.find(under_systemd=True)
    assert found == Roots(str(unit), ("memory", "pids"))
    assert found.missing(1 << 30, 100) == ""


def test_delegated_service_has_cgroups_without_limits(machine):
    made = machine("unified", own="system.slice/rlinf-agentd@lab.service", enabled="", processes="1\n")
    try:
        os.setxattr(made.own, "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system has no user attributes")
    found = made.find(under_systemd=True)
    assert (found.unified, found.enforced, prepare(found).enforced) == (str(made.own), (), ())
    assert "could not be restarted while they run" in found.missing(1 << 30, None)
    assert (made.own / "cgroup.subtree_control").read_text() == ""


def test_cgroups_can_be_switched_off(machine):
    found = machine("unified").find("off")
    assert found.directories() == []
    assert "switched off" in found.missing(1, None)


@pytest.mark.parametrize(
    ("wanted", "error"), [("/nowhere", "is no directory: mkdir /nowhere"), ("/tmp", "is not on cgroup v2")]
)
def test_impossible_configured_directory_raises_value_error(machine, wanted, error):
    with pytest.raises(ValueError, match=error):
        machine("unified").find(wanted)


@pytest.fixture
def chosen(machine):
    """A machine with an empty cgroup made for us: the machine, that directory, and our directory in it."""
    made = machine("unified")
    directory = made.fs / "unified/workers"
    for where in (directory, directory / "rlinf-actors"):
        where.mkdir()
        for name, text in (("controllers", "memory pids"), ("subtree_control", ""), ("procs", ""), ("events", "")):
            (where / f"cgroup.{name}").write_text(text)
    return SimpleNamespace(find=lambda: made.find(str(directory), under_systemd=True), directory=directory)


def test_a_configured_directory_is_used_under_systemd_too(chosen):
    assert chosen.find() == Roots(str(chosen.directory), ("memory", "pids"))


def test_prepare_enables_controllers(chosen):
    assert prepare(chosen.find()).enforced == ("memory", "pids")
    for directory in (chosen.directory, chosen.directory / "rlinf-actors"):
        assert (directory / "cgroup.subtree_control").read_text().startswith("+pids"), "the last of two writes"


def test_controller_that_the_kernel_refuses_is_not_enforced(chosen):
    (chosen.directory / "cgroup.subtree_control").unlink()
    (chosen.directory / "cgroup.subtree_control").mkdir()
    found = prepare(chosen.find())
    assert found.enforced == ()
    assert "cannot be passed on" in found.missing(1, 1)


def test_limits_are_written_to_v2_files(tmp_path, monkeypatch):
    made = tmp_path / "worker"
    real = os.mkdir

    def mkdir(path):  # the kernel fills a new cgroup
        real(path)
        for name in ("memory.max", "memory.oom.group", "pids.max"):
            (made / name).touch()

    monkeypatch.setattr(os, "mkdir", mkdir)
    Cgroup(str(made)).make({"memory": 1 << 30, "pids": 100})
    assert [(made / n).read_text() for n in ("memory.max", "memory.oom.group", "pids.max")] == [
        "1073741824",
        "1",
        "100",
    ]
    (made / "memory.events").write_text("max 3\noom 1\noom_kill 2\n")
    assert Cgroup(str(made)).oom_kills() == 2


@pytest.fixture
def worker(chosen, monkeypatch):
    """Return a function that makes agentd's record of a worker of another user, in a cgroup v2 with limits."""
    roots = prepare(chosen.find())
    made, real = Path(roots.unified, "rlinf-actors"), os.mkdir

    def mkdir(path, *mode):  # the kernel fills a new cgroup
        real(path, *mode)
        for name in ("memory.max", "memory.oom.group", "pids.max", "cgroup.procs"):
            Path(path, name).touch()

    monkeypatch.setattr(os, "mkdir", mkdir)
    user = User("lab", 61021, 61030, (), "/", "/bin/sh", "/", "/")
    place = WorkerPlace("/run", "host", "ipc:///nowhere", "n0", "127.0.0.1", "", "", "")
    site = Site(Rules("n0", "", cgroups=roots, user=user), Path("/run"), place, dict)
    template = mock.Mock(pid=os.getpid())
    plan = LaunchPlan(TemplateKey("python", ()), {}, "out", "err")

    def make(**fields):
        spec = WorkerSpec("w1", "g", "ns", 0, 1, 0, {}, memory_limit=1 << 30, pids_limit=100, **fields)
        return WorkerProcess(spec, plan, template, site), made

    return make


def test_limits_of_a_users_worker_are_set_by_agentd(worker):
    """In cgroup v2, which has both controllers; the worker's user cannot change them."""
    record, parent = worker()
    record.order(RecordTrace())
    (cgroup,) = parent.glob("*.w1")
    said = {path.name: path.read_text() for path in cgroup.iterdir()}
    assert said == {"memory.max": "1073741824", "memory.oom.group": "1", "pids.max": "100", "cgroup.procs": ""}
    record.watch(mock.Mock(), 1234, -1)
    assert (cgroup / "cgroup.procs").read_text() == "1234"
    assert not record.stopping


@pytest.mark.parametrize("best_effort", [True, False])
def test_users_worker_outside_its_cgroup_is_ended_if_it_has_limits(worker, best_effort, monkeypatch):
    record, parent = worker(limits_best_effort=best_effort)
    killed = []
    monkeypatch.setattr(WorkerProcess, "signal", lambda self, number: killed.append(number))
    record.order(RecordTrace())
    (cgroup,) = parent.glob("*.w1")
    (cgroup / "cgroup.procs").unlink()
    loop = mock.Mock(time=lambda: 0.0)
    record.watch(loop, 1234, -1)
    assert record.stopping is not best_effort
    if not best_effort:
        ((_, end, number),) = [call.args for call in loop.call_at.mock_calls]
        end(number)
        assert killed == [signal.SIGKILL]
        assert "cannot enter its cgroup" in record.reason


def test_missing_cgroup_counts_as_empty(tmp_path):
    none = Cgroup(str(tmp_path / "gone"), {"memory": str(tmp_path / "gone too")})
    none.kill()
    assert none.processes() == []
    assert none.oom_kills() is None
    assert none.remove()


def test_kill_continues_after_a_process_of_another_user(tmp_path, monkeypatch):
    (tmp_path / "cgroup.procs").write_text("11\n12\n")
    killed = []

    def kill(pid, number):
        if pid == 11:
            raise PermissionError
        killed.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    Cgroup("", {"pids": str(tmp_path)}).kill()
    assert killed == [(12, signal.SIGKILL)]
