"""AsyncWork, and a receive that is cancelled or dropped."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from rlinf_actors import AsyncWork, CallTimeoutError, CollectiveGroupOptions, UsageError, WorkerAddress
from rlinf_actors.messaging.mailbox import ArrivedMessage
from rlinf_actors.messaging.receive import PendingReceive, PostedReceive
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts


def made(value=None, error=None):
    work = AsyncWork("work")
    if error is None:
        work.resolve(value)
    else:
        work.reject(error)
    return work


def threads_end():
    """The threads that ran functions have ended; their frames hold nothing any more."""
    for thread in threading.enumerate():
        if thread.name == "rlinf-actors-then":
            thread.join(10)


async def test_both_ways_to_wait():
    work = AsyncWork("work")
    assert not work.done()
    threading.Thread(target=work.resolve, args=(5,)).start()
    assert await work == 5
    assert await work.async_wait() == 5
    assert work.wait(0) == 5
    assert work.done()


def test_a_timeout_leaves_the_work():
    work = AsyncWork("send() to b:0")
    with pytest.raises(CallTimeoutError, match=r"send\(\) to b:0 was not done within 0 s; it goes on"):
        work.wait(0)
    work.resolve(None)
    assert work.wait() is None


class TestMadeOf:
    """A work whose value is made of another's by who takes it."""

    def test_it_is_made_once_and_by_who_asks(self):
        source, threads = AsyncWork("source"), []
        work = AsyncWork.made_of(
            source, lambda value: (threads.append(threading.current_thread()), value + 1)[1], "work"
        )
        threading.Thread(target=source.resolve, args=(4,)).start()
        assert [work.wait(10), work.wait(10)] == [5, 5]
        assert threads == [threading.current_thread()]

    async def test_an_error_of_either_is_its_error(self):
        work = AsyncWork.made_of(made(error=ValueError("source")), repr, "work")
        with pytest.raises(ValueError, match="source"):
            await work
        work = AsyncWork.made_of(made(0), lambda value: 1 / value, "work")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await work

    def test_it_does_not_keep_what_it_was_made_of(self):
        class Large: ...

        value = Large()
        gone, source = weakref.ref(value), made(value)
        work = AsyncWork.made_of(source, lambda large: 1, "work")
        del value, source
        assert work.wait() == 1
        gc.collect()
        assert gone() is None


async def test_what_blocks_runs_on_a_thread_of_its_own():
    assert await AsyncWork.on_thread(threading.current_thread, "a look") is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await AsyncWork.on_thread(lambda: 1 / 0, "a look")


class TestThen:
    def test_runs_after_with_its_arguments(self):
        first = AsyncWork("first")
        order = []
        second = first.then(lambda a, b: order.append((a, b)) or threading.current_thread().name, 1, b=2)
        assert not second.done()
        first.resolve("ignored")
        assert second.wait(10).startswith("rlinf-actors-then")
        assert order == [(1, 2)]

    def test_a_work_that_it_returns_is_waited_for(self):
        inner = AsyncWork("inner")
        chained = made().then(lambda: inner).then(lambda: "end")
        inner.resolve(None)
        assert chained.wait(10) == "end"

    def test_an_error_skips_what_follows(self):
        called = []
        chained = made(error=ValueError("x")).then(called.append, 1).then(called.append, 2)
        with pytest.raises(ValueError, match="x"):
            chained.wait(10)
        assert called == []

    def test_its_own_error_reaches_the_waiter(self):
        def fail():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            made().then(fail).wait(10)

    def test_an_error_of_a_work_that_it_returns_is_its_own(self):
        with pytest.raises(ValueError, match="inner"):
            made().then(made, None, error=ValueError("inner")).wait(10)

    def test_each_is_a_new_work_and_many_may_follow_one(self):
        first, both = AsyncWork("first"), threading.Barrier(2)
        works = [first.then(lambda n=n: (both.wait(10), n)[1]) for n in range(2)]
        first.resolve(None)
        assert [work.wait(10) for work in works] == [0, 1]
        assert len({id(work) for work in (first, *works)}) == 3

    def test_more_than_may_run_at_a_time_follow_one_another(self):
        inner = [AsyncWork(str(n)) for n in range(50)]
        chained = [made().then(lambda work=work: work).then(lambda n=n: n) for n, work in enumerate(inner)]
        for work in reversed(inner):  # the works that the functions returned hold no thread
            work.resolve(None)
        assert [work.wait(10) for work in chained] == list(range(50))

    def test_one_that_returns_itself_is_an_error(self):
        found, may_run = [], threading.Event()
        found.append(made().then(lambda: (may_run.wait(10), found[0])[1]))
        may_run.set()
        with pytest.raises(UsageError, match="returned the very work that waits for it"):
            found[0].wait(10)

    def test_what_it_needed_is_let_go(self):
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

    async def test_cancelling_who_awaits_it_leaves_it(self):
        first = AsyncWork("first")
        second = first.then(lambda: "end")
        waiting = asyncio.ensure_future(second.async_wait())
        await asyncio.sleep(0)
        waiting.cancel()
        first.resolve(None)
        assert await second == "end"

    def test_only_the_end_of_a_chain_is_an_error_that_nobody_waited_for(self, caplog):
        made(error=ValueError("lost")).then(print)
        threads_end()
        gc.collect()
        assert caplog.text.count("nobody waited for it") == 1

    def test_goes_on_where_nobody_holds_it(self):
        first, ran = AsyncWork("first"), threading.Event()
        first.then(ran.set)
        gc.collect()
        first.resolve(None)
        assert ran.wait(10)


def test_a_function_that_no_thread_is_left_for_fails(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread: pids.max is met")

    monkeypatch.setattr("rlinf_actors.exhaustion.start", no_thread)
    first: AsyncWork = AsyncWork("first")
    second = first.then(list)
    assert first.resolve(None)
    with pytest.raises(RuntimeError, match=r"pids\.max is met"):
        second.wait(20)


def test_an_error_that_nobody_waited_for_is_logged(caplog):
    made(error=ValueError("lost"))
    gc.collect()
    assert "work failed, and nobody waited for it: ValueError: lost" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="seen"):
        made(error=ValueError("seen")).wait()
    gc.collect()
    assert caplog.text == ""


class FakePosted:
    def __init__(self):
        self.calls = []

    def enter(self):
        self.calls.append("enter")

    def leave(self):
        self.calls.append("leave")
        return True

    def unread(self, message):
        self.calls.append(message)


def message(value):
    return ArrivedMessage("1", 0, AuthenticatedParts(payload.encode(value)))


async def test_a_cancelled_receive_leaves_its_posted_and_takes_another_when_it_is_awaited_again():
    posted = FakePosted()
    work = PendingReceive("recv()", posted)
    waiting = asyncio.ensure_future(work.async_wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert posted.calls == ["leave"]
    waiting = asyncio.ensure_future(work.async_wait())
    await asyncio.sleep(0)
    assert posted.calls == ["leave", "enter"]
    work.take(message("x"))
    assert await waiting == "x"


async def test_a_receive_stays_while_another_task_awaits_it():
    posted = FakePosted()
    work = PendingReceive("recv()", posted)
    first, second = (asyncio.ensure_future(work.async_wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert posted.calls == []
    work.take(message("x"))
    assert await second == "x"


def test_what_nobody_looked_at_is_given_back():
    posted = FakePosted()
    work = PendingReceive("recv()", posted)
    got = message("x")
    work.take(got)
    del work
    gc.collect()
    assert posted.calls == [got]


def test_what_was_looked_at_is_not():
    posted = FakePosted()
    work = PendingReceive("recv()", posted, lambda value: value * 2)
    work.take(message(4))
    assert (work.wait(), work.wait()) == (8, 8)
    del work
    gc.collect()
    assert posted.calls == []


def test_an_object_that_cannot_be_made_here_is_the_waiters_error():
    def refuse(value):
        raise ValueError(f"no {value}")

    work = PendingReceive("recv()", FakePosted(), refuse)
    work.take(message(4))
    for _ in range(2):
        with pytest.raises(ValueError, match="no 4"):
            work.wait()


def test_a_dropped_receive_is_abandoned():
    posted = PostedReceive(None, WorkerAddress("a", 0))
    work = PendingReceive("recv()", posted)
    posted.belongs_to(work)
    assert not posted.abandoned
    del work
    gc.collect()
    assert posted.abandoned


def test_options_are_kept():
    options = CollectiveGroupOptions(accel_max_ctas=4, use_ring_broadcast=True)
    assert options == CollectiveGroupOptions(None, 4, None, False, True)
    assert CollectiveGroupOptions() != options
