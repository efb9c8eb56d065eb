"""Limits on the connections of a TCP listener, and a check of each frame's sender. Pure: time is an argument.

libzmq accepts every connection and keeps it for 5 s without authentication. `ConnectionTable` limits that. A connection
is pending until its handshake is done, and established afterwards. If too many are pending, the table evicts the oldest
one of the address with the most, so a flooding address evicts only its own. It spares connections in their first FAIR_S
seconds, and those that wait for our part of the handshake, because a thousand members may reconnect at one moment.
Beyond the backlog it evicts the newest one instead. An established connection is never closed to make room: a new one
is closed at once. The number of bytes that we have sent shows when a handshake is done: READY, the server's last
command, goes only to an admitted key, and everything before it has a fixed length.

`Admission` checks frames by the key that their connection proved, because libzmq lets a new connection take over the
routing id of an old one, whatever their keys, and cannot end the connection of one peer.
"""

from __future__ import annotations

import collections
import enum
import ipaddress
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rlinf_actors.net.link import peer_name
from rlinf_actors.security.members import LOCAL, Gate, Member

log = logging.getLogger(__name__)

T = TypeVar("T")

PENDING = 1024
"""Most pending connections of one listener. Each costs 14 KiB of memory and a descriptor."""
BACKLOG = 2048
"""Most pending connections of one listener, including those that cannot be evicted yet. After a restart of the head,
the 1,152 workers of 18 nodes reconnect at one moment."""
FAIR_S = 1.0
"""Seconds for which a new pending connection cannot be evicted, because it needs them for its part of the handshake."""
PER_ADDRESS = 4096
"""Most established connections from one address. 18 nodes with 64 workers each make 1,151 connections to a worker."""
_OWED = ((11, 10), (64, 64), (64 + 170, 64 + 202), (1 << 62, 64 + 202 + 250))
"""One row (sent, received) for each step of a handshake. The first row whose *sent* is above the bytes that we have
sent applies: the peer has done its part of that step, and waits for ours, once *received* bytes came from it. The
steps: the greeting in two parts, HELLO and WELCOME, INITIATE (280 bytes and more) and READY."""
HANDSHAKE_BYTES = 4096
"""Most bytes that a pending connection may send. A greeting is 64 bytes, HELLO 202, INITIATE at most 500."""
PENDING_BYTES = 64 + 170 + 12
"""Most bytes that we send to a pending connection: a greeting, WELCOME, and ERROR if it is rejected. READY has 67."""
IDENTITIES = 65536
"""Most identities whose keys an Admission remembers (15 MiB); it forgets the least recently used one first. A peer
cannot take over a forgotten identity, because an identity has a secret part."""


class Limits(msgspec.Struct, frozen=True):
    """Limits on the number of TCP connections of one listener.

    A pending connection has not finished its handshake yet. An established one has.

    Attributes:
        total: most connections, pending and established ones together.
        pending: most pending connections to keep, apart from new ones and those that wait for this process's part of
            the handshake.
        backlog: most pending connections to keep, new ones and those that wait for this process included.
        per_address: most established connections from one address.
        settled_s: a connection that libzmq has kept for so many seconds counts as established, because libzmq closes
            connections that have not authenticated by then. Needed if the kernel does not report the bytes sent.
    """

    total: int
    pending: int = PENDING
    backlog: int = BACKLOG
    per_address: int = PER_ADDRESS
    settled_s: float = math.inf


class Handshake(enum.Enum):
    """Progress of a pending connection's handshake.

    PENDING: the peer still has to do a part. OURS: the peer has done its part and waits for this process. DONE: the
    handshake is finished. FLOODED: the peer has sent more bytes than any handshake has.
    """

    PENDING = "pending"
    OURS = "it waits for our part"
    DONE = "done"
    FLOODED = "it has sent more than a handshake has"


class Connection(msgspec.Struct):
    """One TCP connection that a listener has accepted.

    Attributes:
        fd: descriptor of the connection in this process.
        peer: IP address and port of the other end. No other open connection of this listener has the same pair.
        at: when the connection was accepted, or when `ConnectionTable.spare` was last called for it.
        share: the connection's address or network, as `share_of` returns it. Connections are counted by this key.
    """

    fd: int
    peer: tuple[str, int]
    at: float
    share: str


class ConnectionTable:
    """Counts the pending and established connections of one listener and decides which connections to close.

    The caller reports each connection's begin, progress and end, and closes the connections itself.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # OrderedDicts: a dict that keeps losing its first entry is slow to find the next one
        self._pending: OrderedDict[int, Connection] = OrderedDict()
        self._pending_of: dict[str, OrderedDict[int, None]] = {}
        self._established: dict[int, Connection] = {}
        self._established_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pending) + len(self._established)

    def pending(self, fd: int) -> Connection | None:
        return self._pending.get(fd)

    def all_pending(self) -> list[int]:
        return list(self._pending)

    def accepted(self, fd: int, peer: tuple[str, int], now: float) -> str:
        """Add a new connection as pending. *peer* is its IP address and port.

        Returns:
            "" if the connection may stay; otherwise the reason why the caller must close it at once.
        """
        self.closed(fd)  # the one that had this descriptor: libzmq does not report every end
        self._settle(now)
        connection = Connection(fd, peer, now, share_of(peer[0]))
        self._pending[fd] = connection
        self._pending_of.setdefault(connection.share, OrderedDict())[fd] = None
        if self._established_of[connection.share] >= self.limits.per_address:
            return f"its address has {self.limits.per_address} connections already"
        if len(self._established) >= self.limits.total:
            return f"there are {self.limits.total} connections already, all that LimitNOFILE= (ulimit -n) has room for"
        return ""

    def closed(self, fd: int) -> None:
        """Remove a connection that has ended. Do nothing if no connection with the descriptor *fd* is in the table."""
        if self._pop_pending(fd) is None:
            connection = self._established.pop(fd, None)
            if connection is not None:
                self._established_of[connection.share] -= 1
                if not self._established_of[connection.share]:
                    del self._established_of[connection.share]

    def progress(self, fd: int, sent: int, received: int) -> Handshake:
        """Return how far the handshake of a pending connection is, judged by the number of bytes moved.

        If the handshake is done, the connection becomes an established one in the table. While the listener's backlog
        is full, the result is PENDING instead of OURS, so that the connection can be closed.

        Args:
            fd: descriptor of the connection.
            sent: bytes that this process has sent.
            received: bytes that this process has received.
        """
        if sent > PENDING_BYTES:
            self._establish(fd)
            return Handshake.DONE
        if received > HANDSHAKE_BYTES:
            return Handshake.FLOODED
        is_owed = received >= next(asked for below, asked in _OWED if sent < below)
        is_spared = is_owed and len(self._pending) <= self._room(self.limits.backlog)
        return Handshake.OURS if is_spared else Handshake.PENDING

    def to_evict(self, now: float) -> Connection | None:
        """Return the pending connection that the caller should close next, None if there are not too many.

        If `progress` returns OURS for the connection, the caller must not close it, but call `spare`.
        """
        if len(self._pending) <= self._room(self.limits.pending):
            return None
        most = max(self._pending_of.values(), key=len)
        oldest = self._pending[next(iter(most))]
        if now - oldest.at >= FAIR_S:
            return oldest
        if len(self._pending) > self._room(self.limits.backlog):
            return self._pending[next(reversed(most))]
        return None

    def spare(self, fd: int, now: float) -> None:
        """Make a pending connection count as accepted at time *now*, so that `to_evict` chooses older ones first."""
        connection = self._pending[fd]
        connection.at = now
        self._pending.move_to_end(fd)
        self._pending_of[connection.share].move_to_end(fd)

    def _room(self, most: int) -> int:
        return max(1, min(most, self.limits.total - len(self._established)))

    def _settle(self, now: float) -> None:
        # where the kernel does not report bytes: a connection that libzmq has kept for so long is established
        while self._pending:
            oldest = next(iter(self._pending.values()))
            if now - oldest.at <= self.limits.settled_s:
                return
            self._establish(oldest.fd)

    def _establish(self, fd: int) -> None:
        connection = self._pop_pending(fd)
        if connection is not None:
            self._established[fd] = connection
            self._established_of[connection.share] += 1

    def _pop_pending(self, fd: int) -> Connection | None:
        connection = self._pending.pop(fd, None)
        if connection is not None:
            same = self._pending_of[connection.share]
            del same[fd]
            if not same:
                del self._pending_of[connection.share]
        return connection


def share_of(host: str) -> str:
    """Return the key by which the connections of a host are counted.

    The key is the IPv4 address itself, or the /64 network of an IPv6 address, because one machine can use all addresses
    of such a network.
    """
    if ":" not in host:
        return host
    return f"{int(ipaddress.IPv6Address(host.partition('%')[0])) >> 64:x}"


class Admission:
    """Decides for each frame that one listener receives whether the frame may be handled.

    The key that the frame's connection proved must be admitted, and an identity must not be used by two members.

    Attributes:
        dropped: number of frames that were refused because their key is no longer admitted.
        stolen: number of frames that were refused because they came with the identity of another member.
    """

    def __init__(self, gate: Gate, identities: int = IDENTITIES) -> None:
        self._admit = gate.admit
        self._limit = identities
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._addresses: dict[bytes, str] = {}
        self.dropped = 0
        self.stolen = 0

    def admits(self, peer: bytes, key: str) -> bool:
        """Return True if a frame may be handled. Remember which key uses the sender's identity. Loop thread.

        Args:
            peer: the sender's identity.
            key: the key that the frame's connection proved; "" on a unix socket, which only this user and root can
                open.
        """
        member = self._admit(key) if key else LOCAL
        if member is None:
            self.dropped += 1
            return False
        owner = self._owners.get(peer)
        if owner == key:
            self._owners.move_to_end(peer)
            return True
        if owner is not None:
            # the same member may have a new key by now; a member that is no longer admitted owns nothing
            before = self._admit(owner) if owner else LOCAL
            if before is not None and not before.is_same(member):
                self.stolen += 1
                if self.stolen == 1 or self.stolen % 1000 == 0:
                    log.error(
                        "%s uses %r, the identity of another (%d times by now): dropped",
                        member,
                        peer_name(peer),
                        self.stolen,
                    )
                return False
        self._owners[peer] = key
        self._addresses.pop(peer, None)
        if len(self._owners) > self._limit:
            self._addresses.pop(self._owners.popitem(last=False)[0], None)
        return True

    def note(self, peer: bytes, address_of: Callable[[T], str], frame: T) -> None:
        """Remember the address from which *peer* came first. If it is not known, *address_of* tells it of *frame*."""
        if peer not in self._addresses:
            self._addresses[peer] = address_of(frame)

    def forget(self, peer: bytes) -> None:
        """Forget an identity whose connection has ended."""
        self._owners.pop(peer, None)
        self._addresses.pop(peer, None)

    def address_of(self, peer: bytes) -> str:
        """Return the address of *peer*, "" if it is not known."""
        return self._addresses.get(peer, "")

    def member_of(self, peer: bytes) -> Member | None:
        """Return the member that uses the identity *peer*; None if the identity is unknown or its key is no longer
        admitted.
        """
        key = self._owners.get(peer)
        if key is None:
            return None
        return self._admit(key) if key else LOCAL
