"""An agentd ends and is started again: workers go on, ends during the gap are reported, nothing is left over."""

from __future__ import annotations

import io
import os
import queue
import select
import signal
from collections.abc import Iterator

import live_workers as lw
import pace
import pytest
import robot_kit as rk
from kept_workers import Kept

from rlinf_actors import (
    Cluster,
    ComponentPlacement,
    NodeLostError,
    NodePlacementStrategy,
    RestartPolicy,
    WorkerDiedError,
)
from rlinf_actors.testing import LocalCluster

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("module_leak_check")]

QUICK = pace.timers(beat_s=0.2, lease_s=3)
ON_ONE = NodePlacementStrategy([1])


@pytest.fixture(scope="module")
def kept_local(module_leak_check) -> Iterator[LocalCluster]:
    with LocalCluster(2, {"accelerators": 1}) as local:
        yield local


@pytest.fixture
def local(kept_local) -> Iterator[LocalCluster]:
    """The module's nodes, with an agentd that runs on each; the test's driver ends with the test."""
    yield kept_local
    if not kept_local.nodes[1].alive:
        kept_local.restart_agent(1)
    if Cluster.has_initialized():
        kept_local.cluster().shutdown()


@pytest.fixture
def group(local):
    return Kept.create_group().launch(local.cluster(), ON_ONE).wait_ready()


@pytest.fixture
def never(tmp_path):
    """A FIFO whose other end no process opens."""
    os.mkfifo(tmp_path / "never")
    return str(tmp_path / "never")


def ended(pid: int) -> int:
    """A pidfd, for `gone`."""
    return os.pidfd_open(pid)


def gone(*pidfds: int) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], pace.PATIENCE_S)[0], "it runs still"
        os.close(pidfd)


def test_workers_calls_and_groups_survive_a_killed_agentd(local, group, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    before = group.pids().wait()
    waiting = group.wait_for(str(fifo))
    local.kill_agent(1)
    fifo.write_text("in the gap")
    assert waiting.wait() == ["in the gap"]
    assert group.count().wait() == [1]
    for _ in range(2):
        local.restart_agent(1)
        assert group.pids().wait() == before
        local.kill_agent(1)
    local.restart_agent(1)
    assert group.count().wait() == [2]
    again = Kept.create_group().launch(local.cluster(), ON_ONE, name="again")
    assert again.pids().wait()[0][1] == before[0][1], "the template goes on as well"
    end = ended(before[0][0])
    group.shutdown()
    gone(end)


def test_workers_survive_a_planned_restart_of_agentd(local, group):
    before = group.pids().wait()
    os.kill(local.nodes[1].pid, signal.SIGUSR1)
    assert local.nodes[1].process.wait(pace.PATIENCE_S) == 0
    local.restart_agent(1)
    assert group.pids().wait() == before


@pytest.mark.parametrize("how", ["killed", "exit 3"])
def test_end_of_a_worker_during_the_gap_is_reported_after_it(local, group, how):
    pid = group.pids().wait()[0][0]
    end = ended(pid)
    if how == "killed":
        local.kill_agent(1)
        os.kill(pid, signal.SIGKILL)
    else:
        group.leave(3, "that was all").wait()
        local.kill_agent(1)
    gone(end)
    call = group.count()
    local.restart_agent(1)
    with pytest.raises(WorkerDiedError) as caught:
        call.wait()
    error = caught.value
    expected = (None, signal.SIGKILL, ()) if how == "killed" else (3, None, ("that was all",))
    assert (error.exit_code, error.signal, error.stderr_tail) == expected


def test_worker_that_died_during_the_gap_is_restarted_after_it(local):
    policy = RestartPolicy.on_failure(within_s=300, backoff_s=0)
    group = Kept.create_group().launch(local.cluster(), ON_ONE, restart=policy).wait_ready()
    pid = group.pids().wait()[0][0]
    end = ended(pid)
    local.kill_agent(1)
    os.kill(pid, signal.SIGKILL)
    gone(end)
    call = group.count()
    local.restart_agent(1)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        call.wait()
    assert group.pids().wait()[0][0] != pid


class Terminal(io.StringIO):
    """Where this process prints; the workers' lines are in `shown`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith("[worker_group_Kept:0@"):
                self.shown.put(line.partition("] ")[2])
        return len(text)


def test_lines_printed_during_the_gap_are_shown_once(local, group, monkeypatch):
    """What is on its way to the terminal when agentd is killed is in the file alone: so there is nothing then."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    group.say("before").wait()
    assert terminal.shown.get(timeout=pace.PATIENCE_S) == "before"
    local.kill_agent(1)
    group.say("in the gap").wait()
    local.restart_agent(1)
    group.say("after").wait()
    group.shutdown()
    local.cluster().shutdown()
    lines = [terminal.shown.get(timeout=pace.PATIENCE_S) for _ in range(2)]
    assert lines == ["in the gap", "after"]
    assert terminal.shown.empty()


def test_killed_agentd_and_template_leave_no_process_and_the_ends_are_reported(local, group, never):
    (pid, template), child = group.pids().wait()[0], group.child().wait()[0]
    ends, last = [ended(one) for one in (pid, child)], ended(template)
    call = group.wait_for(never)
    local.kill_agent(1)
    os.kill(template, signal.SIGKILL)
    gone(last)  # one that is about to end could still be asked
    local.restart_agent(1)
    with pytest.raises(WorkerDiedError, match="its agentd and the template that it came from had both ended"):
        call.wait()
    gone(*ends)
    assert Kept.create_group().launch(local.cluster(), ON_ONE, name="again").count().wait() == [1]


def test_restarted_agentd_does_not_wait_for_a_stopped_template(local, group):
    (pid, template) = group.pids().wait()[0]
    end = ended(pid)
    os.kill(template, signal.SIGSTOP)
    local.kill_agent(1)
    local.restart_agent(1)
    gone(end)
    with pytest.raises(WorkerDiedError, match=r"could not be taken over: it did not answer within 2 s"):
        group.count().wait()


def test_workers_end_after_the_lease_if_agentd_does_not_return(local_cluster, never):
    local = local_cluster(2, options=QUICK)
    group = Kept.create_group().launch(local.cluster(), ON_ONE).wait_ready()
    (pid, template), child = group.pids().wait()[0], group.child().wait()[0]
    ends = [ended(one) for one in (pid, template, child)]
    call = group.wait_for(never)
    local.kill_agent(1)
    with pytest.raises(NodeLostError):
        call.wait()
    gone(*ends)
    local.restart_agent(1)  # and the node is there again
    assert Kept.create_group().launch(local.cluster(), ON_ONE, name="again").count().wait() == [1]


def test_workers_end_with_agentd_if_it_does_not_keep_them(local_cluster):
    local = local_cluster(2, options={"workers": {"keep": False}})
    group = Kept.create_group().launch(local.cluster(), ON_ONE).wait_ready()
    end = ended(group.pids().wait()[0][0])
    os.kill(local.nodes[1].pid, signal.SIGUSR1)
    later = Kept.create_group().launch(local.cluster(), ON_ONE, name="later")
    assert later.count().wait() == [1], "the signal changes nothing then"
    local.kill_agent(1)
    gone(end)
    assert "workers.keep is false" in local.nodes[1].log()


def test_device_lock_stays_held_while_agentd_is_away(local):
    cluster = local.cluster()
    first = Kept.create_group().launch(cluster, name="first").wait_ready()
    second = Kept.create_group().launch(cluster, name="second").wait_ready()
    first, second = first.execute_on(1), second.execute_on(1)
    first.hold_devices().wait()
    waiting = second.locked_turn()
    local.kill_agent(1)
    local.restart_agent(1)
    with pytest.raises(TimeoutError):
        waiting.wait(0.3)
    first.release_devices().wait()
    assert waiting.wait() == second.turns().wait()


def test_a_robot_worker_ends_with_its_agentd(local_cluster, tmp_path):
    with rk.Arm(tmp_path) as arm:
        local = local_cluster(2)
        config = rk.config(arm.address(), 1, 2)
        cluster = local.cluster(cluster_cfg=config["cluster"])
        strategy = ComponentPlacement(config, cluster).get_strategy("env")
        robots = rk.Streamer.create_group().launch(cluster, strategy, name="env")
        others = Kept.create_group().launch(cluster, ON_ONE).wait_ready()
        before = others.pids().wait()
        call = robots.moves()
        arm.until_streaming()
        local.kill_agent(1)
        rk.stopped_last(arm.until_closed())
        local.restart_agent(1)
        with pytest.raises((WorkerDiedError, NodeLostError)):
            call.wait()
        assert others.pids().wait() == before


def test_agentd_killed_during_starts_leaves_no_hanging_launch(local):
    cluster = local.cluster()
    groups = [lw.Greeter.create_group().launch(cluster, NodePlacementStrategy([1] * 3), name=f"g{n}") for n in range(3)]
    local.kill_agent(1)
    local.restart_agent(1)
    for group in groups:  # each launch succeeds or says why it failed; none hangs
        try:
            group.wait_ready(pace.PATIENCE_S)
        except (WorkerDiedError, NodeLostError):
            continue
        assert len(group.greet().wait()) == 3
