"""Future and Promise: one outcome, waited for by threads or by event loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest

from rlinf_actors.errors import CallTimeoutError, UsageError
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import AsyncWork, Promise
from rlinf_actors.runtime.head_session import WatchedClients


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def waiting(promise: Promise) -> bool:
    """True if a thread or task waits for the promise."""
    return bool(promise._callbacks)


class TestBlocking:
    def test_wait_returns_an_outcome_that_is_there(self):
        promise: Promise = Promise("this")
        assert not promise.done()
        assert promise.resolve(3)
        assert promise.done()
        assert promise.wait() == promise.wait(0) == 3

    def test_wait_returns_an_outcome_of_another_thread(self):
        promise: Promise = Promise("this")
        promise._on_done(lambda: None)
        thread = in_thread(promise.resolve, "x")
        assert promise.wait(10) == "x"
        thread.join()

    def test_error_is_raised_to_each_waiter(self):
        promise: Promise = Promise("this")
        promise.reject(ValueError("no"))
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                promise.wait()

    def test_first_outcome_stays(self):
        promise: Promise = Promise("this")
        assert promise.resolve(1)
        assert not promise.resolve(2)
        assert not promise.reject(ValueError())
        assert promise.wait() == 1
        assert promise.error is None

    def test_timeout_names_the_operation_and_leaves_no_waiter(self):
        promise: Promise = Promise("group 'g'")
        with pytest.raises(CallTimeoutError, match=r"group 'g' was not done within 0\.01 s; it goes on"):
            promise.wait(0.01)
        with pytest.raises(TimeoutError):
            promise.wait(-1)
        assert promise._callbacks == ()
        promise.resolve(5)
        assert promise.wait() == 5

    def test_outcome_wakes_all_waiting_threads(self):
        promise: Promise = Promise("this")
        got: list = []
        threads = [in_thread(lambda: got.append(promise.wait(10))) for _ in range(8)]
        promise.resolve(7)
        for thread in threads:
            thread.join()
        assert got == [7] * 8


class TestAwaiting:
    async def test_awaiting_an_outcome_that_is_there_takes_no_turn_of_the_loop(self):
        promise: Promise = Promise("this")
        promise.resolve(1)
        turns: list = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        assert await promise == 1
        assert await promise.async_wait() == 1
        assert turns == []

    async def test_wait_returns_an_outcome_of_another_thread(self):
        promise: Promise = Promise("this")
        task = asyncio.create_task(promise.async_wait())
        await asyncio.sleep(0)
        assert waiting(promise)
        thread = in_thread(promise.resolve, "x")
        assert await task == "x"
        thread.join()

    async def test_cancelled_task_does_not_end_the_promise(self):
        promise: Promise = Promise("this")
        first = asyncio.create_task(promise.async_wait())
        second = asyncio.create_task(promise.async_wait())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not promise.done()
        promise.resolve(1)
        assert await second == 1
        assert await promise == 1

    async def test_a_cancelled_waiter_leaves_no_callback(self):
        promise: Promise = Promise("this")
        task = asyncio.create_task(promise.async_wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert promise._callbacks == ()

    async def test_wait_for_times_out_without_ending_the_promise(self):
        promise: Promise = Promise("this")
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(promise.async_wait(), 0.01)
        promise.resolve(2)
        assert await promise == 2

    async def test_gather_gives_all_outcomes(self):
        promises = [Promise("this") for _ in range(3)]
        task = asyncio.ensure_future(asyncio.gather(*(p.async_wait() for p in promises)))
        await asyncio.sleep(0)
        for n, promise in enumerate(reversed(promises)):
            promise.resolve(n)
        assert await task == [2, 1, 0]

    def test_several_loops_await_one_promise(self):
        promise: Promise = Promise("this")
        got: list = []
        ready = threading.Barrier(4)

        async def main():
            task = asyncio.create_task(promise.async_wait())
            await asyncio.sleep(0)
            ready.wait(10)
            got.append(await task)

        threads = [in_thread(asyncio.run, main()) for _ in range(3)]
        ready.wait(10)
        promise.resolve("all")
        for thread in threads:
            thread.join()
        assert got == ["all"] * 3
        assert asyncio.run(promise.async_wait()) == "all"

    def test_closed_loop_of_a_waiter_does_not_break_the_promise(self):
        promise: Promise = Promise("this")
        loop = asyncio.new_event_loop()
        task = loop.create_task(promise.async_wait())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        promise.resolve(1)
        assert promise.wait() == 1
        task.get_coro().close()
        task._log_destroy_pending = False

    async def test_thread_and_task_wait_for_one_promise(self):
        promise: Promise = Promise("this")
        thread_got: list = []

        def block():
            try:
                promise.wait(10)
            except KeyError as error:
                thread_got.append(error)

        thread = in_thread(block)
        task = asyncio.create_task(promise.async_wait())
        await asyncio.sleep(0)
        promise.reject(KeyError("k"))
        with pytest.raises(KeyError):
            await task
        await asyncio.to_thread(thread.join)
        assert thread_got == [promise.error]


class TestOfCoroutine:
    async def test_work_ends_as_its_coroutine_does(self):
        io = IoThread("of a test")

        async def give():
            return 3

        async def fail():
            raise ValueError("no")

        assert await AsyncWork.of(io, give(), "give()") == 3
        assert await asyncio.to_thread(AsyncWork.of(io, give(), "give()").wait, 10) == 3
        with pytest.raises(ValueError, match="no"):
            await AsyncWork.of(io, fail(), "fail()")
        await asyncio.to_thread(io.stop)

    async def test_work_fails_when_its_io_thread_stops(self):
        io = IoThread("of a test")
        work = AsyncWork.of(io, asyncio.Event().wait(), "wait()")
        await asyncio.to_thread(io.stop)
        with pytest.raises(UsageError, match=r"wait\(\) was not done: the Cluster of this process was shut down"):
            await work


def test_callback_that_raises_does_not_stop_the_others(caplog):
    done, told = Promise("it"), []
    done._on_done(lambda: 1 / 0)
    done._on_done(lambda: told.append("second"))
    assert done.resolve(7)
    assert told == ["second"]
    assert "internal error" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_watcher_that_raises_does_not_stop_the_others(caplog):
    said: list = []
    watched, told = WatchedClients(said.append), []
    watched.watch("driver-1", lambda: 1 / 0)
    watched.watch("driver-1", lambda: told.append("second"))
    watched.gone("driver-1")
    assert told == ["second"]
    assert "ZeroDivisionError" in caplog.text


async def test_debug_mode_warns_of_a_wait_that_blocks_a_running_loop(caplog):
    asyncio.get_running_loop().set_debug(True)
    with pytest.raises(CallTimeoutError):
        Promise("the answer").wait(0.01)
    assert "waiting for the answer blocks a running event loop: await it, or use async_op=True" in caplog.text


class TestFreeing:
    """A Future that failed, and whose error was caught, is freed with its last reference, as is what it holds."""

    @pytest.fixture(autouse=True)
    def no_garbage_collector(self):
        gc.disable()
        yield
        gc.enable()

    def test_a_failure_that_was_waited_for_leaves_no_cycle(self):
        promise: Promise = Promise("this")
        promise.reject(ValueError("no"))
        with contextlib.suppress(ValueError):
            promise.wait()
        kept = weakref.ref(promise)
        del promise
        assert kept() is None

    @pytest.mark.parametrize("method", ["__await__", "async_wait"])
    def test_a_failure_that_was_awaited_leaves_no_cycle(self, method):
        async def waits() -> weakref.ref[Promise]:
            promise: Promise = Promise("this")
            asyncio.get_running_loop().call_soon(promise.reject, ValueError("no"))
            with contextlib.suppress(ValueError):
                await (promise if method == "__await__" else promise.async_wait())
            kept = weakref.ref(promise)
            del promise
            return kept

        assert asyncio.run(waits())() is None

    def test_a_failed_work_leaves_no_cycle(self):
        work: AsyncWork = AsyncWork("this")
        work.reject(ValueError("no"))
        with contextlib.suppress(ValueError):
            work.wait()
        kept = weakref.ref(work)
        del work
        assert kept() is None


def test_error_of_a_conversion_keeps_its_traceback():
    def convert(_: object) -> None:
        raise ValueError("no")

    source: Promise = Promise("this")
    source.resolve(1)
    work = AsyncWork.made_of(source, convert, "that")
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            work.wait()
        assert caught.traceback[-1].name == "convert"
        assert len(caught.traceback) < 6
