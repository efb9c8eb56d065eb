"""Results of a call: values in rank order, the first failure, and both ways of waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import math
import threading
import weakref

import pytest

from rlinf_actors.errors import (
    CallTimeoutError,
    GroupClosedError,
    SerializationError,
    UsageError,
    WorkerDiedError,
    WorkerError,
)
from rlinf_actors.runtime.late_report import LateReport
from rlinf_actors.runtime.lost_errors import GRACE_S
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts


async def calls(world):
    """The first call that each rank received."""
    return [(await rank.call()).id for rank in world.ranks]


async def test_values_come_in_rank_order_whatever_order_they_arrive_in(world):
    result = world.group.move(1.0)
    ids = await calls(world)
    assert not result.done()
    for rank in (2, 0, 1):
        world.ranks[rank].ok(ids[rank], f"r{rank}")
    assert await result == ["r0", "r1", "r2"]
    assert result.done()
    assert await result.async_wait() == result.wait() == ["r0", "r1", "r2"]
    assert "move() done" in repr(result)


async def test_arguments_are_encoded_once_and_reach_every_rank(world):
    world.group.move(1.5, mode="fast")
    await calls(world)
    assert [rank.args for rank in world.ranks] == [[((1.5,), {"mode": "fast"})]] * 3


async def test_wait_blocks_only_its_thread(world):
    result = world.group.move()
    waiting = asyncio.create_task(asyncio.to_thread(result.wait, 10))
    for rank, call in zip(world.ranks, await calls(world), strict=True):
        rank.ok(call, rank.rank)
    assert await waiting == [0, 1, 2]


async def test_caller_may_change_a_returned_list(world):
    result = world.group.execute_on(0).move()
    world.ranks[0].ok((await world.ranks[0].call()).id, 1)
    first = await result
    first.append("mine")
    assert await result == [1]


async def test_an_unpicklable_argument_fails_the_caller_before_anything_is_sent(world):
    with pytest.raises(SerializationError) as caught:
        world.group.move(1, {"lock": threading.Lock()})
    assert caught.value.path == "args[1]['lock']"
    assert all(rank.calls == [] for rank in world.ranks)


class TestFailures:
    async def test_first_failure_in_time_ends_the_call(self, world):
        result = world.group.move()
        ids = await calls(world)
        world.ranks[2].raises(ids[2], ValueError("two"))
        with pytest.raises(ValueError, match="arms:2 on n2 raised ValueError: two"):
            await result
        world.ranks[0].raises(ids[0], KeyError("later"))
        world.ranks[1].ok(ids[1], 1)
        with pytest.raises(WorkerError, match="two") as caught:
            result.wait()
        assert (caught.value.rank, caught.value.node, caught.value.worker) == (2, "n2", "arms:2")
        assert result.exception() is caught.value

    async def test_a_death_ends_every_open_call_on_that_rank(self, world):
        both, one, other = world.group.move(), world.group.execute_on(1).move(), world.group.execute_on(0).move()
        await world.ranks[1].until(2)
        await world.ranks[0].until(2)
        world.dies(1)
        for result in (both, one):
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                await result
        world.ranks[0].ok(world.ranks[0].calls[1].id, "alive")
        assert await other == ["alive"]
        with pytest.raises(WorkerDiedError):
            await world.group.execute_on(1).move()

    async def test_the_error_of_a_dead_worker_does_not_grow(self, world):
        world.dies(1)
        for _ in range(5):
            with pytest.raises(WorkerDiedError) as caught:
                await world.group.execute_on(1).move()
        assert len(caught.traceback) < 6

    async def test_a_failed_call_is_freed_with_its_last_reference(self, world):
        result = world.group.execute_on(0).move()
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("bad"))
        kept = weakref.ref(result)
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                await result
            del result
            assert kept() is None
        finally:
            gc.enable()

    async def test_results_of_other_ranks_stay_readable_after_a_failure(self, world):
        result = world.group.move()
        ids = await calls(world)
        world.ranks[1].raises(ids[1], ValueError("bad"))
        world.ranks[0].ok(ids[0], "zero")
        world.ranks[2].ok(ids[2], "two")
        got = {rank: value async for rank, value in result.as_completed(return_exceptions=True)}
        assert (got[0], got[2]) == ("zero", "two")
        assert isinstance(got[1], ValueError)

    async def test_unreadable_result_is_an_error_that_names_its_rank(self, world):
        result = world.group.execute_on(0).move()
        world.ranks[0].say(frames.Ok((await world.ranks[0].call()).id), [b"P" + b"cno_such_module\nX\n."])
        with pytest.raises(SerializationError, match=r"the result of move\(\) from arms:0 on n0.*no_such_module"):
            await result

    async def test_call_of_a_closed_group_fails(self, world):
        result = world.group.move()
        await calls(world)
        await world.group.shutdown(grace=1.0)
        assert world.stopped == [1.0]
        with pytest.raises(GroupClosedError):
            await result
        with pytest.raises(GroupClosedError):
            await world.group.move()
        await world.group.shutdown()
        assert world.stopped == [1.0]


class TestAsCompleted:
    async def test_as_completed_yields_as_ranks_answer(self, world):
        result = world.group.move()
        ids = await calls(world)
        got = []
        world.ranks[1].ok(ids[1], "b")
        async for rank, value in result.as_completed():
            got.append((rank, value))
            if len(got) == 1:
                world.ranks[2].ok(ids[2], "c")
            if len(got) == 2:
                world.ranks[0].ok(ids[0], "a")
        assert got == [(1, "b"), (2, "c"), (0, "a")]
        assert await result == ["a", "b", "c"]
        assert [pair async for pair in result.as_completed()] == got

    async def test_await_during_as_completed_takes_no_result_away(self, world):
        result = world.group.move()
        ids = await calls(world)
        for rank, call in zip(world.ranks, ids, strict=True):
            rank.ok(call, rank.rank)
        got = []
        async for pair in result.as_completed():
            got.append(pair)
            assert await result == [0, 1, 2]
        assert got == [(0, 0), (1, 1), (2, 2)]

    async def test_as_completed_raises_a_failure_in_its_turn(self, world):
        result = world.group.move()
        ids = await calls(world)
        world.ranks[0].ok(ids[0], "fine")
        world.ranks[1].raises(ids[1], ValueError("bad"))
        stream = result.as_completed()
        assert await stream.__anext__() == (0, "fine")
        with pytest.raises(ValueError, match="bad"):
            await stream.__anext__()
        assert result._progress is None or result._progress._callbacks == ()

    async def test_as_completed_that_is_left_early_leaves_no_waiter(self, world):
        result = world.group.move()
        ids = await calls(world)
        world.ranks[0].ok(ids[0])
        stream = result.as_completed()
        await stream.__anext__()
        await stream.aclose()
        assert result._progress is None or result._progress._callbacks == ()

    async def test_cancelled_call_ends_as_completed(self, world):
        result = world.group.move()
        await calls(world)
        asyncio.get_running_loop().call_soon(result.cancel)
        with pytest.raises(concurrent.futures.CancelledError):
            await result.as_completed().__anext__()


class TestCancelling:
    async def test_cancel_reaches_every_rank_and_raises_for_the_waiter(self, world):
        result = world.group.move()
        ids = await calls(world)
        assert result.cancel()
        assert result.done()
        assert result.cancelled()
        for rank, call in zip(world.ranks, ids, strict=True):
            assert await rank.call(1) == frames.Cancel(call)
        with pytest.raises(concurrent.futures.CancelledError, match="move"):
            result.wait()
        assert not result.cancel()

    async def test_cancel_is_not_sent_to_ranks_that_answered(self, world):
        result = world.group.move()
        ids = await calls(world)
        world.ranks[0].ok(ids[0], 1)
        world.group.execute_on(0).stop()
        await world.ranks[0].until(2)
        await asyncio.sleep(0)
        result.cancel()
        world.group.stop()
        assert [type(frame) for frame in await world.ranks[0].until(3)] == [frames.Call] * 3
        assert [type(frame) for frame in await world.ranks[1].until(3)] == [frames.Call, frames.Cancel, frames.Call]

    async def test_cancel_after_the_result_returns_false(self, world):
        result = world.group.execute_on(0).move()
        world.ranks[0].ok((await world.ranks[0].call()).id, 1)
        assert await result == [1]
        assert not result.cancel()
        assert result.wait() == [1]

    async def test_cancelled_task_does_not_cancel_the_call(self, world):
        result = world.group.execute_on(0).move()
        call = await world.ranks[0].call()
        task = asyncio.ensure_future(result.async_wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        world.ranks[0].ok(call.id, "still")
        assert await result == ["still"]


class TestTimeouts:
    @pytest.mark.virtual_time  # one rank answers within the 20 ms, even if the process is paused for longer
    async def test_timeout_travels_with_the_call_and_its_error_names_late_ranks(self, world):
        result = world.group.with_timeout(0.02).move()
        call = await world.ranks[0].call()
        assert call.deadline_s == 0.02
        world.ranks[0].ok(call.id)
        with pytest.raises(CallTimeoutError, match=r"move\(\) had 0\.02 s and did not return from arms:1, arms:2"):
            await result
        assert isinstance(await world.ranks[1].call(1), frames.Cancel)

    @pytest.mark.virtual_time
    async def test_timeout_error_says_what_late_ranks_run(self, world):
        world.ranks[0].doing = frames.Runs(0, "load", 12.25, 2)
        world.ranks[2].doing = None  # its I/O thread does not answer
        result = world.group.with_timeout(1.0).move()
        with pytest.raises(CallTimeoutError) as caught:
            await result
        said = str(caught.value).partition(": ")[2].split("; ")
        assert said == [
            "arms:0 on n0 has been running load() for 12.2 s, and 2 calls wait there",
            "arms:1 on n1 runs nothing",
            "arms:2 on n2 does not answer: its process is stopped, or C code holds its interpreter's lock",
        ]

    async def test_wait_that_times_out_names_group_rank_and_method(self, world):
        result = world.group.execute_on(1).move()
        await world.ranks[1].call()
        said = r"move\(\) of group 'arms' was not done within 0.01 s; it goes on: arms:1 on n1 does not answer"
        with pytest.raises(CallTimeoutError, match=said):
            result.wait(0.01)  # the stand-in's loop is blocked meanwhile

    async def test_answer_in_time_ends_the_timer_of_the_call(self, world):
        result = world.group.with_timeout(1000).execute_on(1).move()
        world.ranks[1].ok((await world.ranks[1].call()).id, 1)
        assert await result == [1]

    async def test_wait_that_timed_out_can_be_repeated(self, world):
        result = world.group.execute_on(0).move()
        call = await world.ranks[0].call()
        with pytest.raises(TimeoutError, match="it goes on"):
            result.wait(0.01)
        world.ranks[0].ok(call.id, 1)
        assert await result == [1]

    @pytest.mark.parametrize("seconds", [0, -1, math.nan, "5"])
    async def test_invalid_timeout_is_refused(self, world, seconds):
        view = world.group.execute_on(0)
        for ask in (world.group.with_timeout, view.with_timeout):
            with pytest.raises(ValueError, match=r"the timeout is .*; it must be a number of seconds"):
                ask(seconds)

    async def test_wait_refuses_a_timeout_of_nan(self, world):
        result = world.group.execute_on(0).move()
        with pytest.raises(ValueError, match="the timeout is nan"):
            result.wait(math.nan)
        world.ranks[0].ok((await world.ranks[0].call()).id, 1)
        assert await result == [1]
        with pytest.raises(ValueError, match="the grace is nan"):
            world.group.shutdown(math.nan)

    async def test_infinite_timeout_means_no_deadline(self, world):
        result = world.group.with_timeout(math.inf).execute_on(0).move()
        call = await world.ranks[0].call()
        assert call.deadline_s == 0.0
        world.ranks[0].ok(call.id, 1)
        assert await result == [1]

    @pytest.mark.parametrize("first", ["deadline", "cancel"])
    async def test_a_call_cancelled_at_its_deadline_has_one_outcome(self, world, first):
        """One thread has ended the call and has not yet notified the worker; then another thread ends the call too."""
        result = world.group.with_timeout(1000).execute_on(0).move()
        await world.ranks[0].call()
        peer, cancelled = world.remote.peers[0], []
        forget = peer.forget

        def expire():
            result._expired(LateReport([]))

        def cancel():
            cancelled.append(result.cancel())

        def meanwhile(call):
            peer.forget = forget
            expire() if first == "cancel" else cancel()
            forget(call)

        peer.forget = meanwhile
        cancel() if first == "cancel" else expire()
        assert cancelled == [first == "cancel"]
        assert result.cancelled() == cancelled[0]
        kind = concurrent.futures.CancelledError if cancelled[0] else CallTimeoutError
        assert isinstance(result.exception(), kind)
        with pytest.raises(kind):
            await result
        world.runtime.lost.close()
        assert world.runtime.lost.count == 0

    async def test_answer_during_a_cancellation_does_not_change_the_outcome(self, world):
        result = world.group.execute_on(0).move()
        await world.ranks[0].call()
        peer, pending = world.remote.peers[0], next(iter(world.remote.peers[0].pending.values()))
        forget = peer.forget

        def meanwhile(call):
            pending.answer(frames.Ok(call, 0.0), AuthenticatedParts(payload.encode("late")))
            forget(call)

        peer.forget = meanwhile
        assert result.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await result

    @pytest.mark.virtual_time
    async def test_timeout_ends_as_completed_after_another_rank_failed(self, world):
        result, rows = world.group.with_timeout(1.0).execute_on(0, 1).move(), []
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("first"))

        async def collect():
            async for row in result.as_completed(return_exceptions=True):
                rows.append(row)

        with pytest.raises(CallTimeoutError):
            await collect()
        assert [(rank, isinstance(error, ValueError)) for rank, error in rows] == [(0, True)]
        with pytest.raises(ValueError, match="first"):
            await result

    async def test_call_that_expires_in_the_worker_is_a_timeout_for_the_caller(self, world):
        result = world.group.execute_on(0).move()
        world.ranks[0].raises((await world.ranks[0].call()).id, RuntimeError("too late"), "expired")
        with pytest.raises(CallTimeoutError):
            await result


async def answer_timers(world, *times):
    """Answer the second call of each rank, which asks for its recorded times."""
    for rank, recorded in zip(world.ranks, times, strict=True):
        call = await rank.call(1)
        assert call.method == "pop_execution_times"
        rank.ok(call.id, recorded)


class TestDurations:
    @pytest.mark.parametrize(("reduction", "value"), [("max", 3.0), ("min", 1.0), ("mean", 2.0), ("sum", 6.0)])
    async def test_durations_are_those_of_the_method(self, world, reduction, value):
        result = world.group.move()
        for n, (rank, call) in enumerate(zip(world.ranks, await calls(world), strict=True), 1):
            rank.ok(call, None, seconds=float(n))
        await result
        asked = asyncio.ensure_future(result.consume_duration(reduction, async_op=True).async_wait())
        await answer_timers(world, {}, {}, {})
        assert await asked == value

    async def test_recorded_time_of_the_method_takes_the_place_of_the_measured_one(self, world):
        result = world.group.move()
        for rank, call in zip(world.ranks, await calls(world), strict=True):
            rank.ok(call, None, seconds=1.0)
        await result
        asked = asyncio.ensure_future(result.consume_duration("sum", async_op=True).async_wait())
        await answer_timers(world, {"move": 0.25}, {}, {"move": 0.5})
        assert await asked == 0.25 + 1.0 + 0.5

    async def test_duration_is_measured_if_a_worker_cannot_return_its_timers(self, world):
        result = world.group.move()
        for rank, call in zip(world.ranks, await calls(world), strict=True):
            rank.ok(call, None, seconds=2.0)
        await result
        asked = asyncio.ensure_future(result.consume_duration(async_op=True).async_wait())
        world.ranks[1].raises((await world.ranks[1].call(1)).id, TypeError("it takes no tags"))
        assert await asked == 2.0

    async def test_durations_can_be_awaited_before_the_result(self, world):
        work = world.group.move().consume_duration("sum", async_op=True)
        for rank, call in zip(world.ranks, await calls(world), strict=True):
            rank.ok(call, None, seconds=1.0)
        await answer_timers(world, {}, {}, {})
        assert await work == 3.0

    async def test_failed_call_has_no_durations_and_leaves_the_workers_timers(self, world):
        result = world.group.execute_on(0).move()
        works = [result.consume_duration(async_op=True), result.consume_durations(async_op=True)]
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("no"))
        for work in works:
            with pytest.raises(ValueError, match="no"):
                await work
        assert [call.method for call in world.ranks[0].calls] == ["move"]

    @pytest.mark.parametrize("awaited", [True, False])
    async def test_durations_of_timers_are_returned_by_tag(self, world, awaited):
        result = world.group.move()
        for rank, call in zip(world.ranks, await calls(world), strict=True):
            rank.ok(call, None, seconds=1.0)
        await result
        if awaited:
            asked = asyncio.ensure_future(result.consume_durations("sum", True, async_op=True).async_wait())
        else:
            asked = asyncio.create_task(asyncio.to_thread(result.consume_durations, "sum", True))
        await answer_timers(world, {"env": 1.0, "first": 4.0}, *[{"env": 2.0, "move": 9.0}] * 2)
        reduced, per_rank = await asked
        assert reduced == {"move": 19.0, "env": 5.0, "first": 4.0}
        assert per_rank == [{"move": 1.0, "env": 1.0, "first": 4.0}, *[{"move": 9.0, "env": 2.0}] * 2]

    async def test_an_unknown_reduction_is_named(self, world):
        result = world.group.move()
        with pytest.raises(ValueError, match="'median'; it must be one of max, min, mean, sum"):
            result.consume_duration("median")
        with pytest.raises(ValueError, match="median"):
            result.consume_durations("median")


class Handler:
    """The exception handler of the test's loop; keeps the contexts that it receives."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.errors.append(context["exception"]))


@pytest.mark.virtual_time
class TestLost:
    async def test_unseen_error_reaches_the_loops_handler_after_the_grace(self, world):
        handler = Handler()
        result = world.group.execute_on(0).move()
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("unseen"))
        await world.sent_by(0)
        await asyncio.sleep(GRACE_S / 2)
        assert handler.errors == []
        await asyncio.sleep(GRACE_S)
        assert [str(error).splitlines()[0] for error in handler.errors] == ["arms:0 on n0 raised ValueError: unseen"]
        with pytest.raises(ValueError, match="unseen") as caught:
            await result
        assert handler.errors == [caught.value]
        del result
        gc.collect()
        world.runtime.lost.close()
        assert world.runtime.lost.count == 1

    async def test_unseen_error_of_a_call_made_without_a_loop_is_logged(self, world, caplog):
        def fire_and_forget():
            world.group.execute_on(0).move()

        thread = threading.Thread(target=fire_and_forget)
        thread.start()
        thread.join()
        with caplog.at_level(logging.ERROR):
            world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("unseen"))
            await asyncio.sleep(2 * GRACE_S)
        assert "move() in arms:0 on n0: ValueError: unseen" in caplog.text

    async def test_error_with_a_waiter_is_not_reported_to_the_loop(self, world):
        handler = Handler()
        result = world.group.execute_on(0).move()
        waiting = asyncio.create_task(result.async_wait())
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("seen"))
        with pytest.raises(ValueError, match="seen"):
            await waiting
        await asyncio.sleep(2 * GRACE_S)
        assert handler.errors == []

    async def test_a_death_that_ends_many_calls_is_reported_once(self, world):
        handler = Handler()
        results = [world.group.execute_on(1).move() for _ in range(5)]
        await world.ranks[1].until(5)
        world.dies(1)
        await asyncio.sleep(2 * GRACE_S)
        assert [type(error) for error in handler.errors] == [WorkerDiedError]
        assert all(result.exception() is handler.errors[0] for result in results)

    async def test_unseen_timeout_is_reported(self, world):
        handler = Handler()
        result = world.group.with_timeout(1.0).execute_on(0).move()
        await asyncio.sleep(1.0 + 2 * GRACE_S)
        assert [type(error) for error in handler.errors] == [CallTimeoutError]
        del result

    @pytest.mark.parametrize("how", ["exception", "as_completed"])
    async def test_timeout_error_that_is_taken_at_once_is_not_reported(self, world, how):
        """A waiting thread may have the error before the thread that ends the call goes on."""
        result, taken = world.group.with_timeout(1.0).execute_on(0).move(), []
        if how == "exception":
            result._on_done(lambda result=result: taken.append(result.exception()))
            await asyncio.sleep(2.0)
        else:
            with pytest.raises(CallTimeoutError) as caught:
                [item async for item in result.as_completed()]
            taken.append(caught.value)
        assert [type(error) for error in taken] == [CallTimeoutError]
        del result
        gc.collect()
        world.runtime.lost.close()
        assert world.runtime.lost.count == 0

    @pytest.mark.parametrize("kind", [CallTimeoutError, concurrent.futures.CancelledError])
    async def test_exception_returns_what_wait_raises_before_all_ranks_answered(self, world, kind):
        handler = Handler()
        result = world.group.with_timeout(1.0).execute_on(0).move()
        assert result.exception() is None
        if kind is CallTimeoutError:
            await asyncio.sleep(1.0 + GRACE_S / 2)
        else:
            result.cancel()
        assert isinstance(result.exception(), kind)
        with pytest.raises(kind):
            result.wait()
        await asyncio.sleep(2 * GRACE_S)
        assert handler.errors == []
        world.runtime.lost.close()
        assert world.runtime.lost.count == 0

    async def test_stream_without_a_reader_reports_its_error(self, world):
        handler = Handler()
        stream = world.group.execute_on(0).watch()
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("unseen"))
        await asyncio.sleep(2 * GRACE_S)
        assert [str(error).splitlines()[0] for error in handler.errors] == ["arms:0 on n0 raised ValueError: unseen"]
        with pytest.raises(ValueError, match="unseen"):
            [item async for item in stream]
        assert len(handler.errors) == 1

    @pytest.mark.parametrize("failed", ["before the loop", "within it"])
    async def test_stream_left_before_an_error_reports_nothing(self, world, failed):
        handler = Handler()
        stream = world.group.execute_on(0).watch()
        call = await world.ranks[0].call()
        items = stream.__aiter__()
        world.ranks[0].item(call.id, 1)
        if failed == "before the loop":
            world.ranks[0].raises(call.id, ValueError("unseen"))
            await world.sent_by(0)
        assert await items.__anext__() == (0, 1)
        if failed == "within it":
            world.ranks[0].raises(call.id, ValueError("unseen"))
        await asyncio.sleep(2 * GRACE_S)
        assert handler.errors == []  # the loop over it may still reach the error
        await items.aclose()
        await asyncio.sleep(2 * GRACE_S)
        world.runtime.lost.close()
        assert handler.errors == []
        assert world.runtime.lost.count == 0

    @pytest.mark.parametrize("look", ["await", "exception", "as_completed"])
    async def test_error_that_was_looked_at_is_not_reported(self, world, look):
        result = world.group.execute_on(0).move()
        world.ranks[0].raises((await world.ranks[0].call()).id, ValueError("seen"))
        await world.sent_by(0)
        assert result.done()
        if look == "await":
            with pytest.raises(ValueError, match="seen"):
                await result
        elif look == "exception":
            assert isinstance(result.exception(), ValueError)
        else:
            assert [rank async for rank, _ in result.as_completed(return_exceptions=True)] == [0]
        del result
        gc.collect()
        world.runtime.lost.close()
        assert world.runtime.lost.count == 0

    async def test_calls_ended_by_a_shutdown_are_not_reported(self, world):
        result = world.group.move()
        await calls(world)
        await world.group.shutdown()
        del result
        gc.collect()
        world.runtime.lost.close()
        assert world.runtime.lost.count == 0

    async def test_cancelled_calls_are_not_reported(self, world):
        result = world.group.move()
        await calls(world)
        result.cancel()
        del result
        gc.collect()
        world.runtime.lost.close()
        assert world.runtime.lost.count == 0


async def test_worker_that_waits_for_its_own_call_gets_an_error(world):
    world.runtime.serving_thread, world.runtime.worker_id = threading.get_ident(), "id-1"
    result = world.group.move()
    with pytest.raises(UsageError, match=r"arms:1 waits for its own move\(\), which would never end"):
        result.wait()
    others = world.group.execute_on(0).move()
    world.ranks[0].ok((await world.ranks[0].call(1)).id, 1)
    assert await others == [1]
