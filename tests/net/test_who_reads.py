"""Who reads the data sockets (`net.reading`): old kernels, and what threads do at the same moment."""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import select
import socket
import threading
from collections.abc import Callable

import net_kit
import pace
import pytest
from descriptor_kit import descriptors

from rlinf_actors.net import reading
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.reading import Reading
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.runtime.future import Promise


@pytest.fixture
async def read(monkeypatch: pytest.MonkeyPatch, rlinf_leak_check):
    monkeypatch.setattr(reading, "active", None)
    made = Reading(asyncio.get_running_loop())
    yield made
    made.close()


def test_old_python_reads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "EPOLLEXCLUSIVE")
    before = vars(reading).copy()
    try:
        assert importlib.reload(reading).available()
    finally:
        vars(reading).update(before)


def test_kernel_that_ignores_the_flag_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading.available()
    monkeypatch.setattr(reading, "_EXCLUSIVE", 0)  # as if the kernel did not see it
    assert not reading.available()


async def test_without_the_flag_the_loop_reads_all(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "active", None)
    monkeypatch.setattr(reading, "threads_read", False)  # as the Runtime sets it by `available`
    network, heard = ZmqNetwork(asyncio.get_running_loop()), net_kit.Inbox()
    endpoint = network.listener(heard, on_any_thread=lambda *_: False).bind(f"ipc://{tmp_path}/w")
    network.link(endpoint, b"me", net_kit.Inbox(), LinkOptions(on_any_thread=lambda *_: False)).send(b"hello")
    await heard.until(1)
    assert reading.active is None
    network.close()


async def test_a_wait_that_is_over_leaves_the_wake_up_of_the_next_reader(
    read: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads wait for one result: the first one's time ends, and the second one takes the turn at that moment."""
    promise: Promise[int] = Promise("it")
    second = threading.Thread(target=lambda: promise.wait(30), daemon=True)
    registered, leave = threading.Event(), read.leave

    def leaving(holder: object) -> None:
        leave(holder)
        if not second.ident:
            second.start()
            registered.wait(10)

    wait = read.wait

    def waiting(done: Callable[[], object], timeout: float | None = None) -> bool:
        if threading.current_thread() is second:
            registered.set()
        return wait(done, timeout)

    monkeypatch.setattr(read, "leave", leaving)
    monkeypatch.setattr(read, "wait", waiting)
    assert not await asyncio.to_thread(promise._block_until_done, 0.01)
    promise.resolve(1)  # by the head, say
    await asyncio.to_thread(second.join, 10)
    assert not second.is_alive()


class _Late:
    """An epoll for which `then` is done before `register` returns, as on a thread that waits for the interpreter."""

    def __init__(self, poll: select.epoll, then: Callable[[], object]) -> None:
        self._poll, self._then = poll, then

    def register(self, fd: int, mask: int) -> None:
        self._poll.register(fd, mask)
        self._then()

    def __getattr__(self, name: str) -> object:
        return getattr(self._poll, name)


async def test_what_comes_while_a_socket_is_added_is_read(read: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports the bytes once, to the thread that waits. That thread has to find the socket's source."""
    ours, theirs = socket.socketpair()
    looked, came = threading.Semaphore(0), threading.Event()

    def source(_on_loop: bool) -> bool:
        ours.recv(100)
        came.set()
        return False

    def write_and_let_the_thread_look() -> None:
        theirs.send(b"x")
        assert looked.acquire(timeout=pace.PATIENCE_S)

    def wait() -> None:
        assert read.take(wait)
        read.wait(lambda: looked.release() or came.is_set(), pace.PATIENCE_S)
        read.leave(wait)

    thread = threading.Thread(target=wait)
    thread.start()
    assert looked.acquire(timeout=pace.PATIENCE_S)  # it has looked, and polls now or soon
    monkeypatch.setattr(read, "_loops", _Late(read._loops, write_and_let_the_thread_look))
    with ours, theirs:
        read.add(ours.fileno(), source)
        assert await asyncio.to_thread(came.wait, pace.PATIENCE_S)
        read.remove(ours.fileno())
    thread.join()


async def test_host_of_a_channel_reads_all_that_a_zeromq_socket_has(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "active", None)
    monkeypatch.setattr(reading, "threads_read", True)
    network, answers = ZmqNetwork(asyncio.get_running_loop()), net_kit.Inbox()
    network.reading.leave_to_loop()

    def answer(peer: bytes, header: bytes, parts: list) -> None:
        for n in range(50):  # each a chunk of its own
            listener.send(peer, b"%d" % n, now=True)

    listener = network.listener(answer, on_any_thread=lambda *_: False)
    endpoint = listener.bind(f"ipc://{tmp_path}/w")
    network.link(endpoint, b"me", answers, LinkOptions(on_any_thread=lambda *_: False)).send(b"hello")
    await answers.until(50)
    assert answers.headers == [b"%d" % n for n in range(50)]
    network.close()


def test_reading_ends_with_no_descriptor_left() -> None:
    before = descriptors()
    loop = asyncio.new_event_loop()
    made = Reading(loop)
    thread = threading.Thread(target=lambda: (made.take(loop), made.wait(lambda: False), made.leave(loop)))
    thread.start()
    while not made.taken:
        pass
    made.close()
    thread.join(10)
    loop.close()
    assert not descriptors() - before


async def test_event_loop_that_was_closed_leaves_nothing_to_poll(read: Reading) -> None:
    """A child that was forked while the loop ran has a copy of the loop's epoll, here a second descriptor of it."""
    ready, written = os.pipe()
    copies: list[int] = []

    def user() -> None:
        loop = asyncio.new_event_loop()
        promise: Promise[None] = Promise("it")

        async def awaiting() -> None:
            copies.append(os.dup(loop._selector.fileno()))  # type: ignore[attr-defined]
            loop.call_later(0.01, promise.resolve, None)
            await promise
            loop.add_reader(ready, lambda: None)
            os.write(written, b"1")  # so that the copy is ready for ever

        loop.run_until_complete(awaiting())
        loop.close()

    await asyncio.to_thread(user)
    assert read._guest is None
    assert [fd for fd, _ in read._waiting.poll(0) if fd != read._bell] == []
    for fd in (ready, written, *copies):
        os.close(fd)


async def test_event_loop_may_be_closed_after_the_reading(read: Reading) -> None:
    def user() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        promise: Promise[None] = Promise("it")

        async def awaiting() -> None:
            loop.call_later(0.01, promise.resolve, None)
            await promise

        loop.run_until_complete(awaiting())
        return loop

    loop = await asyncio.to_thread(user)
    assert read._guest is not None
    read.close()
    loop.close()


async def test_descriptor_that_cannot_be_watched_everywhere_is_watched_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's limit of watches (ENOSPC) is reached between the first epoll and the last."""
    made = Reading(asyncio.get_running_loop())

    class Full:
        def register(self, fd: int, events: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

    def source(on_loop: bool) -> bool:
        return False

    bell = os.eventfd(0)
    loops, made._loops = made._loops, Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="no space"):
        made.add(bell, source)
    made._loops = loops
    assert not made._sources
    made.add(bell, source)  # it was left in none
    made.remove(bell)
    os.close(bell)
    made.close()


async def test_connection_that_cannot_be_watched_now_is_made_later(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "active", None)
    monkeypatch.setattr(reading, "threads_read", True)
    network, heard = LocalNetwork(asyncio.get_running_loop()), net_kit.Inbox()
    add, fails = network.reading.add, [True, True]  # the link's end, then the listener's

    def adding(fd: int, source: reading.Source) -> None:
        if fails:
            fails.pop()
            raise OSError(errno.ENOSPC, "no space left")
        add(fd, source)

    listener = network.listener(heard, on_any_thread=lambda *_: False)
    endpoint = listener.bind(f"ipc://{tmp_path}/w")
    monkeypatch.setattr(network.reading, "add", adding)
    link = network.link(endpoint, b"me", net_kit.Inbox(), LinkOptions(to="g:0", on_any_thread=lambda *_: False))
    link.send(b"hello")
    await heard.until(1)
    assert not fails
    network.close()
