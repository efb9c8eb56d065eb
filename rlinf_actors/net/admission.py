"""Admission to a listener over TCP: how many connections it keeps, and whose frames it accepts. Pure.

`ConnectionTable` limits connections. libzmq accepts every connection, and gives each 5 s and a message's memory before
it has authenticated. Here a connection is pending until its handshake is done, and established from then on:

* Few connections may be pending. When there are too many, the oldest one of the address with the most of them is
  closed, so a flooding address evicts only its own connections.
* A pending connection has FAIR_S first, and is spared while it waits for our part of the handshake: a thousand members
  that reconnect at one moment would only come again. A peer cannot make us spare it longer than our part takes.
* When even that is too many (the backlog), the newest pending one of that address is closed at once: a peer that
  retries gets its second later.
* A pending connection sends a few hundred bytes. One that sends more is about to fill our memory, and is closed.
* Established connections are never closed for others. When there are too many of them, in all or from one address, a
  new connection is closed at once.

The bytes that we have sent show that a handshake is done: READY, the server's last command, goes only to an admitted
key, and everything before it has a fixed length.

`Admission` judges frames. libzmq lets a new connection take over the routing id of an old one, whichever keys they
have, and cannot end the connection of one peer. So each frame is judged by the key that its connection proved.
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
"""Pending connections of one listener: 14 KiB of memory and a descriptor each."""
BACKLOG = 2048
"""Pending connections of one listener with those that are spared: the 1,152 workers of 18 nodes come back to a
restarted head at one moment."""
FAIR_S = 1.0
"""Seconds that a pending connection has for its part of the handshake before it can be closed for others."""
PER_ADDRESS = 4096
"""Established connections from one address. 18 nodes with 64 workers each make 1,151 at a worker, from all of them."""
_OWED = ((11, 10), (64, 64), (64 + 170, 64 + 202), (1 << 62, 64 + 202 + 250))
"""(sent, received): a peer that was sent less than *sent* of the first row that applies has done its part once it has
sent *received*: of the greeting, in two parts, of HELLO and WELCOME, of INITIATE (280 bytes and more) and READY."""
HANDSHAKE_BYTES = 4096
"""Bytes that a pending connection may send. A greeting is 64 bytes, HELLO 202, INITIATE at most 500."""
PENDING_BYTES = 64 + 170 + 12
"""Most bytes that a pending connection is sent: a greeting, WELCOME, and ERROR if it is rejected. READY has 67."""
IDENTITIES = 65536
"""Identities whose keys are remembered, the last ones heard of: 15 MiB at most. An identity has a secret part, so a
peer cannot take over one that was forgotten."""


@dataclass(frozen=True)
class Limits:
    """Limits of one listener's connections.

    Attributes:
        total: all of them.
        pending: pending ones.
        backlog: pending ones, with those that are new or wait for us.
        per_address: established ones from one address.
        settled_s: seconds after which libzmq has closed a connection that has not authenticated.
    """

    total: int
    pending: int = PENDING
    backlog: int = BACKLOG
    per_address: int = PER_ADDRESS
    settled_s: float = math.inf


class Handshake(enum.Enum):
    """How far a connection's handshake is."""

    PENDING = "pending"
    OURS = "it waits for our part"
    DONE = "done"
    FLOODED = "it has sent more than a handshake has"


@dataclass
class Connection:
    """One connection.

    Attributes:
        fd: its descriptor in this process while it is open.
        peer: the other end's address and port, which no other connection to this port has meanwhile.
        at: when it was accepted, or spared last.
        share: the address that it is counted for (`share_of`).
    """

    fd: int
    peer: tuple[str, int]
    at: float
    share: str


class ConnectionTable:
    """The connections of one listener."""

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
        """Return the pending connection with this descriptor, None if there is none."""
        return self._pending.get(fd)

    def all_pending(self) -> list[int]:
        """Return the descriptors of all pending connections."""
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
        """Forget a connection that has ended. Unknown ones are ignored."""
        if self._pop_pending(fd) is None:
            connection = self._established.pop(fd, None)
            if connection is not None:
                self._established_of[connection.share] -= 1
                if not self._established_of[connection.share]:
                    del self._established_of[connection.share]

    def progress(self, fd: int, sent: int, received: int) -> Handshake:
        """Return how far a pending connection is, by the bytes that it was sent and that it has sent.

        A connection whose handshake is done counts as established from now on.
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
        """Return the connection to close next unless it waits for us; None while not too many are pending."""
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
        """Treat a pending connection as if it had been accepted now."""
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
    """Judges the frames of one listener: the key behind each is admitted, and an identity belongs to one member.

    Attributes:
        dropped: frames whose keys are not admitted any more, so far.
        stolen: frames of members that used another member's identity, so far.
    """

    def __init__(self, gate: Gate, identities: int = IDENTITIES) -> None:
        self._admit = gate.admit
        self._limit = identities
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self.dropped = 0
        self.stolen = 0

    def admits(self, peer: bytes, key: str) -> bool:
        """Return True if a frame may be handled. Loop thread.

        Args:
            peer: the identity that it came from.
            key: the key that its connection proved; "" on a unix socket, which only this user can reach.
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
        """Return the member behind an identity, None if it is unknown or its key is not admitted any more."""
        key = self._owners.get(peer)
        if key is None:
            return None
        return self._admit(key) if key else LOCAL
