"""One start at a time: threads, event loops, failures, cancelled awaiters. The starts here are stand-ins."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from rlinf_actors.cluster.connect import Connecting, StartLock
from rlinf_actors.errors import UsageError


class Starts:
    """What a Cluster's start does: it hands out one object, and can be held up and cancelled."""

    def __init__(self) -> None:
        self.lock = StartLock()
        self.begun = threading.Event()
        self.finished = threading.Event()
        self.held: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.made: list[object] = []
        self.undone: list[object] = []
        self.current: object | None = None
        self.error: Exception | None = None
        self.left_by: BaseException | None = None

    def start(self, watch):
        if self.current is None:
            self.begun.set()
            watch(self.held)
            self.held.result()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.current = object()
            self.made.append(self.current)
            self.finished.set()
        return self.current

    def undo(self, made):
        self.undone.append(made)
        self.current = None

    async def close(self, made, kind, error, trace):
        self.undo(made)
        self.left_by = error

    def connect(self):
        return Connecting(self.lock, self.start, self.undo, self.close)

    def blocking(self):
        with self.lock.held():
            return self.start(lambda future: None)


@pytest.fixture
def starts():
    return Starts()


async def begun(starts):
    await asyncio.to_thread(starts.begun.wait, 10)


async def test_two_awaiters_get_one(starts):
    both = [asyncio.ensure_future(starts.connect()._connect()) for _ in range(2)]
    await begun(starts)
    starts.held.set_result(None)
    first, second = await asyncio.gather(*both)
    assert first is second
    assert starts.made == [first]


async def test_two_event_loops_get_one(starts):
    other = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(starts.connect()._connect())))
    await begun(starts)
    mine = asyncio.ensure_future(starts.connect()._connect())
    await asyncio.sleep(0)
    starts.held.set_result(None)
    assert await other is await mine


async def test_threads_get_one(starts):
    threads = [asyncio.create_task(asyncio.to_thread(starts.blocking)) for _ in range(3)]
    await begun(starts)
    starts.held.set_result(None)
    assert len(set(await asyncio.gather(*threads))) == 1


async def test_blocking_the_loop_while_a_task_of_it_connects_ends(starts):
    """A notebook that connects in the background and then calls Cluster()."""
    connecting = asyncio.ensure_future(starts.connect()._connect())
    await begun(starts)
    threading.Timer(0, starts.held.set_result, [None]).start()
    blocked = starts.blocking()
    assert await connecting is blocked


async def test_a_failed_start_lets_the_next_one_try(starts):
    starts.error = ValueError("no daemon")
    both = [asyncio.ensure_future(starts.connect()._connect()) for _ in range(2)]
    await begun(starts)
    starts.held.set_result(None)
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, ValueError)
    assert starts.made == [second]


async def test_the_cluster_learns_how_its_block_is_left(starts):
    starts.held.set_result(None)
    error = RuntimeError("the arm is gone")
    with pytest.raises(RuntimeError, match="the arm is gone"):
        async with starts.connect():
            raise error
    assert starts.left_by is error
    assert starts.undone == starts.made


async def test_cancelling_ends_the_start(starts):
    connecting = asyncio.ensure_future(starts.connect()._connect())
    await begun(starts)
    connecting.cancel()
    await asyncio.wait([connecting])
    assert connecting.cancelled()
    assert starts.held.cancelled()
    assert starts.made == []
    assert starts.lock.take() is None


async def test_cancelling_while_another_starts_leaves_that_alone(starts):
    first = asyncio.ensure_future(starts.connect()._connect())
    await begun(starts)
    second = asyncio.ensure_future(starts.connect()._connect())
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    starts.held.set_result(None)
    assert await first is starts.current


async def test_what_was_made_for_an_awaiter_that_is_gone_is_undone(starts):
    """The cancellation comes when the start is over: nobody would have the cluster."""
    connecting = asyncio.ensure_future(starts.connect()._connect())
    await begun(starts)
    starts.held.set_result(None)
    starts.finished.wait(10)  # in the loop's own thread: the task cannot go on meanwhile
    connecting.cancel()
    await asyncio.wait([connecting])
    assert connecting.cancelled()
    assert starts.undone == starts.made != []


async def test_the_block_closes(starts):
    starts.held.set_result(None)
    async with starts.connect() as made:
        assert starts.made == [made]
    assert starts.undone == [made]


def test_a_start_inside_a_start_is_an_error(starts):
    with starts.lock.held(), pytest.raises(UsageError, match="being started by this thread"):
        starts.blocking()
    starts.held.set_result(None)
    assert starts.blocking() is starts.current


def test_a_forked_child_does_not_wait_for_its_parents_start(starts, monkeypatch):
    assert starts.lock.take() is None
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert starts.lock.take() is None
