"""Event loops that do not show when they wait read the sockets too: which thread reads, and what is left afterwards."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time

import pytest
from descriptor_kit import descriptors

from rlinf_actors.net import reading
from rlinf_actors.net.loop import IoThread
from rlinf_actors.net.loop_reader import LoopReader

uvloop = pytest.importorskip("uvloop")
pytestmark = pytest.mark.skipif(not reading.available(), reason="this kernel has no EPOLLEXCLUSIVE")
LIMIT_S = 20.0


@pytest.fixture
def scene():
    """A Reading whose one socket notes which threads receive; the other end of the socket."""
    io = IoThread("io")

    async def begin():
        found = reading.Reading(asyncio.get_running_loop())
        found.add(ours.fileno(), receive)
        return found

    def receive(_on_loop):
        try:
            data = ours.recv(100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        received.append((data, threading.get_ident()))
        for event in waiting:
            event.set()
        return False

    async def end():
        active.remove(ours.fileno())
        active.close()

    received, waiting = [], []
    ours, theirs = socket.socketpair()
    active = io.submit(begin()).result()
    yield io, active, theirs, received, waiting
    io.submit(end()).result()
    io.stop()
    ours.close()
    theirs.close()


async def receive_once(theirs, waiting):
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    class Arrived:
        @staticmethod
        def set():
            if asyncio._get_running_loop() is loop:
                done.set()
            else:
                loop.call_soon_threadsafe(done.set)

    reader = LoopReader.of(loop)
    waiting[:] = [Arrived]
    reader.awaited += 1
    theirs.send(b"x")
    await asyncio.wait_for(done.wait(), LIMIT_S)
    reader.awaited -= 1
    return reader


def test_each_message_is_received_once_by_the_loop_or_the_io_thread(scene):
    _io, _active, theirs, received, waiting = scene

    async def main():
        for _ in range(200):
            await receive_once(theirs, waiting)

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    assert [data for data, _ in received] == [b"x"] * 200


def test_a_loop_receives_while_the_io_thread_is_busy(scene):
    io, _active, theirs, received, waiting = scene
    busy, free = threading.Event(), threading.Event()

    async def main():
        await receive_once(theirs, waiting)
        io.call(lambda: (busy.set(), free.wait(LIMIT_S)))
        assert await asyncio.to_thread(busy.wait, LIMIT_S)
        await receive_once(theirs, waiting)
        free.set()

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    assert received[1] == (b"x", threading.get_ident())


def test_a_loop_in_user_code_leaves_the_messages_to_the_io_thread(scene):
    _io, _active, theirs, received, waiting = scene

    async def main():
        reader = await receive_once(theirs, waiting)
        reader.awaited += 1
        waiting[:] = []
        theirs.send(b"y")
        end = time.monotonic() + LIMIT_S
        while len(received) < 2 and time.monotonic() < end:
            time.sleep(0.001)  # noqa: ASYNC251 - the user's code, which lets no other task run

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    assert received[1][0] == b"y"
    assert received[1][1] != threading.get_ident()


def test_a_loop_without_results_to_await_is_not_woken_for_each_message(scene):
    io, _active, theirs, received, waiting = scene
    busy, free = threading.Event(), threading.Event()
    watched = []

    async def main():
        reader = await receive_once(theirs, waiting)
        io.call(lambda: (busy.set(), free.wait(LIMIT_S)))  # else it may receive each before the loop wakes
        assert await asyncio.to_thread(busy.wait, LIMIT_S)
        theirs.send(b"z")
        end = time.monotonic() + LIMIT_S
        while reader._watched and time.monotonic() < end:  # noqa: ASYNC110 - the loop's own poll tells it
            await asyncio.sleep(0.001)
        watched.append(reader._watched)
        free.set()
        while len(received) < 2 and time.monotonic() < end:  # noqa: ASYNC110 - another thread receives
            await asyncio.sleep(0.001)
        assert LoopReader.of(asyncio.get_running_loop()) is reader
        watched.append(reader._watched)

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    assert watched == [False, True]


def test_loops_that_have_ended_leave_no_descriptor(scene):
    _io, active, theirs, _received, waiting = scene

    def run():
        loop = uvloop.new_event_loop()
        loop.run_until_complete(receive_once(theirs, waiting))
        loop.close()

    run()
    gc.collect()
    before = descriptors()
    for _ in range(20):
        run()
    gc.collect()
    active.forget_ended()
    assert len(active.followers) == 0
    assert not descriptors() - before


def test_the_end_of_reading_takes_the_epoll_out_of_a_loop_that_goes_on(scene):
    _io, active, theirs, _received, waiting = scene

    async def main():
        reader = await receive_once(theirs, waiting)
        active.loop.call_soon_threadsafe(active.close)
        end = time.monotonic() + LIMIT_S
        while not reader._poll.closed and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert reader._poll.closed
        assert not reader._watched

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
