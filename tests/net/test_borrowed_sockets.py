"""Inspecting connections that another thread owns and may close."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import zmq

from rlinf_actors.net.connection_watch import BorrowedSocket, Disconnector, end_loop, moved


@pytest.fixture
def borrowed() -> Iterator[BorrowedSocket]:
    with contextlib.closing(BorrowedSocket()) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """An accepted connection, its other end, and the listener's port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as theirs:
        theirs.connect(listener.getsockname())
        ours, _ = listener.accept()
        with ours:
            yield ours, theirs, listener.getsockname()[1]


def _ends(fd: int, port: int) -> bool:
    """True if a Disconnector would end the connection with this descriptor."""

    class Frame:
        def get(self, what: object) -> object:
            return fd if what == zmq.SRCFD else "127.0.0.1"

    disconnector = Disconnector(Mock())
    disconnector.ports.add(port)
    disconnector.soon(b"peer", Frame())  # type: ignore[arg-type]
    found = bool(disconnector._waiting)
    disconnector.stop()
    return found


def test_borrowed_connection_returns_its_peers_address(borrowed: BorrowedSocket, pair) -> None:
    ours, theirs, port = pair
    with borrowed.on(ours.fileno(), {port}) as peer:
        assert peer == theirs.getsockname()
        assert moved(borrowed.connection) == (0, 0)
        theirs.sendall(b"12345")
        assert ours.recv(5) == b"12345"
        assert moved(borrowed.connection) == (0, 5)


def test_borrowed_descriptor_is_closed_after_use(borrowed: BorrowedSocket, pair) -> None:
    ours, theirs, port = pair
    with borrowed.on(ours.fileno(), {port}):
        pass
    ours.close()
    assert theirs.recv(1) == b""


def test_descriptors_that_are_not_connections_of_the_listener_are_ignored(borrowed: BorrowedSocket, pair) -> None:
    _, theirs, port = pair
    unix, other = socket.socketpair()
    closed = os.dup(0)
    os.close(closed)
    with unix, other, open(os.devnull) as file:
        for fd in (theirs.fileno(), unix.fileno(), file.fileno(), closed):
            with borrowed.on(fd, {port}) as peer:
                assert peer is None
            assert not _ends(fd, port)


def test_borrowing_works_without_free_descriptors(borrowed: BorrowedSocket, pair) -> None:
    ours, theirs, port = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (borrowed.connection.fileno() + 100, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        assert not _ends(ours.fileno(), port)
        with borrowed.on(ours.fileno(), {port}) as peer:
            assert peer == theirs.getsockname()


def test_end_loop_shuts_down_a_connection_to_itself_only(pair) -> None:
    ours, theirs, _ = pair
    unix, other = socket.socketpair()
    with unix, other, socket.socket() as loop, open(os.devnull) as file:
        loop.settimeout(20)
        loop.bind(("127.0.0.1", 0))
        loop.connect(loop.getsockname())
        loop.sendall(b"hello?")
        assert loop.recv(6) == b"hello?"
        for one in (ours, theirs, unix, file, loop):
            end_loop(one.fileno())
        assert loop.recv(1) == b""
        for one, peer in ((ours, theirs), (unix, other)):
            one.sendall(b"x")
            assert peer.recv(1) == b"x"
    end_loop(loop.fileno())  # on a closed socket, does nothing
