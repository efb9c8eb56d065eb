"""The connections of a listener by the identities of their peers: what they have not read, and how they are closed.

libzmq keeps all that a peer has not read, and does not say how much that is. It is the difference between the bytes
that were given to libzmq for a connection and the bytes that the kernel has sent by it. Connections by unix sockets are
not watched: only this user and root can make them. Loop thread only.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.net.admission import IDENTITIES
from rlinf_actors.net.connection_watch import BorrowedSocket, Disconnector, fd_of, moved

if TYPE_CHECKING:
    import zmq

clock = time.monotonic

UNREAD_BYTES = 32 << 20
"""Most bytes that wait for one connection to read them. The longest answer has 16 MiB."""
MEMBER_UNREAD_BYTES = 256 << 20
"""Most bytes that wait for all connections of one member."""
LOOK_BYTES = 1 << 20
"""Bytes that are sent by a connection before the kernel is asked again how many of them have left."""
ENDED_S = 60.0
"""Seconds for which a connection that has ended is remembered: messages that came by it may wait to be handled."""
LOOKS = 4
"""Connections that are looked at for each new one, to find those that have ended."""
_SEALED = 33
"""Bytes that CURVE adds to a message; ZMTP adds 2, or 9 from 256 bytes on."""


class _Connection(msgspec.Struct):
    fd: int
    address: tuple[str, int]
    key: str
    given: int  # bytes given to libzmq, as the kernel will count them
    looked: int  # `given` when the kernel was asked last
    unread: int = 0
    closing: bool = False
    ended: float = 0.0  # when it was noticed; `fd` is -1 since then


class Connections:
    """The connections of one listener that have proved a key.

    Args:
        disconnector: closes them.
        on_closed: called with key, address and reason when a connection is about to be closed.
        on_forgotten: called with the identity of a peer whose connection has ended.
    """

    def __init__(
        self,
        disconnector: Disconnector,
        on_closed: Callable[[str, str, str], object],
        on_forgotten: Callable[[bytes], object],
    ) -> None:
        self._disconnector = disconnector
        self._on_closed = on_closed
        self._on_forgotten = on_forgotten
        self._connections: collections.OrderedDict[bytes, _Connection] = collections.OrderedDict()
        self._of_key: dict[str, dict[bytes, None]] = {}
        self._unread: collections.Counter[str] = collections.Counter()
        self._borrowed = BorrowedSocket()

    def close_all(self) -> None:
        """Release what this object holds. Connections stay open."""
        self._borrowed.close()

    def is_closing(self, peer: bytes, frame: zmq.Frame) -> bool:
        """Return True if the connection by which *frame* came is about to be closed. Remember the connection."""
        known = self._connections.get(peer)
        if known is not None and known.fd >= 0 and not known.closing:
            return False
        fd = fd_of(frame)
        with self._borrowed.on(fd, self._disconnector.ports) as address:
            if known is not None and (known.fd, known.address) == (fd, address):
                return known.closing
            self._forget(peer)
            if address is None:
                return False  # it has ended meanwhile
            sent = moved(self._borrowed.connection)[0]
        key = str(frame.get("User-Id"))
        self._connections[peer] = _Connection(fd, address, key, sent, sent)
        self._of_key.setdefault(key, {})[peer] = None
        for _ in range(LOOKS):
            self._look_at_oldest()
        if len(self._connections) > IDENTITIES:
            self._forget(next(iter(self._connections)))
        return False

    def sent(self, peer: bytes, size: int) -> None:
        """Count a chunk of *size* bytes for a connection. If too much waits for it, close the connection."""
        known = self._connections.get(peer)
        if known is None:
            return
        known.given += size + _SEALED + (2 if size + _SEALED < 256 else 9)
        if known.given - known.looked >= LOOK_BYTES:
            self._look(known)
            if known.unread > UNREAD_BYTES:
                self.close(peer, known.key, f"it has not read {UNREAD_BYTES >> 20} MiB of answers and notices")
            elif self._unread[known.key] > MEMBER_UNREAD_BYTES:
                for other in self._of_key[known.key]:
                    self._look(self._connections[other])
                if self._unread[known.key] > MEMBER_UNREAD_BYTES:
                    why = f"its key has left {MEMBER_UNREAD_BYTES >> 20} MiB of answers and notices unread"
                    self.close(peer, known.key, why)

    def refuses(self, peer: bytes) -> bool:
        """Return True if nothing is sent by a connection any more, because it is about to be closed."""
        known = self._connections.get(peer)
        return known is not None and known.closing

    def close(self, peer: bytes, key: str, why: str) -> None:
        """Close a connection soon, after its peer could read the reason. *why* is for the event log."""
        known = self._connections.get(peer)
        if known is None or known.closing:
            return
        known.closing = True
        self._disconnector.close(peer, known.fd, known.address)
        self._on_closed(key, known.address[0], f"{why}: its connection is closed; it may connect again")

    def _look(self, known: _Connection) -> None:
        with self._borrowed.on(known.fd, self._disconnector.ports) as address:
            if address == known.address:
                sent = moved(self._borrowed.connection)[0]
            else:  # it has ended, and libzmq keeps nothing for it
                sent, known.fd, known.ended = known.given, -1, clock()
        known.looked = known.given = max(known.given, sent)
        self._unread[known.key] -= known.unread
        known.unread = known.given - sent if sent else 0  # an old kernel does not say
        self._unread[known.key] += known.unread

    def _look_at_oldest(self) -> None:
        """Forget the connection that was looked at longest ago if it has ended ENDED_S ago. libzmq does not report
        every end. Each new connection has LOOKS looked at, so those that have ended are never many.
        """
        peer, known = next(iter(self._connections.items()))
        if known.fd >= 0:
            with self._borrowed.on(known.fd, self._disconnector.ports) as address:
                if address != known.address:
                    known.fd, known.ended = -1, clock()
        elif clock() - known.ended >= ENDED_S:  # a peer that is back by another connection has another entry
            self._forget(peer)
            self._on_forgotten(peer)
            return
        self._connections.move_to_end(peer)

    def _forget(self, peer: bytes) -> None:
        known = self._connections.pop(peer, None)
        if known is None:
            return
        self._unread[known.key] -= known.unread
        of_key = self._of_key[known.key]
        del of_key[peer]
        if not of_key:
            del self._of_key[known.key], self._unread[known.key]
