"""Connections to one listener over TCP, from when they are accepted until they have proved themselves.

`net.admission` decides who must go; here they are watched, and shut down below libzmq. Nothing is asked of
those who have proved themselves, and nothing of frames.

Connections that libzmq has, borrowed for a moment: looked at or shut down below it.

It tells of descriptors by their numbers, and closes them on a thread of its own: a number may be another's by now. So
what is looked at is a copy, which was seen to be a connection to a port of ours; who compares the other end's address
with the one that it had knows that it is the same one.

Ending the connection of one peer, which libzmq has no call for: its socket is shut down below it.

A frame names the descriptor that it was read from; see net.borrowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import struct
from collections.abc import Collection, Iterator

import zmq

from rlinf_actors.net.admission import BACKLOG, NEWCOMERS, Arrival, Crowd, Limits, Look
from rlinf_actors.net.authentication import ACCEPTED, DISCONNECTED, FAILED_PROTOCOL, GateTally, at_server
from rlinf_actors.security.members import Gate

_INFO = struct.Struct("=128x Q 64x QQ")
"""Of struct tcp_info in linux/tcp.h, in the machine's byte order: tcpi_bytes_received, tcpi_bytes_sent,
tcpi_bytes_retrans; since Linux 4.19.
"""


class Lens:
    """One descriptor in which connections are looked at, one after the other: it works also where none is left.

    Attributes:
        connection: what `on` has found.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # any family will do: no call that is made on it depends on it
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def close(self) -> None:
        """Twice is fine."""
        if self._nothing >= 0:
            os.close(self._nothing)
            self._nothing = -1
            self.connection.close()

    @contextlib.contextmanager
    def on(self, fd: int, ports: Collection[int]) -> Iterator[tuple[str, int] | None]:
        """Have a copy of a descriptor in `connection`: until the end of the block the connection stays open.

        Yields the other end's address and port, if it is a connection to one of these ports; None: it has ended, or is
        something else.
        """
        place = self.connection.fileno()
        try:
            os.dup2(fd, place, inheritable=False)
        except OSError:  # closed already
            yield None
            return
        try:
            yield _other_end(self.connection, ports)
        finally:
            os.dup2(self._nothing, place, inheritable=False)


def borrow(fd: int, ports: Collection[int]) -> tuple[socket.socket, tuple[str, int]] | None:
    """A copy of a descriptor to keep, and the other end's address and port; as Lens.on. Who gets it closes it."""
    connection = _copy(fd)
    if connection is None:
        return None
    peer = _other_end(connection, ports)
    if peer is None:
        connection.close()
        return None
    return connection, peer


def end_loop(fd: int) -> None:
    """Shut a connection down if TCP has made it of a socket with itself, and leave any other alone.

    Where nobody listens at a port that the kernel gives to outgoing connections, one that tries again and again gets
    this very number at last: it hears what it says, and keeps the port from whoever is to listen there.
    """
    connection = _copy(fd)
    if connection is None:
        return
    with connection, contextlib.suppress(OSError):  # not connected any more
        ours = connection.getsockname()
        if isinstance(ours, tuple) and ours == connection.getpeername():
            connection.shutdown(socket.SHUT_RDWR)


def _copy(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:  # closed already, or no descriptor is left
        return None
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, copy)
    except OSError:  # a file's by now
        os.close(copy)
        return None


def _other_end(connection: socket.socket, ports: Collection[int]) -> tuple[str, int] | None:
    with contextlib.suppress(OSError):  # no socket, or not connected any more
        ours = connection.getsockname()
        if isinstance(ours, tuple) and ours[1] in ports:
            host, port = connection.getpeername()[:2]
            return host, port
    return None


def moved(connection: socket.socket) -> tuple[int, int]:
    """Bytes that this end has sent, and that it has received.

    Where the kernel does not say, nothing: (0, 0).
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:
        return 0, 0
    received, sent, again = _INFO.unpack(info)
    return sent - again, received


AT_SERVER = ACCEPTED | DISCONNECTED | FAILED_PROTOCOL
"""What libzmq shall tell of."""
BATCH = 64
"""Newcomers that are looked at before other callbacks of the loop get a turn."""
CANDIDATES = 8
"""Newcomers that are looked at, for one that comes, until one is found that goes."""
LOOK_S = 0.25
"""How often all newcomers are looked at: epoll tells nothing of bytes that libzmq has read before it was asked."""
TOO_MANY = "too many connections have not proved themselves"
SLACK_S = 1.0
"""libzmq's timer of a handshake may be that late."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""What is shut down ends by a reset when libzmq closes it, and nothing of it stays in the kernel."""


class Arrivals:
    """Watches the newcomers of one listener. Loop thread only.

    Args:
        loop: the loop that looks.
        ports: that it listens on.
        handshake_s: seconds after which libzmq closes who has not proved himself.
        gate: is told who was refused before there was a key.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ports: set[int], handshake_s: float, gate: Gate) -> None:
        self._loop = loop
        self._ports = ports
        self._refused = GateTally(gate, loop)
        self._crowd = Crowd(limits(handshake_s))
        self._epoll = select.epoll()  # edge-triggered: bytes that libzmq leaves for later are told once
        self._unseen: list[int] = []  # who is yet to be looked at in this round
        self._timer: asyncio.TimerHandle | None = None
        self._lens = Lens()
        loop.add_reader(self._epoll.fileno(), self._drain)

    def close(self) -> None:
        """Watch nobody any more; connections are left as they are. Twice is fine."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._lens.close()
            if self._timer is not None:
                self._timer.cancel()

    def happened(self, event: int, value: int) -> None:
        """One of AT_SERVER: libzmq tells of a connection."""
        if event == ACCEPTED:
            self._came(value)
        elif event == DISCONNECTED:
            self._crowd.gone(value)
        else:
            self._refused.note("", at_server(value))

    def _came(self, fd: int) -> None:
        now = self._loop.time()
        with self._lens.on(fd, self._ports) as peer:
            if peer is None:  # it has ended since, or came by the unix socket; and so has who had that descriptor
                self._crowd.gone(fd)
                return
            why = self._crowd.came(fd, peer, now)
            if why:
                self._shut(fd, peer, why)
                return
            with contextlib.suppress(OSError):  # closed since, or registered already when its number was another's
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            if self._timer is None:
                self._timer = self._loop.call_later(LOOK_S, self._look_at_all)
        for _ in range(CANDIDATES):
            extra = self._crowd.surplus(now)
            if extra is None:
                break
            self._look(extra, TOO_MANY)

    def _drain(self) -> None:
        for fd, _ in self._epoll.poll(0, BATCH):
            newcomer = self._crowd.newcomer(fd)
            if newcomer is not None:
                self._look(newcomer)
            else:
                self._forget(fd)

    def _look_at_all(self) -> None:
        self._unseen = self._unseen or self._crowd.newcomers()
        for fd in self._unseen[:BATCH]:
            newcomer = self._crowd.newcomer(fd)
            if newcomer is not None:
                self._look(newcomer)
        self._unseen = self._unseen[BATCH:]
        self._timer = None
        if self._unseen or self._crowd.newcomers():
            self._timer = self._loop.call_later(0.0 if self._unseen else LOOK_S, self._look_at_all)

    def _look(self, newcomer: Arrival, too_many: str = "") -> None:
        """See how far a newcomer is, and shut it down if it must go: where there are *too_many*, if we wait for it."""
        fd = newcomer.fd
        with self._lens.on(fd, self._ports) as peer:
            if peer is None or peer != newcomer.peer:  # closed, or the next one that has this number: that is told soon
                self._crowd.gone(fd)
                return
            look = self._crowd.looked(fd, *moved(self._lens.connection))
            if look is Look.PROVED:
                self._forget(fd)
            elif look is Look.TOO_MUCH:
                self._shut(fd, peer, look.value)
            elif too_many and look is Look.NEW:
                self._shut(fd, peer, too_many)
            elif too_many:
                self._crowd.pass_over(fd, self._loop.time())

    def _shut(self, fd: int, peer: tuple[str, int], why: str) -> None:
        self._crowd.gone(fd)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._lens.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._lens.connection.shutdown(socket.SHUT_RDWR)
        self._refused.note(peer[0], why)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # closed: the kernel has forgotten it already
            self._epoll.unregister(fd)


def limits(handshake_s: float) -> Limits:
    """What a listener of this process takes: a quarter of its descriptors are for other things."""
    total = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
    return Limits(total, min(NEWCOMERS, total // 4), min(BACKLOG, total // 2), settled_s=handshake_s + SLACK_S)


GRACE_S = 1.0
"""How long a peer may still read what was sent to it: why it is thrown out, above all."""
_SOURCE = int(zmq.SRCFD)


class HangUps:
    """The connections of one listener that are about to end. Loop thread only.

    Args:
        loop: the loop that waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[bytes, tuple[socket.socket, asyncio.TimerHandle]] = {}
        self.ports: set[int] = set()

    def soon(self, peer: bytes, frame: zmq.Frame) -> None:
        """End the connection that this frame came by, GRACE_S seconds from now.

        Args:
            peer: its identity; one connection of each waits at a time.
            frame: the frame.
        """
        if peer not in self._waiting:
            connection = self._connection(frame)
            if connection is not None:
                self._waiting[peer] = connection, self._loop.call_later(GRACE_S, self._now, peer)

    def close(self) -> None:
        """Leave the rest to the listener's end. Twice is fine."""
        while self._waiting:
            connection, timer = self._waiting.popitem()[1]
            timer.cancel()
            connection.close()

    def _connection(self, frame: zmq.Frame) -> socket.socket | None:
        borrowed = borrow(int(frame.get(_SOURCE)), self.ports)  # every frame of a connection has one
        if borrowed is None:
            return None
        connection, (host, _) = borrowed
        if host == str(frame.get("Peer-Address")):
            return connection
        connection.close()
        return None

    def _now(self, peer: bytes) -> None:
        connection, _ = self._waiting.pop(peer)
        with connection, contextlib.suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)
