"""Enforces the connection limits of a listener that asks for keys; `net.admission` decides, this module looks and acts.

libzmq accepts every connection, and reports by the socket's monitor when it does. The bytes that a connection has moved
tell how far its handshake is. Loop thread only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import resource
import select
import socket
import struct

from rlinf_actors.net.admission import BACKLOG, PENDING, Connection, ConnectionTable, Handshake, Limits
from rlinf_actors.net.connection_watch import BorrowedSocket, moved, progress_of
from rlinf_actors.net.curve import ACCEPTED, DISCONNECTED, FAILED_PROTOCOL, why_rejected
from rlinf_actors.security.members import Gate

AT_SERVER = ACCEPTED | DISCONNECTED | FAILED_PROTOCOL
"""The monitor events that `ConnectionGuard.on_event` handles."""
BATCH = 64
"""Most connections that are inspected in one turn of the loop."""
CANDIDATES = 8
"""Most pending connections that are inspected for eviction when a new connection arrives."""
GATHER_S = 0.02
"""Seconds from the first bytes until connections are inspected: many connections then cost one turn of the loop, and a
connection is inspected less often than its handshake has steps."""
INSPECT_S = 0.25
"""Seconds between two inspections of all pending connections. epoll alone would miss bytes that libzmq read first."""
TOO_MANY = "too many connections have not proved themselves"
SLACK_S = 1.0
"""Seconds by which libzmq's handshake timer may be late."""
_NO_LINGER = struct.pack("ii", 1, 0)  # libzmq's close sends a reset then, and the kernel keeps nothing


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
        self._draining: asyncio.Handle | None = None
        loop.add_reader(self._epoll.fileno(), self._bytes_came)

    def close(self) -> None:
        """Stop enforcing the limits. Connections stay open. Idempotent."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            if self._draining is not None:
                self._draining.cancel()
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

    def _bytes_came(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._draining = self._loop.call_later(GATHER_S, self._drain)

    def _drain(self) -> None:
        found = self._epoll.poll(0, BATCH)
        for fd, _ in found:
            connection = self._table.pending(fd)
            if connection is not None:
                self._inspect(connection)
            else:
                self._unregister(fd)
        if len(found) == BATCH:
            self._draining = self._loop.call_soon(self._drain)
        else:
            self._draining = None
            self._loop.add_reader(self._epoll.fileno(), self._bytes_came)

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
        progress = progress_of(fd)
        if progress is None or progress[0] != connection.peer:  # closed, or the number's next user
            self._table.closed(fd)
            return
        state = self._table.progress(fd, *progress[1])
        if state is Handshake.DONE:
            self._unregister(fd)
        elif too_many or state is Handshake.FLOODED:
            self._judge(connection, too_many)

    def _judge(self, connection: Connection, too_many: str) -> None:
        """Shut down a pending connection, or spare it if it waits for our part of the handshake."""
        fd = connection.fd
        with self._borrowed.on(fd, self._ports) as peer:
            if peer is None or peer != connection.peer:  # closed, or the number's next user, which libzmq reports soon
                self._table.closed(fd)
                return
            state = self._table.progress(fd, *moved(self._borrowed.connection))
            if state is Handshake.FLOODED:
                self._shut_down(fd, peer, state.value)
            elif too_many and state is Handshake.PENDING:
                self._shut_down(fd, peer, too_many)
            elif state is Handshake.OURS:
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
