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
from dataclasses import dataclass

from rlinf_actors.net.link import peer_name
from rlinf_actors.security.members import LOCAL, Gate, Member

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Limits:
    """Limits of one listener's connections.

    Attributes:
        total: most connections, pending and established.
        pending: most pending connections, without those that cannot be evicted yet.
        backlog: most pending connections, with those that are new or wait for our part of the handshake.
        per_address: most established connections from one address.
        settled_s: seconds after which libzmq has closed a connection that has not authenticated.
    """

    total: int
    pending: int = PENDING
    backlog: int = BACKLOG
    per_address: int = PER_ADDRESS
    settled_s: float = math.inf


class Handshake(enum.Enum):
    """Progress of a pending connection's handshake. OURS: the peer has done its part and waits for ours."""

    PENDING = "pending"
    OURS = "it waits for our part"
    DONE = "done"
    FLOODED = "it has sent more than a handshake has"


@dataclass
class Connection:
    """One TCP connection of a listener.

    Attributes:
        fd: its descriptor in this process while it is open.
        peer: address and port of the other end. No other connection to this listener has the same while this one is
            open.
        at: when it was accepted, or when `ConnectionTable.spare` was last called for it.
        share: the address or network that it is counted for (`share_of`).
    """

    fd: int
    peer: tuple[str, int]
    at: float
    share: str


class ConnectionTable:
    """The pending and established connections of one listener."""

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
        """Add a pending connection. Return why it must be closed at once, "" if it may stay."""
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
        """Remove a connection that has ended, pending or established. Unknown descriptors are ignored."""
        if self._pop_pending(fd) is None:
            connection = self._established.pop(fd, None)
            if connection is not None:
                self._established_of[connection.share] -= 1
                if not self._established_of[connection.share]:
                    del self._established_of[connection.share]

    def progress(self, fd: int, sent: int, received: int) -> Handshake:
        """Return the progress of a pending connection's handshake, by the bytes that this end has sent and received.

        If the handshake is done, move the connection to the established ones.
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
        """Return the pending connection to close next, None if there are not too many.

        The caller must call `spare` for the connection instead if `progress` says that it waits for our part (OURS).
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
        """Treat a pending connection as if it had been accepted at time *now*."""
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
    """Return the key by which connections are counted: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in host:
        return host
    return f"{int(ipaddress.IPv6Address(host.partition('%')[0])) >> 64:x}"


class Admission:
    """Checks each frame of one listener: its key must be admitted, and an identity belongs to one member only.

    `dropped` counts the frames whose keys are no longer admitted, `stolen` those with another member's identity.
    """

    def __init__(self, gate: Gate, identities: int = IDENTITIES) -> None:
        self._admit = gate.admit
        self._limit = identities
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self.dropped = 0
        self.stolen = 0

    def admits(self, peer: bytes, key: str) -> bool:
        """Return True if a frame may be handled. Loop thread.

        *peer* is the sender's identity; *key* the key that its connection proved, "" on a unix socket, which only this
        user can reach.
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
        if len(self._owners) > self._limit:
            self._owners.popitem(last=False)
        return True

    def member_of(self, peer: bytes) -> Member | None:
        """Return the member that uses this identity, None if the identity is unknown or its key is no longer
        admitted.
        """
        key = self._owners.get(peer)
        if key is None:
            return None
        return self._admit(key) if key else LOCAL
