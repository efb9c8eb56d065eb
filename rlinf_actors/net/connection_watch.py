"""Watches the TCP connections of ZeroMQ sockets from outside libzmq: handshakes, limits and forced disconnects.

libzmq reports events by a socket's monitor, and has no call that closes one connection. So connections are inspected
and shut down through copies of libzmq's descriptors. libzmq closes descriptors on a thread of its own, so a number may
mean another connection by now: every copy is checked to be a connection to one of our ports, with the expected peer.

Loop thread only. This module never reads or writes frames. It ends an established connection only if
`Disconnector.soon` is called for that connection.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import itertools
import os
import resource
import select
import socket
import struct
import termios
from collections.abc import Callable, Collection, Iterator

import zmq

from rlinf_actors.net.admission import BACKLOG, PENDING, Connection, ConnectionTable, Handshake, Limits
from rlinf_actors.net.curve import (
    ACCEPTED,
    CONNECTED,
    DISCONNECTED,
    FAILED,
    FAILED_PROTOCOL,
    NO_ZEROMQ,
    SUCCEEDED,
    read_event,
    unanswered,
    why_refused,
    why_rejected,
)
from rlinf_actors.net.link import OnRejected, OnReset
from rlinf_actors.security.members import Gate

AT_SERVER = ACCEPTED | DISCONNECTED | FAILED_PROTOCOL
"""The monitor events that `ConnectionGuard.on_event` handles."""
AT_CLIENT = CONNECTED | FAILED | SUCCEEDED | DISCONNECTED
"""The monitor events that `LinkEvents.on_event` handles."""
BATCH = 64
"""Most events, or connections, that are handled in one turn of the loop."""
CANDIDATES = 8
"""Most pending connections that are inspected for eviction when a new connection arrives."""
INSPECT_S = 0.25
"""Seconds between two inspections of all pending connections. epoll alone would miss bytes that libzmq read first."""
TOO_MANY = "too many connections have not proved themselves"
SLACK_S = 1.0
"""Seconds by which libzmq's handshake timer may be late."""
GRACE_S = 1.0
"""Seconds in which a peer can still read what was sent to it, such as the reason for its disconnection."""
_NO_LINGER = struct.pack("ii", 1, 0)  # libzmq's close sends a reset then, and the kernel keeps nothing
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

    def on_event(self, event: int, value: int, _address: str = "") -> None:
        if event == CONNECTED:
            self._fd = value
            end_loop(value)
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

    def stands(self, endpoint: str) -> bool:
        """Return True if the connection to *endpoint* is open, its handshake has succeeded, and the peer's machine has
        acknowledged all bytes; see `net.link.Link.stands`.
        """
        copy = _copy(self._fd) if self._fd >= 0 and self._shaken else None
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


class RejectionBatch:
    """Counts rejected connections by address and reason and reports the counts to a gate once per turn of the loop."""

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self._gate = gate
        self._loop = loop
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def note(self, address: str, why: str) -> None:
        """Count one rejected connection from *address* ("" if unknown), for the reason *why*."""
        if not self._counts:
            self._loop.call_soon(self._report)
        self._counts[address, why] += 1

    def _report(self) -> None:
        counts, self._counts = self._counts, collections.Counter()
        for (address, why), times in counts.items():
            self._gate.refused("", address, why, times)


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
            yield _peer_of(self.connection, ports)
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


def _peer_of(connection: socket.socket, ports: Collection[int]) -> tuple[str, int] | None:
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


# --- limits and forced disconnects ---


class ConnectionGuard:
    """Enforces the connection limits of one listener.

    It inspects the connections whose handshake is not done and shuts down those that a ConnectionTable chooses. Loop
    thread.

    Args:
        loop: the listener's event loop.
        ports: the listener's ports. The caller adds ports to this set as they are bound.
        handshake_s: seconds after which libzmq closes a connection that has not authenticated.
        gate: `gate.refused` is called for the connections that are shut down or fail their handshake.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ports: set[int], handshake_s: float, gate: Gate) -> None:
        self._loop = loop
        self._ports = ports
        self._rejected = RejectionBatch(gate, loop)
        self._table = ConnectionTable(limits(handshake_s))
        self._epoll = select.epoll()  # edge-triggered: bytes that libzmq leaves for later are reported once
        self._uninspected: list[int] = []  # descriptors that this round of `_inspect_all` has not inspected yet
        self._timer: asyncio.TimerHandle | None = None
        self._borrowed = BorrowedSocket()
        loop.add_reader(self._epoll.fileno(), self._drain)

    def close(self) -> None:
        """Stop enforcing the limits. Connections stay open. Idempotent."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._borrowed.close()
            if self._timer is not None:
                self._timer.cancel()

    def on_event(self, event: int, value: int, _address: str = "") -> None:
        """Handle an event of the listener's monitor: a connection was accepted, was closed, or failed its handshake.

        *value* is the connection's descriptor, or libzmq's reason for the failed handshake.
        """
        if event == ACCEPTED:
            self._accepted(value)
        elif event == DISCONNECTED:
            self._table.closed(value)
        else:
            self._rejected.note("", why_rejected(value))

    def _accepted(self, fd: int) -> None:
        now = self._loop.time()
        with self._borrowed.on(fd, self._ports) as peer:
            if peer is None:  # it has ended since, or came by the unix socket; so the last user of fd has ended too
                self._table.closed(fd)
                return
            why = self._table.accepted(fd, peer, now)
            if why:
                self._shut_down(fd, peer, why)
                return
            with contextlib.suppress(OSError):  # closed since, or registered already by an earlier user of the number
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            if self._timer is None:
                self._timer = self._loop.call_later(INSPECT_S, self._inspect_all)
        for _ in range(CANDIDATES):
            extra = self._table.to_evict(now)
            if extra is None:
                break
            self._inspect(extra, TOO_MANY)

    def _drain(self) -> None:
        for fd, _ in self._epoll.poll(0, BATCH):
            connection = self._table.pending(fd)
            if connection is not None:
                self._inspect(connection)
            else:
                self._unregister(fd)

    def _inspect_all(self) -> None:
        self._uninspected = self._uninspected or self._table.all_pending()
        for fd in self._uninspected[:BATCH]:
            connection = self._table.pending(fd)
            if connection is not None:
                self._inspect(connection)
        self._uninspected = self._uninspected[BATCH:]
        self._timer = None
        if self._uninspected or self._table.all_pending():
            self._timer = self._loop.call_later(0.0 if self._uninspected else INSPECT_S, self._inspect_all)

    def _inspect(self, connection: Connection, too_many: str = "") -> None:
        """Read from the kernel how many bytes a pending connection has moved, and update or shut down the connection.

        *too_many* is the reason if there are too many connections and this one was chosen to end, else "". A
        connection that waits for our part of the handshake is not shut down for that reason.
        """
        fd = connection.fd
        with self._borrowed.on(fd, self._ports) as peer:
            if peer is None or peer != connection.peer:  # closed, or the number's next user, which libzmq reports soon
                self._table.closed(fd)
                return
            state = self._table.progress(fd, *moved(self._borrowed.connection))
            if state is Handshake.DONE:
                self._unregister(fd)
            elif state is Handshake.FLOODED:
                self._shut_down(fd, peer, state.value)
            elif too_many and state is Handshake.PENDING:
                self._shut_down(fd, peer, too_many)
            elif too_many:
                self._table.spare(fd, self._loop.time())

    def _shut_down(self, fd: int, peer: tuple[str, int], why: str) -> None:
        self._table.closed(fd)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._borrowed.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._borrowed.connection.shutdown(socket.SHUT_RDWR)
        self._rejected.note(peer[0], why)

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # closed: the kernel has removed it already
            self._epoll.unregister(fd)


def limits(handshake_s: float) -> Limits:
    """Return the connection limits of a listener whose handshakes may take *handshake_s* seconds.

    All connections together may use three quarters of the descriptors that this process may open.
    """
    total = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
    return Limits(total, min(PENDING, total // 4), min(BACKLOG, total // 2), settled_s=handshake_s + SLACK_S)


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
        if peer in self._waiting:
            return
        connection = _copy(int(frame.get(zmq.SRCFD)))  # every frame of a connection has one
        if connection is None:
            return
        found = _peer_of(connection, self.ports)
        if found is None or found[0] != str(frame.get("Peer-Address")):
            connection.close()
            return
        self._waiting[peer] = connection, self._loop.call_later(GRACE_S, self._end, peer)

    def close(self) -> None:
        """Cancel the disconnections that are still due, because the listener is being closed. Idempotent."""
        while self._waiting:
            connection, timer = self._waiting.popitem()[1]
            timer.cancel()
            connection.close()

    def _end(self, peer: bytes) -> None:
        connection, _ = self._waiting.pop(peer)
        with connection, contextlib.suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)
