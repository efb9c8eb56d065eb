"""Failed workers that are restarted under their rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import channel_workers as cw
import live_workers as lw
import pace
import pytest
from restart_workers import AsyncMortal, LateMortal, Mortal

from rlinf_actors import (
    Channel,
    GroupClosedError,
    PeerDiedError,
    RestartPolicy,
    WorkerDiedError,
)

pytestmark = pytest.mark.live

AT_ONCE = RestartPolicy.on_failure(max_restarts=3, within_s=300, backoff_s=0)
SOON = RestartPolicy.on_failure(max_restarts=3, within_s=300, backoff_s=0.3)
LATER = RestartPolicy.on_failure(backoff_s=300, backoff_max_s=300)


def kill(group, rank=0):
    """kill -9 of a rank; returns after the open call of that rank has failed."""
    view = group.execute_on(rank)
    pid = view.pid().wait()[0]
    under_way = view.block()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        under_way.wait()
    assert caught.value.signal == signal.SIGKILL
    return pid


def last_error(method):
    """Call until the rank is gone for good, and raise what the last call raised."""
    while True:
        try:
            method().wait()
        except WorkerDiedError as error:
            if "is not again" in str(error):
                raise


@pytest.mark.parametrize("policy", [AT_ONCE, SOON], ids=["at once", "after a while"])
def test_calls_in_flight_fail_and_later_ones_reach_the_new_worker(cluster, policy):
    group = lw.many(cluster, Mortal, 2, restart=policy)
    view = group.execute_on(1)
    method, tell = view.tell, group.tell
    assert tell("a").wait() == [["constructed", "a"]] * 2
    old = kill(group, 1)
    assert tell("b").wait() == [["constructed", "a", "b"], ["constructed", "restarted 1", "b"]]
    assert method("c").wait()[0][-1] == "c"
    assert view.tell("d").wait()[0][-1] == "d"
    assert group.worker_info_list[1].worker.pid().wait()[0] != old


def test_an_exit_code_is_a_failure_and_zero_is_not(cluster):
    group = lw.many(cluster, Mortal, 2, restart=AT_ONCE)
    with pytest.raises(WorkerDiedError, match="exited with code 3"):
        group.execute_on(0).leave(3).wait()
    assert group.execute_on(0).tell("x").wait() == [["constructed", "restarted 1", "x"]]
    with pytest.raises(WorkerDiedError, match="exited with code 0"):
        group.execute_on(1).leave(0).wait()
    with pytest.raises(WorkerDiedError, match="exited with code 0"):
        group.execute_on(1).pid().wait()


def test_restarts_end_at_the_limit_with_a_reason(cluster):
    group = lw.many(cluster, Mortal, 1, restart=RestartPolicy.on_failure(max_restarts=2, within_s=300, backoff_s=0))
    for _ in range(2):
        kill(group)
    pid = group.pid().wait()[0]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="it was restarted 2 times within 300 s, and is not again"):
        last_error(group.pid)
    group.control.group.gone.wait(pace.PATIENCE_S)


def test_failed_constructor_of_a_restarted_worker_counts_as_a_restart(cluster):
    group = lw.many(cluster, Mortal, 1, "", 1, restart=AT_ONCE)
    kill(group)
    with pytest.raises(WorkerDiedError, match="restarted 3 times") as caught:
        last_error(group.pid)
    assert "ValueError: the checkpoint of incarnation 3 is broken" in "\n".join(caught.value.stderr_tail)


def test_worker_that_exits_in_its_constructor_is_restarted(cluster):
    group = lw.many(cluster, LateMortal, 2, restart=AT_ONCE)
    group.wait_ready()
    assert group.count().wait() == [1, 1]


def test_exit_in_a_constructor_without_a_restart_policy_ends_the_group(cluster):
    group = lw.many(cluster, LateMortal, 2)
    with pytest.raises(WorkerDiedError, match="exited with code 4"):
        group.wait_ready()
    group.control.group.gone.wait(pace.PATIENCE_S)


def test_group_that_was_never_ready_is_not_restarted(cluster):
    group = lw.many(cluster, Mortal, 1, "", 0, restart=AT_ONCE)
    with pytest.raises(ValueError, match="incarnation 0 is broken"):
        group.wait_ready()
    group.control.group.gone.wait(pace.PATIENCE_S)


async def test_async_on_restart_runs_in_asyncio(cluster):
    group = await lw.many(cluster, AsyncMortal, 1, restart=SOON)
    (pid,) = await group.pid()
    numbers = aiter(group.numbers())
    await anext(numbers)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        await _last(numbers)
    assert await group.state() == [(1, True)]


def test_shutdown_ends_calls_that_wait_for_a_restart(cluster):
    group = lw.many(cluster, Mortal, 2, restart=LATER)
    kill(group, 1)
    waiting = group.execute_on(1).pid()
    group.shutdown()
    with pytest.raises(GroupClosedError):
        waiting.wait()
    again = lw.many(cluster, Mortal, 1)
    assert again.tell("x").wait() == [["constructed", "x"]]


def test_timeout_ends_a_call_that_waits_for_a_restart(cluster):
    group = lw.many(cluster, Mortal, 1, restart=LATER)
    kill(group)
    with pytest.raises(TimeoutError):
        group.with_timeout(0.2).pid().wait()


def test_handle_in_another_worker_reaches_the_restarted_worker(cluster):
    lw.many(cluster, Mortal, 1, name="mortal", restart=SOON)
    other = lw.many(cluster, Mortal, 1, name="asker")
    assert other.ask_other("mortal", "a").wait() == [["constructed", "a"]]
    assert other.end_other().wait() == [WorkerDiedError.__name__]  # it was told, whoever else was
    found = other.ask_other("mortal", "b").wait()[0]
    assert found[:2] == ["constructed", "restarted 1"]


def test_restarted_worker_exchanges_messages(cluster, tmp_path):
    os.mkfifo(tmp_path / "taking")
    group = lw.many(cluster, Mortal, 2, str(tmp_path), restart=SOON)
    first, second = group.execute_on(0), group.execute_on(1)
    for value in ("a", "b"):
        sent, taken = first.give(value, 1), second.take(0)
        assert (sent.wait(), taken.wait()) == ([None], [value])
    waiting = second.outcome_of_take(0)
    (tmp_path / "taking").read_bytes()  # a fifo: when the other end is opened, it receives
    kill(group, 0)  # that the second one was told does not say that we were
    assert waiting.wait() == [PeerDiedError.__name__]
    sent, taken = first.give("c", 1), second.take(0)
    assert taken.wait() == ["c"]
    assert sent.wait() == [None]
    sent, taken = second.give("d", 0), first.take(1)
    assert (sent.wait(), taken.wait()) == ([None], ["d"])


def test_restarted_consumer_gets_the_items_its_predecessor_did_not_acknowledge(cluster):
    channel = Channel.create("items")
    group = lw.many(cluster, cw.User, 1, name="consumer", restart=SOON)
    for item in "ab":
        channel.put(item)
    assert group.hold(channel).wait() == [True]
    pid = group.pid().wait()[0]
    os.kill(pid, signal.SIGKILL)
    try:
        got = group.get(channel, 2).wait()
    except WorkerDiedError:  # it was sent before the end was known; the next one is for the next worker
        got = group.get(channel, 2).wait()
    assert got == [["a", "b"]]
    channel.close()


def test_driver_killed_during_a_back_off_leaves_no_process(tmp_path):
    source = """
        import os, signal
        from restart_workers import Mortal
        from rlinf_actors import Cluster, NodePlacementStrategy, RestartPolicy, WorkerDiedError
        cluster = Cluster(num_nodes=1)
        policy = RestartPolicy.on_failure(backoff_s=300, backoff_max_s=300)
        group = Mortal.create_group().launch(cluster, NodePlacementStrategy([0, 0]), restart=policy)
        pids = group.pid().wait()
        under_way = group.execute_on(0).block()
        os.kill(pids[0], signal.SIGKILL)
        try:
            under_way.wait()
        except WorkerDiedError:
            print(pids[1], flush=True)
        signal.pause()
    """
    path = lw.script(tmp_path, f"import sys; sys.path.insert(0, {str(lw.ROOT / 'tests/live')!r})\n" + lw.dedent(source))
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=lw.SCRIPT_ENV) as driver:
        pid = int(driver.stdout.readline().split()[0])
        pidfd = os.pidfd_open(pid)
        driver.kill()
    lw.wait_for_end(pidfd)


def test_restarted_rank_0_has_a_new_master_port(cluster):
    group = lw.many(cluster, Mortal, 2, restart=SOON)
    before = group.environ("MASTER_PORT").wait()
    assert before[0] == before[1] != "0"
    kill(group, 0)
    now = group.environ("MASTER_PORT").wait()
    assert now[0] != before[0]
    assert now[1] == before[1]
    kill(group, 1)
    assert group.environ("MASTER_PORT").wait() == [now[0], now[0]]


def test_error_of_a_death_names_the_first_worker_of_the_group_that_ended(cluster):
    group = lw.many(cluster, Mortal, 2, name="pair").wait_ready()
    kill(group, 1)
    with pytest.raises(WorkerDiedError, match=r"the first of its group to end, .* was pair:1 on .*signal 9"):
        group.execute_on(0).leave(1).wait()


async def _last(items):
    async for _ in items:
        pass
