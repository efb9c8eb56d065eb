"""AsyncWork: waiting, made_of, on_thread, then, and unseen errors."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from rlinf_actors import AsyncWork, CallTimeoutError, UsageError


def made(value=None, error=None):
    work = AsyncWork("work")
    if error is None:
        work.resolve(value)
    else:
        work.reject(error)
    return work


def threads_end():
    """The threads that ran functions have ended, so their frames hold no objects."""
    for thread in threading.enumerate():
        if thread.name == "rlinf-actors-then":
            thread.join(10)


async def test_wait_and_await_give_the_result():
    work = AsyncWork("work")
    assert not work.done()
    threading.Thread(target=work.resolve, args=(5,)).start()
    assert await work == 5
    assert await work.async_wait() == 5
    assert work.wait(0) == 5
    assert work.done()


def test_timeout_of_a_wait_does_not_end_the_work():
    work = AsyncWork("send() to b:0")
    with pytest.raises(CallTimeoutError, match=r"send\(\) to b:0 was not done within 0 s; it goes on"):
        work.wait(0)
    work.resolve(None)
    assert work.wait() is None


def test_a_chain_of_then_is_followed_to_its_end():
    work = AsyncWork("work")
    assert work.get_next_work() is None
    assert work.get_last_work() is work
    second = work.then(int)
    third = second.then(int)
    assert work.get_next_work() is second
    assert work.get_last_work() is third
    work.resolve(None)
    assert third.wait(10) == 0


class TestMadeOf:
    """A work whose value a function makes of another work's value, on the waiting thread."""

    def test_the_result_is_made_once_on_the_thread_that_waits(self):
        source, threads = AsyncWork("source"), []
        work = AsyncWork.made_of(
            source, lambda value: (threads.append(threading.current_thread()), value + 1)[1], "work"
        )
        threading.Thread(target=source.resolve, args=(4,)).start()
        assert [work.wait(10), work.wait(10)] == [5, 5]
        assert threads == [threading.current_thread()]

    async def test_work_fails_if_its_source_or_make_fails(self):
        work = AsyncWork.made_of(made(error=ValueError("source")), repr, "work")
        with pytest.raises(ValueError, match="source"):
            await work
        work = AsyncWork.made_of(made(0), lambda value: 1 / value, "work")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await work

    def test_the_work_does_not_keep_its_source(self):
        class Large: ...

        value = Large()
        gone, source = weakref.ref(value), made(value)
        work = AsyncWork.made_of(source, lambda large: 1, "work")
        del value, source
        assert work.wait() == 1
        gc.collect()
        assert gone() is None


async def test_on_thread_runs_the_function_on_its_own_thread():
    assert await AsyncWork.on_thread(threading.current_thread, "a look") is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await AsyncWork.on_thread(lambda: 1 / 0, "a look")


class TestThen:
    def test_then_runs_the_function_with_its_arguments(self):
        first = AsyncWork("first")
        order = []
        second = first.then(lambda a, b: order.append((a, b)) or threading.current_thread().name, 1, b=2)
        assert not second.done()
        first.resolve("ignored")
        assert second.wait(10).startswith("rlinf-actors-then")
        assert order == [(1, 2)]

    def test_then_waits_for_a_work_that_the_function_returns(self):
        inner = AsyncWork("inner")
        chained = made().then(lambda: inner).then(lambda: "end")
        inner.resolve(None)
        assert chained.wait(10) == "end"

    def test_error_skips_the_functions_that_follow(self):
        called = []
        chained = made(error=ValueError("x")).then(called.append, 1).then(called.append, 2)
        with pytest.raises(ValueError, match="x"):
            chained.wait(10)
        assert called == []

    def test_an_error_of_the_function_reaches_the_waiter(self):
        def fail():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            made().then(fail).wait(10)

    def test_an_error_of_a_returned_work_reaches_the_waiter(self):
        with pytest.raises(ValueError, match="inner"):
            made().then(made, None, error=ValueError("inner")).wait(10)

    def test_several_thens_of_one_work_give_separate_works(self):
        first, both = AsyncWork("first"), threading.Barrier(2)
        works = [first.then(lambda n=n: (both.wait(10), n)[1]) for n in range(2)]
        first.resolve(None)
        assert [work.wait(10) for work in works] == [0, 1]
        assert len({id(work) for work in (first, *works)}) == 3

    def test_thens_beyond_the_thread_limit_run_one_after_another(self):
        inner = [AsyncWork(str(n)) for n in range(50)]
        chained = [made().then(lambda work=work: work).then(lambda n=n: n) for n, work in enumerate(inner)]
        for work in reversed(inner):  # works that the functions return hold no thread
            work.resolve(None)
        assert [work.wait(10) for work in chained] == list(range(50))

    def test_a_function_that_returns_its_own_work_is_an_error(self):
        found, may_run = [], threading.Event()
        found.append(made().then(lambda: (may_run.wait(10), found[0])[1]))
        may_run.set()
        with pytest.raises(UsageError, match="returned the very work that waits for it"):
            found[0].wait(10)

    def test_then_keeps_neither_arguments_nor_source(self):
        class Large:
            pass

        given, result = Large(), Large()
        gone = [weakref.ref(given), weakref.ref(result)]
        work = made(result).then(lambda large: "end", given)
        assert work.wait(10) == "end"
        del given, result
        threads_end()
        gc.collect()
        assert [ref() for ref in gone] == [None, None]

    async def test_cancelled_waiter_does_not_end_the_work(self):
        first = AsyncWork("first")
        second = first.then(lambda: "end")
        waiting = asyncio.ensure_future(second.async_wait())
        await asyncio.sleep(0)
        waiting.cancel()
        first.resolve(None)
        assert await second == "end"

    def test_only_the_last_work_of_a_chain_logs_an_unseen_error(self, caplog):
        made(error=ValueError("lost")).then(print)
        threads_end()
        gc.collect()
        assert caplog.text.count("nobody waited for it") == 1

    def test_then_runs_if_no_caller_holds_the_work(self):
        first, ran = AsyncWork("first"), threading.Event()
        first.then(ran.set)
        gc.collect()
        first.resolve(None)
        assert ran.wait(10)


def test_then_fails_if_no_thread_can_start(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread: pids.max is met")

    monkeypatch.setattr("rlinf_actors.exhaustion.start", no_thread)
    first: AsyncWork = AsyncWork("first")
    second = first.then(list)
    assert first.resolve(None)
    with pytest.raises(RuntimeError, match=r"pids\.max is met"):
        second.wait(20)


def test_unseen_error_is_logged(caplog):
    made(error=ValueError("lost"))
    gc.collect()
    assert "work failed, and nobody waited for it: ValueError: lost" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="seen"):
        made(error=ValueError("seen")).wait()
    gc.collect()
    assert caplog.text == ""
