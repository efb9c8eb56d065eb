"""Which calls are sent again after a death."""

from __future__ import annotations

import asyncio
import gc

import group_kit
import pytest
from group_kit import FakeRank

from rlinf_actors.errors import (
    CallTimeoutError,
    ConnectionLostError,
    GroupClosedError,
    RlinfActorsError,
    UsageError,
    WorkerDiedError,
)
from rlinf_actors.group import group_spec
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, ExitReport, WorkerState
from rlinf_actors.worker.worker import Worker


class Store(Worker):
    @Worker.idempotent
    def load(self, x: object = None): ...

    def step(self): ...

    @Worker.idempotent
    async def watch(self):
        yield 1


@pytest.fixture
async def world():
    return group_kit.World(2, Store)


def restarts(world, rank: int, times: int = 1) -> FakeRank:
    """The rank died and has been restarted *times* times; its new worker is up when this returns."""
    fake = FakeRank(world.network, f"{rank}-{times}")
    before = ExitReport("signalled", signal=9)
    where = Endpoint("here", fake.endpoint)
    world.remote.update(
        [WorkerState(f"id-{rank}.{times}", rank, rank, "10.0.0.1", "running", 1, where, exit=before, restarts=times)]
    )
    return fake


def is_gone(world, rank: int, id: str) -> None:
    why = ExitReport("signalled", signal=9, reason="it was restarted once, and is not again")
    world.remote.update([WorkerState(id, rank, rank, "10.0.0.1", "gone", 1, exit=why, restarts=9)])


async def test_call_is_sent_again_to_the_restarted_worker(world):
    result = world.group.with_retries(1).load([1, 2])
    first = await world.ranks[1].call()
    await world.ranks[0].call()
    successor = restarts(world, 1)
    again = await successor.call()
    assert (again.method, successor.args) == (first.method, world.ranks[1].args)
    world.ranks[0].ok(first.id, "zero")
    successor.ok(again.id, "one")
    assert await result == ["zero", "one"]
    assert result.attempts == [1, 2]
    assert len(world.ranks[0].calls) == 1


async def test_a_call_over_a_connection_that_was_lost_is_sent_again(world):
    result = world.group.execute_on(0).with_retries(1).load()
    await world.ranks[0].call()
    world.remote._link_lost(world.remote.peers[0])
    again = await world.ranks[0].call(1)
    world.ranks[0].ok(again.id, "there")
    assert await result == ["there"]


async def test_without_retries_left_the_last_error_says_how_often_it_was_sent(world):
    result = world.group.execute_on(0).with_retries(2).load()
    await world.ranks[0].call()
    await restarts(world, 0, 1).call()
    await restarts(world, 0, 2).call()
    restarts(world, 0, 3)
    with pytest.raises(WorkerDiedError, match=r"load\(\) was sent 3 times; the last time: worker arms:0") as caught:
        await result
    assert caught.value.signal == 9
    assert result.attempts == [3]


async def test_death_that_ends_many_last_attempts_is_reported_once(world):
    results = [world.group.execute_on(0).with_retries(1).load() for _ in range(3)]
    await world.ranks[0].until(3)
    await restarts(world, 0, 1).until(3)
    restarts(world, 0, 2)
    assert [result.done() for result in results] == [True] * 3
    del results
    gc.collect()
    world.runtime.lost.close()
    assert world.runtime.lost.count == 1


async def test_call_fails_at_once_if_the_rank_is_not_restarted(world):
    result = world.group.execute_on(0).with_retries(5).load()
    await world.ranks[0].call()
    await restarts(world, 0, 1).call()
    is_gone(world, 0, "id-0.1")
    with pytest.raises(WorkerDiedError, match=r"was sent 2 times.*and is not again"):
        await result
    result = world.group.execute_on(1).with_retries(5).load()
    world.dies(1)
    with pytest.raises(WorkerDiedError, match=r"^worker arms:1"):
        await result


async def test_error_of_the_method_is_not_retried(world):
    result = world.group.execute_on(0).with_retries(3).load()
    call = await world.ranks[0].call()
    world.ranks[0].raises(call.id, ConnectionLostError("of the user's own connection"))
    with pytest.raises(ConnectionLostError, match="raised"):
        await result
    assert result.attempts == [1]


async def test_shutdown_of_the_group_ends_the_retries(world):
    result = world.group.execute_on(0).with_retries(3).load()
    await world.ranks[0].call()
    world.remote.close()
    with pytest.raises(GroupClosedError):
        await result
    assert result.attempts == [1]


async def test_cancelled_call_is_not_sent_again_and_is_cancelled_in_the_worker(world):
    result = world.group.execute_on(0).with_retries(3).load()
    await world.ranks[0].call()
    successor = restarts(world, 0)
    again = await successor.call()
    assert result.cancel()
    assert await successor.call(1) == frames.Cancel(again.id)
    after = restarts(world, 0, 2)
    marker = world.group.execute_on(0).step()
    assert (await after.call()).method == "step"
    marker.cancel()


async def test_timeout_covers_all_attempts_together(world):
    result = world.group.execute_on(0).with_timeout(0.3).with_retries(9).load()
    first = await world.ranks[0].call()
    successor = restarts(world, 0)
    again = await successor.call()
    assert 0 < again.deadline_s < first.deadline_s == 0.3
    with pytest.raises(CallTimeoutError, match=r"load\(\) had 0.3 s and did not return from arms:0"):
        await result
    assert await successor.call(1) == frames.Cancel(again.id)


async def test_retries_of_other_ranks_go_on_after_a_failure(world):
    """as_completed gives each rank's outcome, including retries of other ranks."""
    result = world.group.with_retries(1).load()
    calls = [await rank.call() for rank in world.ranks]
    world.ranks[0].raises(calls[0].id, ValueError("broken"))
    answers = result.as_completed(return_exceptions=True)
    rank, error = await anext(answers)
    assert (rank, type(error).__name__) == (0, "ValueError")
    successor = restarts(world, 1)
    successor.ok((await successor.call()).id, "late")
    assert await anext(answers) == (1, "late")
    with pytest.raises(StopAsyncIteration):
        await anext(answers)


async def test_with_retries_with_timeout_and_execute_on_combine_in_any_order(world):
    group = world.group
    views = [
        group.with_retries(2).with_timeout(7).execute_on(1),
        group.with_timeout(7).execute_on(1).with_retries(2),
        group.execute_on(1).with_retries(2).with_timeout(7),
    ]
    for n, view in enumerate(views):
        result = view.load()
        assert (await world.ranks[1].call(2 * n)).deadline_s == 7
        assert result._retries == 2
        result.cancel()
        await world.ranks[1].call(2 * n + 1)


async def test_retries_of_streams_and_unmarked_methods_are_refused(world):
    view = world.group.with_retries(1)
    with pytest.raises(UsageError, match=r"Store.step\(\) is not marked idempotent.*write @Worker.idempotent above"):
        view.step()
    with pytest.raises(UsageError, match=r"watch\(\) streams, and a stream is not sent again"):
        view.watch()
    await asyncio.sleep(0)
    assert world.ranks[0].calls == []


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
async def test_invalid_number_of_retries_is_refused(world, n):
    with pytest.raises(ValueError, match="a whole number, 1 or more"):
        world.group.with_retries(n)
    with pytest.raises(ValueError, match="a whole number"):
        world.group.execute_on(0).with_retries(n).load()


async def test_retries_are_refused_for_a_group_without_a_restart_policy(world):
    world.remote.detail = group_spec.encode(group_spec.GroupDetail(restarts=False))
    with pytest.raises(UsageError, match=r"Launch it with restart=RestartPolicy.on_failure\(\)"):
        world.group.with_retries(1)
    world.remote.detail = group_spec.encode(group_spec.GroupDetail())
    result = world.group.with_retries(1).load()
    result.cancel()


async def test_only_errors_of_ended_workers_are_retried(world):
    result = world.group.execute_on(0).with_retries(3).load()
    await world.ranks[0].call()
    world.remote._replace([(world.remote.peers[0], "", RlinfActorsError("an error of another kind"))])
    with pytest.raises(RlinfActorsError, match="another kind"):
        await result
