"""Watches the TCP connections of ZeroMQ sockets from outside libzmq: handshakes and forced disconnects.

libzmq reports events by a socket's monitor, and has no call that closes one connection. So connections are inspected
and shut down through copies of libzmq's descriptors. libzmq closes descriptors on a thread of its own, so a number may
mean another connection by now: every copy is checked to be a connection to one of our ports, with the expected peer.

`net.connection_guard` limits the connections of a listener. Loop thread only. This module never reads or writes
frames. It ends an established connection only if `Disconnector.soon` is called for that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
import struct
import termios
from collections.abc import Callable, Collection, Iterator

import zmq

from rlinf_actors.net import unix_sockets
from rlinf_actors.net.curve import (
    CONNECTED,
    DISCONNECTED,
    FAILED,
    NO_ZEROMQ,
    SUCCEEDED,
    read_event,
    unanswered,
    why_refused,
)
from rlinf_actors.net.link import OnRejected, OnReset

AT_CLIENT = CONNECTED | FAILED | SUCCEEDED | DISCONNECTED
"""The monitor events that `LinkEvents.on_event` handles."""
BATCH = 64
"""Most events that are handled in one turn of the loop."""
GRACE_S = 1.0
"""Seconds in which a peer can still read what was sent to it, such as the reason for its disconnection."""
_TCP_INFO = struct.Struct("=128x Q 64x QQ")
"""Three fields of struct tcp_info in linux/tcp.h, in the machine's byte order, since Linux 4.19: tcpi_bytes_received,
tcpi_bytes_sent, tcpi_bytes_retrans."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""For a connection whose listener does not answer: how soon the kernel asks the machine, how often, and how many times.
In seconds, but for the last."""
_UNSENT = struct.Struct("i")
_names = itertools.count(1)


class SocketMonitor:
    """Reports events of a ZeroMQ socket, such as failed handshakes. Loop thread.

    Args:
        watched: the socket.
        loop: the event loop.
        events: mask of libzmq's events to report.
        on_event: called with the number, the value and the address of each event, as libzmq gives them. The address
            is that of the endpoint to which the socket is bound or connects.
    """

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        events: int,
        on_event: Callable[[int, int, str], None],
    ) -> None:
        self._watched = watched
        self._loop = loop
        self._on_event = on_event
        name = f"inproc://monitor-{next(_names)}"  # a new one: libzmq may still hold that of a socket just closed
        watched.monitor(name, events)
        self._socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # else libzmq's I/O thread waits for us in a flood
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(name)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._again: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)  # for an edge before the reader was there

    def close(self) -> None:
        """Stop reporting events. The caller does this before it closes the watched socket. Idempotent."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._watched.monitor(None, 0)
        self._socket.close()

    def _drain(self) -> None:
        if self._again is not None:
            self._again.cancel()  # in a flood each edge would add another call, as in ZapHandler
        for _ in range(BATCH):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(*read_event(frames), frames[1].decode(errors="replace"))
        self._again = self._loop.call_soon(self._drain)  # the FD reports nothing about events that are there already


class LinkEvents:
    """Reports failed handshakes and lost connections of one link, from the events of its socket's monitor. Loop thread.

    Args:
        key: this process's public key, "" without one.
        on_rejected, on_reset: see `net.link.Network.link`.
    """

    __slots__ = ("_connected", "_fd", "_key", "_on_rejected", "_on_reset", "_shaken")

    def __init__(self, key: str, on_rejected: OnRejected | None, on_reset: OnReset | None) -> None:
        self._key = key
        self._on_rejected = on_rejected
        self._on_reset = on_reset
        self._connected = False  # once, at least
        self._shaken = False  # the handshake of this connection has ended
        self._fd = -1  # libzmq's descriptor of the connection

    @property
    def wanted(self) -> bool:
        return self._on_rejected is not None or self._on_reset is not None

    def on_event(self, event: int, value: int, address: str = "") -> None:
        if event == CONNECTED:
            self._fd = value
            if not address.startswith("ipc://"):
                end_loop(value)
            elif (why := end_stranger(value)) and self._on_rejected is not None:
                self._on_rejected(why, True)
            return
        if event == DISCONNECTED:
            self._fd = -1
            if not self._shaken and self._on_rejected is not None:
                self._on_rejected(NO_ZEROMQ, False)
            self._shaken = False
            return
        self._shaken = True
        if event != SUCCEEDED:
            if self._on_rejected is not None and not unanswered(event, value):
                self._on_rejected(*why_refused(event, value, self._key))
        elif not self._connected:
            self._connected = True
        elif self._on_reset is not None:
            self._on_reset()

    def dropped(self) -> None:
        """Record that messages were dropped, so that the next handshake counts as that of a lost connection."""
        self._connected = True

    def stands(self, endpoint: str) -> bool:
        """Return True if the connection to *endpoint* is open, and the peer's machine has acknowledged all bytes; see
        `net.link.Link.stands`.

        The handshake may still be under way: a head to which thousands connect at once takes seconds for it, and each
        further connection of a member that has lost patience costs it another handshake.
        """
        copy = _copy(self._fd) if self._fd >= 0 else None
        if copy is None:
            return False
        with copy:
            try:
                if copy.getpeername()[1] != int(endpoint.rpartition(":")[2]):
                    return False  # the number is another connection's by now
                for option, seconds in _KEEPALIVE.items():
                    copy.setsockopt(socket.IPPROTO_TCP, option, seconds)
                return not _UNSENT.unpack(fcntl.ioctl(copy, termios.TIOCOUTQ, bytes(_UNSENT.size)))[0]
            except OSError:  # it has ended
                return False


# --- copies of descriptors ---


class BorrowedSocket:
    """A descriptor into which one connection after the other is copied, to inspect or shut down libzmq's connections.

    The descriptor is reserved in advance, so a copy succeeds even if this process has no free descriptor.

    Attributes:
        connection: the copy as a socket, valid only inside a ``with`` block of `on`.
    """

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # any family will do: no call that is made on it depends on the family
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def close(self) -> None:
        if self._null >= 0:
            os.close(self._null)
            self._null = -1
            self.connection.close()

    @contextlib.contextmanager
    def on(self, fd: int, ports: Collection[int]) -> Iterator[tuple[str, int] | None]:
        """Copy the descriptor *fd* into `connection` for the length of a ``with`` block.

        Yields:
            The IP address and port of the connection's peer; None if *fd* is not, or no longer, a connection to one of
            *ports*.
        """
        place = self.connection.fileno()
        try:
            os.dup2(fd, place, inheritable=False)
        except OSError:  # closed already
            yield None
            return
        try:
            yield peer_of(self.connection, ports)
        finally:
            os.dup2(self._null, place, inheritable=False)


def end_loop(fd: int) -> None:
    """Shut down the TCP connection *fd* if both its ends are the same socket; otherwise do nothing.

    If a client retries a port of the ephemeral range on which no process listens, the kernel may give the client that
    same port. The client would then receive what it sends, and keep the port from the listener that is still to start.
    """
    connection = _copy(fd)
    if connection is None:
        return
    with connection, contextlib.suppress(OSError):  # not connected any more
        ours = connection.getsockname()
        if isinstance(ours, tuple) and ours == connection.getpeername():
            connection.shutdown(socket.SHUT_RDWR)


def end_stranger(fd: int) -> str:
    """Shut down the unix connection *fd* if a process of another user, but root, listens there. Return why, or ""."""
    connection = _copy(fd)
    if connection is None:
        return ""
    with connection, contextlib.suppress(OSError):  # not connected any more
        uid = unix_sockets.peer_of(connection)[1]
        if not unix_sockets.trusted(uid):
            connection.shutdown(socket.SHUT_RDWR)
            return f"a process of {unix_sockets.user_name(uid)} listens there"
    return ""


def _copy(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:  # closed already, or no descriptor is left
        return None
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, copy)
    except OSError:  # the number is a file's by now
        os.close(copy)
        return None


def peer_of(connection: socket.socket, ports: Collection[int]) -> tuple[str, int] | None:
    with contextlib.suppress(OSError):  # no socket, or not connected any more
        ours = connection.getsockname()
        if isinstance(ours, tuple) and ours[1] in ports:
            host, port = connection.getpeername()[:2]
            return host, port
    return None


def moved(connection: socket.socket) -> tuple[int, int]:
    """Return the number of bytes that this process has sent and received on a TCP connection.

    Both are 0 if the kernel does not report them.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return 0, 0
    received, sent, again = _TCP_INFO.unpack(info)
    return sent - again, received


def progress_of(fd: int) -> tuple[tuple[str, int], tuple[int, int]] | None:
    """Return the peer of the connection that has the descriptor *fd* now, and what `moved` returns for it; None if *fd*
    is no connection.

    Without a copy, which costs three times as much: thousands of connections are inspected several times each while
    they authenticate. To shut one down takes a copy, by which the peer is checked again.
    """
    try:
        looking = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    except OSError:  # closed
        return None
    try:
        host, port = looking.getpeername()[:2]
        return (host, port), moved(looking)
    except (OSError, ValueError):  # ended, or not TCP
        return None
    finally:
        looking.detach()


def fd_of(frame: zmq.Frame) -> int:
    """Return libzmq's descriptor of the connection by which a frame came."""
    return int(frame.get(zmq.SRCFD))


class Disconnector:
    """Ends connections of one listener whose frames are no longer admitted.

    libzmq has no call that ends one connection, so this class shuts down the connection's descriptor.

    Attributes:
        ports: the listener's ports. The caller adds ports to this set as they are bound.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[bytes, tuple[socket.socket, asyncio.TimerHandle]] = {}
        self.ports: set[int] = set()

    def soon(self, peer: bytes, frame: zmq.Frame) -> None:
        """Shut down the connection by which *frame* arrived from *peer*, after GRACE_S seconds.

        If a connection of *peer* is already due to be shut down, do nothing.
        """
        fd = fd_of(frame)
        self._close_soon(peer, fd, lambda found: found[0] == str(frame.get("Peer-Address")))

    def close(self, peer: bytes, fd: int, address: tuple[str, int]) -> None:
        """Shut down the connection *fd* of *peer*, to *address*, after GRACE_S seconds. The others as `soon`."""
        self._close_soon(peer, fd, lambda found: found == address)

    def _close_soon(self, peer: bytes, fd: int, is_it: Callable[[tuple[str, int]], bool]) -> None:
        if peer in self._waiting:
            return
        connection = _copy(fd)
        if connection is None:
            return
        found = peer_of(connection, self.ports)
        if found is None or not is_it(found):
            connection.close()
            return
        self._waiting[peer] = connection, self._loop.call_later(GRACE_S, self._end, peer)

    def stop(self) -> None:
        """Cancel the disconnections that are still due, because the listener is being closed. Idempotent."""
        while self._waiting:
            connection, timer = self._waiting.popitem()[1]
            timer.cancel()
            connection.close()

    def _end(self, peer: bytes) -> None:
        connection, _ = self._waiting.pop(peer)
        with connection, contextlib.suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)
