"""map and scatter: which rank gets which item, how many items are drawn ahead, and what an early end leaves."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import threading
from types import SimpleNamespace

import group_kit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_retried_calls import is_gone, restarts

from rlinf_actors.errors import CallTimeoutError, GroupClosedError, SerializationError, UsageError, WorkerDiedError
from rlinf_actors.group.mapping import Pool
from rlinf_actors.group.rank_loads import Loads
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import ExitReport, WorkerState
from rlinf_actors.worker.worker import Worker


class Squares(Worker):
    def square(self, n: int) -> int:
        return n * n

    @Worker.idempotent
    def again(self, n: int) -> int:
        return n * n

    def stop(self): ...

    async def stream(self, n: int):
        yield n


@pytest.fixture
async def world():
    return group_kit.World(2, Squares)


def counted(items=None):
    """An iterator over the items, and the items that were drawn so far."""
    drawn = []

    def draw():
        for item in itertools.count() if items is None else items:
            drawn.append(item)
            yield item

    return draw(), drawn


async def answer(rank, n):
    """A rank answers its n-th call with the square of its argument."""
    call = await rank.call(n)
    rank.ok(call.id, rank.args[n][0][0] ** 2)


async def answer_all(rank):
    """A rank answers every call until the task is cancelled."""
    for n in itertools.count():
        await answer(rank, n)


@pytest.fixture
async def serving(world):
    """The world, with ranks that answer without the test."""
    tasks = [asyncio.create_task(answer_all(rank)) for rank in world.ranks]
    yield world
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def args(rank):
    return [given[0] for given, _ in rank.args]


def cancels(rank):
    return [frame.id for frame in rank.calls if isinstance(frame, frames.Cancel)]


class TestForms:
    async def test_map_works_in_an_async_for(self, serving):
        values = [value async for value in serving.group.square.map(range(100))]
        assert sorted(values) == [n * n for n in range(100)]
        assert sorted(args(serving.ranks[0]) + args(serving.ranks[1])) == list(range(100))
        assert all(rank.calls for rank in serving.ranks)

    async def test_map_works_in_a_plain_for_on_a_thread(self, serving):
        def run():
            return list(serving.group.square.map(range(100), ordered=True))

        assert await asyncio.to_thread(run) == [n * n for n in range(100)]

    async def test_map_works_on_typed_methods_and_on_views(self, serving):
        results = serving.group.execute_on(1).method(Squares.square).map([2, 3], ordered=True)
        assert [value async for value in results] == [4, 9]
        assert serving.ranks[0].calls == []

    async def test_map_takes_an_async_iterable(self, serving):
        async def items():
            for n in range(50):
                await asyncio.sleep(0)
                yield n

        assert sorted([value async for value in serving.group.square.map(items())]) == [n * n for n in range(50)]

    async def test_map_of_no_items_yields_nothing(self, world):
        async def none():
            return
            yield

        for items in ([], iter(()), none()):
            assert [value async for value in world.group.square.map(items)] == []

    async def test_an_async_iterable_needs_async_for(self, world):
        async def items():
            yield 1

        with pytest.raises(UsageError, match="write async for"):
            next(world.group.square.map(items()))

    async def test_items_with_both_iterations_are_iterated_like_the_results(self, serving):
        inner = serving.group.square.map
        assert await asyncio.to_thread(lambda: sorted(serving.group.square.map(inner([1, 2])))) == [1, 16]
        assert sorted([value async for value in serving.group.square.map(inner([1, 2]))]) == [1, 16]

    async def test_map_draws_no_item_before_its_first_step(self, world):
        items, drawn = counted()
        results = world.group.square.map(items)
        await world.sent_by(0)
        del results
        assert drawn == []

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
    async def test_max_in_flight_must_be_a_whole_number(self, world, wrong):
        with pytest.raises(ValueError, match=r"max_in_flight is .*; it must be a whole number, 1 or more"):
            world.group.square.map([1], max_in_flight=wrong)

    async def test_map_refuses_streaming_methods(self, world):
        with pytest.raises(UsageError, match=r"stream\(\) streams"):
            world.group.stream.map([1])

    async def test_map_refuses_items_that_are_not_iterable(self, world):
        with pytest.raises(TypeError, match="not iterable"):
            world.group.square.map(3)


class TestBounds:
    async def test_rank_has_at_most_max_in_flight_items_and_a_free_rank_gets_the_next(self, world):
        items, drawn = counted()
        results = world.group.square.map(items, max_in_flight=2)
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        assert (args(world.ranks[0]), args(world.ranks[1])) == ([0, 2], [1, 3])
        await answer(world.ranks[1], 0)
        assert await step == 1
        await world.ranks[1].until(3)
        assert (args(world.ranks[0]), args(world.ranks[1])) == ([0, 2], [1, 3, 4])
        assert drawn == [0, 1, 2, 3, 4]

    async def test_slow_consumer_pauses_the_drawing_of_items(self, serving):
        items, drawn = counted()
        results = serving.group.square.map(items, max_in_flight=3)
        for taken in range(1, 20):
            await anext(results)
            for rank in serving.ranks:  # the ranks have answered all items that they can have
                await rank.until(len(rank.args))
            assert len(drawn) == taken + 6

    async def test_oldest_item_of_an_ordered_map_pauses_the_drawing(self, world):
        items, drawn = counted()
        results = world.group.square.map(items, max_in_flight=2, ordered=True)
        step = asyncio.create_task(anext(results))
        await world.ranks[1].until(2)
        await answer(world.ranks[1], 0)
        await answer(world.ranks[1], 1)
        await answer(world.ranks[0], 1)
        assert drawn == [0, 1, 2, 3]
        assert not step.done()
        await answer(world.ranks[0], 0)
        assert await step == 0
        assert [await anext(results) for _ in range(3)] == [1, 4, 9]
        assert len(drawn) == 4 + 4

    async def test_async_iterable_is_asked_for_one_item_at_a_time_and_delays_no_result(self, world):
        asked, gate = [], asyncio.Event()

        async def items():
            for n in itertools.count():
                asked.append(n)
                if n == 2:
                    await gate.wait()
                yield n

        results = world.group.square.map(items(), max_in_flight=8)
        step = asyncio.create_task(anext(results))
        await answer(world.ranks[0], 0)
        assert await step == 0
        assert asked == [0, 1, 2]
        await answer(world.ranks[1], 0)
        assert await anext(results) == 1
        gate.set()
        step = asyncio.create_task(anext(results))
        await answer(world.ranks[0], 1)
        assert await step == 4


class TestErrors:
    async def test_error_of_a_call_ends_the_map_and_cancels_the_other_calls(self, world, caplog):
        results = world.group.square.map(itertools.count(), max_in_flight=2)
        step = asyncio.create_task(anext(results))
        calls = [(await rank.until(2))[:2] for rank in world.ranks]
        world.ranks[1].raises(calls[1][0].id, ValueError("no square"))
        with pytest.raises(ValueError, match="arms:1 on n1 raised ValueError: no square"):
            await step
        assert [value async for value in results] == []
        await asyncio.gather(world.ranks[0].until(4), world.ranks[1].until(3))
        assert cancels(world.ranks[0]) == [call.id for call in calls[0]]
        assert cancels(world.ranks[1]) == [calls[1][1].id]
        del results, step
        gc.collect()
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_ordered_map_yields_the_results_before_an_error_first(self, world):
        results = world.group.square.map(range(4), ordered=True)
        step = asyncio.create_task(anext(results))
        world.ranks[1].raises((await world.ranks[1].call(0)).id, ValueError("one"))
        await answer(world.ranks[0], 0)
        assert await step == 0
        with pytest.raises(ValueError, match="one"):
            await anext(results)

    @pytest.mark.parametrize("later", [False, True])
    async def test_error_of_the_items_is_raised_after_finished_results(self, serving, later):
        def items():
            yield 3
            raise LookupError("no more")

        async def later_items():
            for item in items():
                yield item

        results = serving.group.square.map(later_items() if later else items(), max_in_flight=1)
        with pytest.raises(LookupError, match="no more"):
            [value async for value in results]
        assert [value async for value in results] == []

    async def test_item_that_cannot_be_pickled_is_an_error(self, world):
        results = world.group.square.map([1, threading.Lock()])
        with pytest.raises(SerializationError, match=r"args\[0\]"):
            await anext(results)
        await world.ranks[0].until(2)
        assert len(cancels(world.ranks[0])) == 1

    async def test_timeout_applies_to_each_item(self, world):
        results = world.group.with_timeout(0.05).square.map([1])
        with pytest.raises(CallTimeoutError, match=r"square\(\) had 0.05 s"):
            await anext(results)

    async def test_end_of_the_group_ends_the_map(self, world):
        results = world.group.square.map(itertools.count())
        step = asyncio.create_task(anext(results))
        await world.ranks[0].call()
        world.remote.close()
        with pytest.raises(GroupClosedError):
            await step
        with pytest.raises(GroupClosedError):
            await anext(world.group.square.map([1]))


class TestLeaving:
    async def nothing_is_left(self, world):
        await asyncio.gather(*(rank.until(4) for rank in world.ranks))
        for rank in world.ranks:
            assert sorted(cancels(rank)) == [frame.id for frame in rank.calls if isinstance(frame, frames.Call)]
        assert all(not peer.pending for peer in world.remote.peers)

    async def test_dropped_map_cancels_its_calls(self, world):
        results = world.group.square.map(itertools.count())
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        del results, step
        await self.nothing_is_left(world)

    async def test_closed_map_cancels_its_calls(self, world):
        results = world.group.square.map(itertools.count())
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        await results.aclose()
        results.close()
        with pytest.raises(StopAsyncIteration):
            await step
        await self.nothing_is_left(world)

    async def test_break_out_of_the_loop_cancels_the_calls(self, world):
        async def loop():
            async for _ in world.group.square.map(itertools.count(), max_in_flight=1):
                break

        looping = asyncio.create_task(loop())
        await answer(world.ranks[0], 0)
        await looping
        await asyncio.gather(world.ranks[0].until(3), world.ranks[1].until(2))
        assert all(not peer.pending for peer in world.remote.peers)

    async def test_dropped_map_ends_its_async_iterable(self, world):
        ended = asyncio.Event()

        async def items():
            yield 1
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        results = world.group.square.map(items())
        step = asyncio.create_task(anext(results))
        await answer(world.ranks[0], 0)
        assert await step == 1
        del results, step
        await asyncio.wait_for(ended.wait(), 10)

    async def test_cancelled_step_loses_no_result(self, world):
        results = world.group.square.map([5, 6])
        step = asyncio.create_task(anext(results))
        await world.ranks[0].call()
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await answer(world.ranks[0], 0)
        await answer(world.ranks[1], 0)
        assert sorted([value async for value in results]) == [25, 36]

    async def test_cancelled_steps_leave_no_waiters(self, world):
        results = world.group.square.map([1])
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(results), 0.01)
        assert results._pool._change._callbacks == ()

    async def test_thread_stops_waiting_when_another_takes_the_last_result(self, world):
        results = world.group.square.map([3])
        pool, waits, taken = results._pool, threading.Event(), threading.Event()
        next_change = pool._next_change

        def late(*args, **options):
            waits.set()
            assert taken.wait(10)
            return next_change(*args, **options)

        pool._next_change = late
        waiting = asyncio.create_task(asyncio.to_thread(list, results))
        assert await asyncio.to_thread(waits.wait, 10)
        await answer(world.ranks[0], 0)
        item = pool._under_way.get(0) or pool._finished[0]
        assert await item.call == [9]
        assert pool.take() is item
        taken.set()
        try:
            assert await asyncio.wait_for(asyncio.shield(waiting), 10) == []
        finally:
            results.close()  # wakes the waiting thread

    async def test_error_of_a_call_of_a_dropped_map_is_not_reported(self, world, caplog):
        results = world.group.square.map([1, 2])
        step = asyncio.create_task(anext(results))
        await answer(world.ranks[0], 0)
        assert await step == 1
        world.ranks[1].raises((await world.ranks[1].call()).id, ValueError("two"))
        await world.sent_by(1)
        del results, step
        gc.collect()
        await asyncio.sleep(0)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


class TestDeaths:
    async def test_items_of_a_dead_worker_go_to_other_ranks_if_the_method_is_idempotent(self, world):
        results = world.group.again.map(range(6), max_in_flight=2)
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        world.dies(1)
        for n in range(2):
            await answer(world.ranks[0], n)
        values = [await step, await anext(results)]
        serving = asyncio.create_task(answer_rest(world.ranks[0], 2))
        values += [value async for value in results]
        serving.cancel()
        assert sorted(values) == [n * n for n in range(6)]
        assert sorted(args(world.ranks[0])) == list(range(6))

    async def test_death_without_idempotent_names_the_items_that_may_have_run(self, world, caplog):
        results = world.group.square.map(itertools.count(), max_in_flight=2)
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        world.dies(1)
        with pytest.raises(WorkerDiedError, match=r"square\(\) may have run for items 1, 3 of map\(\)") as caught:
            await step
        assert "mark the method @Worker.idempotent" in str(caught.value)
        assert (caught.value.signal, caught.value.worker) == (9, "arms:1")
        await world.ranks[0].until(4)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    async def test_dead_worker_without_open_items_is_skipped(self, world):
        results = world.group.square.map(range(5), max_in_flight=1)
        step = asyncio.create_task(anext(results))
        await answer(world.ranks[1], 0)
        assert await step == 1
        await world.ranks[1].until(2)
        await answer(world.ranks[1], 1)
        assert await anext(results) == 4
        serving = [asyncio.create_task(answer_rest(rank, n)) for rank, n in zip(world.ranks, (0, 2), strict=True)]
        assert sorted([value async for value in results]) == [0, 9, 16]
        for task in serving:
            task.cancel()

    async def test_death_of_all_ranks_raises_the_last_ranks_error(self, world):
        results = world.group.again.map(itertools.count())
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        world.dies(0)
        world.dies(1)
        with pytest.raises(WorkerDiedError, match="arms:"):
            await step
        with pytest.raises(WorkerDiedError):
            await anext(world.group.square.map([1]))

    async def test_restarted_rank_gets_items_again(self, world):
        results = world.group.execute_on(1).again.map(range(3), max_in_flight=2, ordered=True)
        step = asyncio.create_task(anext(results))
        await world.ranks[1].until(2)
        successor = restarts(world, 1)
        for n in range(2):
            await answer(successor, n)
        assert await step == 0
        await answer(successor, 2)
        assert [value async for value in results] == [1, 4]

    async def test_restarting_rank_gets_no_items_while_another_is_up(self, world):
        results = world.group.again.map(itertools.count(), max_in_flight=2)
        step = asyncio.create_task(anext(results))
        await asyncio.gather(*(rank.until(2) for rank in world.ranks))
        away = WorkerState(
            "id-1.1", 1, 1, "10.0.0.1", "restarting", 1, exit=ExitReport("signalled", signal=9), restarts=1
        )
        world.remote.update([away])
        for n in range(6):
            await answer(world.ranks[0], n)
            await step
            step = asyncio.create_task(anext(results))
        assert {1, 3} <= set(args(world.ranks[0]))
        successor = restarts(world, 1)  # with no more items from the other rank
        await successor.until(2)
        assert not step.done()

    async def test_item_that_kills_three_workers_ends_the_map(self, world):
        results = world.group.execute_on(1).again.map([7])
        step = asyncio.create_task(anext(results))
        await world.ranks[1].call()
        await restarts(world, 1, 1).call()
        await restarts(world, 1, 2).call()
        restarts(world, 1, 3)
        with pytest.raises(WorkerDiedError, match=r"may have run for items 0 of map\(\).*item 0 was sent 3 times"):
            await step

    async def test_error_after_with_retries_says_how_often_an_item_was_sent(self, world):
        world.remote.detail = ""
        results = world.group.execute_on(1).with_retries(1).again.map([7])
        step = asyncio.create_task(anext(results))
        await world.ranks[1].call()
        await restarts(world, 1, 1).call()
        is_gone(world, 1, "id-1.1")
        with pytest.raises(WorkerDiedError, match="item 0 was sent 2 times"):
            await step

    async def test_item_is_sent_again_after_a_lost_connection(self, world):
        results = world.group.execute_on(0).again.map([7])
        step = asyncio.create_task(anext(results))
        await world.ranks[0].call()
        world.remote._link_lost(world.remote.peers[0])
        await answer(world.ranks[0], 1)
        assert await step == 49


async def answer_rest(rank, n):
    for number in itertools.count(n):
        await answer(rank, number)


@given(
    st.lists(st.one_of(st.just("more"), st.integers(0, 4), st.integers(-5, -1), st.integers(10, 14))), st.integers(1, 3)
)
def test_loads_choose_the_rank_with_the_fewest_items(steps, limit):
    loads, known, resting = Loads(range(5), limit), dict.fromkeys(range(5), 0), set()
    for step in steps:
        awake = {rank: load for rank, load in known.items() if rank not in resting}
        rank = next(loads.free(), None)
        assert {*loads.free(), *loads.full()} == set(awake)
        assert set(loads.resting()) == {rank for rank in resting if known[rank] < limit}
        assert loads.empty == (not known)
        assert (rank is None) == (not awake or min(awake.values()) == limit)
        if step == "more" and rank is not None:
            assert known[rank] == min(awake.values())
            loads.change(rank, 1)
            known[rank] += 1
        elif isinstance(step, int) and step >= 10 and step - 10 in awake:
            loads.rest(step - 10)
            resting.add(step - 10)
        elif isinstance(step, int) and step >= 10:
            loads.rouse(step - 10)
            resting.discard(step - 10)
        elif isinstance(step, int) and 0 <= step < 10 and known.get(step):
            loads.change(step, -1)
            known[step] -= 1
        elif isinstance(step, int) and step < 0 and ~step in known:
            loads.drop(~step)
            loads.change(~step, -1)  # a late answer
            del known[~step]
            resting.discard(~step)


@pytest.mark.parametrize("size", [50, 500])
async def test_ranks_that_start_one_after_the_other_cost_the_same_in_a_large_group(size):
    """The number of looks at ranks, while a map has no more to send to those that serve."""
    looks, serving, wakes = 0, set(), []

    class Group:
        peers = [SimpleNamespace(error=None) for _ in range(size)]

        def serves(self, rank):
            nonlocal looks
            looks += 1
            return rank in serving

        def watch(self, callback):
            wakes.append(callback)
            return lambda: None

    pool = Pool(None, Group(), "step", None, range(size), 1, None, False, 1)
    for rank in range(size):
        serving.add(rank)
        wakes[0]([rank])
        assert pool._choose() is Group.peers[rank]
        assert pool._free() is None
    assert looks < 6 * size


class TestScatter:
    async def test_scatter_gives_each_rank_its_own_argument(self, world):
        result = world.group.square.scatter([3, 4])
        for rank in world.ranks:
            await answer(rank, 0)
        assert await result == [9, 16]
        assert [rank.args for rank in world.ranks] == [[((3,), {})], [((4,), {})]]

    async def test_scatter_gives_all_ranks_the_shared_arguments(self, world):
        world.group.execute_on(1, 0).with_timeout(5).square.scatter(iter("ab"), 1, key=2)
        assert (await world.ranks[0].call()).deadline_s == 5
        await world.ranks[1].call()
        assert [rank.args for rank in world.ranks] == [[(("b", 1), {"key": 2})], [(("a", 1), {"key": 2})]]

    async def test_scatter_takes_a_tuple_as_one_argument(self, world):
        world.group.execute_on(0).square.scatter([(1, 2)])
        await world.ranks[0].call()
        assert world.ranks[0].args == [(((1, 2),), {})]

    @pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
    async def test_scatter_needs_one_value_for_each_rank(self, world, values):
        with pytest.raises(ValueError, match=rf"square\.scatter\(\) was given {len(values)} values? for 2 ranks"):
            world.group.square.scatter(values)

    async def test_scatter_sends_nothing_if_a_value_cannot_be_pickled(self, world):
        with pytest.raises(SerializationError, match=r"args\[0\]"):
            world.group.square.scatter([1, threading.Lock()])
        assert all(rank.calls == [] for rank in world.ranks)

    async def test_scatter_starts_streams(self, world):
        stream = world.group.stream.scatter([5, 6])
        for rank in world.ranks:
            call = await rank.call()
            rank.item(call.id, rank.args[0][0][0])
            rank.say(frames.Ok(call.id, 0.0))
        assert sorted([item async for item in stream]) == [(0, 5), (1, 6)]

    async def test_retried_scatter_sends_the_same_argument_to_the_rank_again(self, world):
        result = world.group.with_retries(1).again.scatter([3, 4])
        await world.ranks[1].call()
        await answer(world.ranks[0], 0)
        await answer(restarts(world, 1), 0)
        assert await result == [9, 16]
