"""agentd under the shipped unit: its notifications, its journal lines, and the effect of a stop or a crash on its
workers. unit_kit stands in for systemd; everything else is real.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
from pathlib import Path

import pace
import pytest
import unit_kit as kit

from agentd.run_dir import SECRET_BYTES
from rlinf_actors import NodePlacementStrategy
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

ON_IT = NodePlacementStrategy([1])


@pytest.fixture(scope="module")
def head():
    """A head with long timers, since this machine may be busy."""
    with LocalCluster(1, options=pace.timers(beat_s=0.2, lease_s=60)) as local:
        yield local


@pytest.fixture
def place():
    """The unit's directories. Each test's agentd knows the secret of those before it, and so takes the node's place."""
    with tempfile.TemporaryDirectory(prefix="un-", dir="/tmp") as path:
        run = Path(path, "run")
        run.mkdir(mode=0o700)
        (run / "secret").touch(mode=0o600)
        (run / "secret").write_text("0" * 2 * SECRET_BYTES)
        yield Path(path)


@pytest.fixture
def unit(head, place):
    stand_in = kit.StandIn(place, kit.configured(place, head.head), head.keys)
    yield stand_in
    stand_in.close()


@pytest.fixture
def group(head, unit):
    unit.start()
    cluster = head.cluster(2)
    yield kit.Sitting.create_group().launch(cluster, ON_IT).wait_ready()
    cluster.shutdown()


def assert_all_ended(pidfds) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], pace.PATIENCE_S)[0], "the process still runs"
        os.close(pidfd)


def test_notifications_of_one_life_reach_the_service_manager(place, unit, head):
    unit.start()
    ready = unit.said[-1]
    while not ready["STATUS"].startswith("registered"):  # the head's first answer came late
        ready = unit.wait_for("STATUS")
    assert ready["STATUS"] == f"registered; head: tcp://{head.head}; no accelerators or robots"
    (place / "agentd.d").mkdir()
    (place / "agentd.d" / "10.toml").write_text('[node]\nname = "other"\nlabels = {a = "b"}\n')
    unit.signal(signal.SIGHUP)
    assert "MONOTONIC_USEC" in unit.wait_for("RELOADING")
    assert unit.wait_for("READY")["STATUS"] == f"a restart is needed for: node.name; {ready['STATUS']}"
    (place / "agentd.d" / "10.toml").write_text("[nodes]\n")
    unit.signal(signal.SIGHUP)
    unit.wait_for("RELOADING")
    assert "did you mean 'node'" in unit.wait_for("READY")["STATUS"]
    unit.stop()
    assert unit.wait_for("STOPPING")["STATUS"] == "stopping: SIGTERM"
    assert unit.said[0] == {"WATCHDOG": "1"}
    lines = unit.written()
    assert not [line for line in lines if line[:3] not in ("<3>", "<4>", "<6>", "<7>")]
    assert "<4>WARNING: a restart is needed for: node.name" in lines
    assert "<6>INFO: configuration read again; taken over: node.labels" in lines
    assert [line[:3] for line in lines if "the configuration stays as it was" in line] == ["<3>"]


def test_watchdog_is_notified_while_the_loop_runs(head, place):
    with contextlib.closing(kit.StandIn(place, kit.configured(place, head.head), head.keys, watchdog_s=0.2)) as unit:
        unit.start()
        for _ in range(3):
            unit.wait_for("WATCHDOG")
        unit.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, unit.process.pid, os.WSTOPPED | os.WNOWAIT)
        while select.select([unit.manager], [], [], 0)[0]:
            unit.manager.recv(4096)
        assert select.select([unit.manager], [], [], 0.5)[0] == [], "five beats are missing"
        unit.signal(signal.SIGCONT)
        unit.wait_for("WATCHDOG")
        unit.stop()


def test_workers_survive_kill_9_and_a_hand_over(unit, group):
    before = group.pids().wait()
    for number in (signal.SIGKILL, signal.SIGUSR1):
        unit.signal(number)
        assert unit.ended(), "the unit restarts agentd"
        unit.start()
        assert group.pids().wait() == before
    spared = [line for line in unit.written() if "nothing is ended" in line]
    assert ["it ended unasked (signal)" in spared[0], "it handed over" in spared[1]] == [True, True]


def test_stop_ends_workers_even_if_agentd_is_stalled(unit, group):
    pidfds = [os.pidfd_open(pid) for pid in group.pids().wait()[0]]
    unit.signal(signal.SIGSTOP)
    unit.signal(signal.SIGTERM)
    unit.signal(signal.SIGKILL)  # TimeoutStopSec= is over
    unit.ended("timeout")
    assert_all_ended(pidfds)
    assert any(line.endswith("and are ended: 1") for line in unit.written())
    assert sorted(path.name for path in unit.run_dir.iterdir() if path.is_file()) == ["lock", "secret"]
    unit.start()  # tells the head of it


def test_crash_during_a_stop_leaves_no_worker(unit, group):
    pidfds = [os.pidfd_open(pid) for pid in group.pids().wait()[0]]
    (unit.run_dir / "stopping").touch()  # agentd was asked to stop, and is killed before it stops its workers
    unit.signal(signal.SIGKILL)
    unit.ended()
    assert_all_ended(pidfds)
    unit.start()


def test_workers_do_not_inherit_the_units_variables(unit, group):
    pid, template = group.pids().wait()[0]
    environment = group.environment().wait()[0]
    told = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "INVOCATION_ID", "JOURNAL_STREAM", "RUNTIME_DIRECTORY",
            "STATE_DIRECTORY", "LOGS_DIRECTORY", "SYSTEMD_EXEC_PID"}  # fmt: skip
    assert not told & environment.keys()
    if kit.oom_score(unit.process.pid) != -500:
        pytest.skip("this user may not lower oom_score_adj (CAP_SYS_RESOURCE)")
    assert (kit.oom_score(template), kit.oom_score(pid)) == (-500, 0)


def test_configuration_error_is_not_restarted(place, unit):
    (place / "agentd.toml").write_text("[haed]\n")
    unit.begin()
    assert unit.process.wait(pace.PATIENCE_S) == 78
    (place / "agentd.toml").write_text("[head]\n")
    assert unit.ended() is False
    assert unit.written()[0].startswith("<3>")
    assert "did you mean 'head'" in unit.written()[0]
