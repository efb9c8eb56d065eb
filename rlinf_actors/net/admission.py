"""Whose frames a listener hands on: the key behind each is admitted, and an identity belongs to one member. Pure.

libzmq lets a new connection take over the routing id of an old one, whichever keys they have, and cannot end the
connection of one peer. So every frame is judged by the key that its connection proved.

How many connections a listener over TCP has, who of them has proved itself, and who must go. Pure.

libzmq takes every connection, and gives each 5 s and a message's memory before it has proved anything. Here each is a
newcomer until its handshake is done, and a member from then on:

* There are few newcomers. One too many, and the oldest of the address that has most of them goes: who wants to fill
  the room takes his own places.
* Each has a second first, and is passed over while it waits for our part of the handshake: a thousand members who come
  back at one moment would only come again. A stranger waits for us no longer than our part takes.
* Where they are so many that this cannot be, the last one of that address goes at once: who comes again and again gets
  his second.
* A newcomer sends a few hundred bytes. Who sends more is about to have us keep it.
* Members are never closed for others. What comes when there are too many of them, here or of one address, goes at once.

That a handshake is done is seen by the bytes that we have sent: READY, the server's last command, is sent to nobody
whose key was not let in, and all that comes before it has a fixed length.
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

KEPT = 65536
"""Identities whose keys are known, those heard of last: 15 MiB at most. Identities have a random part that others do
not know, so that nobody takes over one that was forgotten."""


class Admission:
    """Judges the frames of one listener.

    Args:
        gate: knows the keys.
        kept: how many identities are remembered.

    Attributes:
        dropped: frames of keys that are not admitted any more.
        stolen: frames of members that used another's identity.
    """

    def __init__(self, gate: Gate, kept: int = KEPT) -> None:
        self._admit = gate.admit
        self._kept = kept
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self.dropped = 0
        self.stolen = 0

    def admits(self, peer: bytes, key: str) -> bool:
        """Whether a frame is handed on, now. Loop thread.

        Args:
            peer: the identity that it came from.
            key: that its connection proved to have; "" on a unix socket, which only this user can reach.
        """
        member = self._admit(key) if key else LOCAL
        if member is None:
            self.dropped += 1
            return False
        owner = self._owners.get(peer)
        if owner == key:
            self._owners.move_to_end(peer)
            return True
        if owner is not None and not self._same(owner, member):
            self.stolen += 1
            if self.stolen == 1 or self.stolen % 1000 == 0:
                whose = peer_name(peer)
                log.error("%s uses %r, the identity of another (%d times by now): dropped", member, whose, self.stolen)
            return False
        self._owners[peer] = key
        if len(self._owners) > self._kept:
            self._owners.popitem(last=False)
        return True

    def member_of(self, peer: bytes) -> Member | None:
        """Who is behind an identity that was let in; None if its key is not admitted any more, or nobody came."""
        key = self._owners.get(peer)
        if key is None:
            return None
        return self._admit(key) if key else LOCAL

    def _same(self, key: str, member: Member) -> bool:
        """Whether whoever had *key* is that member, who has another one by now, or nobody any more."""
        owner = self._admit(key) if key else LOCAL
        return owner is None or owner.is_same(member)


NEWCOMERS = 1024
"""At one listener, that let us wait: 14 KiB of memory and a descriptor each."""
BACKLOG = 2048
"""At one listener, in all: the 1,152 workers of 18 nodes come back to a restarted head at one moment."""
FAIR_S = 1.0
"""What every newcomer that is not closed at once may take for its part."""
OF_ADDRESS = 4096
"""Members' connections from one address. 18 nodes with 64 workers each make 1,151 at a worker, from all addresses."""
_OWED = ((11, 10), (64, 64), (64 + 170, 64 + 202), (1 << 62, 64 + 202 + 250))
"""Who was sent less than the first of a row has done its part if it has sent the second: of the greeting, in two parts,
of HELLO and WELCOME, of INITIATE (280 and more) and READY."""
HANDSHAKE_BYTES = 4096
"""What a newcomer may send. A greeting is 64 bytes, HELLO 202, INITIATE 500 with the longest identity of 255."""
UNPROVED_BYTES = 64 + 170 + 12
"""What it is sent at most before it is let in: a greeting, WELCOME, and ERROR if it is not; READY has 67 and more."""


@dataclass(frozen=True)
class Limits:
    """Of one listener.

    Attributes:
        total: connections.
        newcomers: those of them that have not proved themselves.
        backlog: newcomers with those who have come just now, or wait for us.
        of_address: those of one address that have.
        settled_s: seconds after which libzmq has closed who has not.
    """

    total: int
    newcomers: int = NEWCOMERS
    backlog: int = BACKLOG
    of_address: int = OF_ADDRESS
    settled_s: float = math.inf


class Look(enum.Enum):
    """What a connection is that was looked at."""

    NEW = "new"
    OWED = "it waits for us"
    PROVED = "proved"
    TOO_MUCH = "it has sent more than a handshake has"


@dataclass
class Arrival:
    """One connection.

    Attributes:
        fd: its descriptor here, while it is open.
        peer: the other end's address and port, which no other connection to this port has meanwhile.
        at: when it came, or was passed over.
    """

    fd: int
    peer: tuple[str, int]
    at: float
    share: str


class Crowd:
    """The connections of one listener.

    Args:
        limits: of theirs.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # OrderedDicts: the first of a dict that loses its first all the time is slow to find
        self._newcomers: OrderedDict[int, Arrival] = OrderedDict()
        self._new_of: dict[str, OrderedDict[int, None]] = {}
        self._members: dict[int, Arrival] = {}
        self._members_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._newcomers) + len(self._members)

    def newcomer(self, fd: int) -> Arrival | None:
        """Who has this descriptor, if that has not proved itself."""
        return self._newcomers.get(fd)

    def newcomers(self) -> list[int]:
        """The descriptors of those that have not proved themselves."""
        return list(self._newcomers)

    def came(self, fd: int, peer: tuple[str, int], now: float) -> str:
        """A connection was accepted; returns why it must go, "" if it may stay. In either case it is a newcomer."""
        self.gone(fd)  # whoever had that descriptor: libzmq does not tell of every end
        self._settle(now)
        arrival = Arrival(fd, peer, now, share_of(peer[0]))
        self._newcomers[fd] = arrival
        self._new_of.setdefault(arrival.share, OrderedDict())[fd] = None
        if self._members_of[arrival.share] >= self.limits.of_address:
            return f"its address has {self.limits.of_address} connections already"
        if len(self._members) >= self.limits.total:
            return f"there are {self.limits.total} connections already, all that LimitNOFILE= (ulimit -n) has room for"
        return ""

    def gone(self, fd: int) -> None:
        """A connection has ended. Unknown ones are ignored."""
        arrival = self._pop_newcomer(fd)
        if arrival is None:
            member = self._members.pop(fd, None)
            if member is not None:
                self._members_of[member.share] -= 1
                if not self._members_of[member.share]:
                    del self._members_of[member.share]

    def looked(self, fd: int, sent: int, received: int) -> Look:
        """What became of a newcomer; who has proved itself is a member from now on.

        Args:
            fd: its descriptor.
            sent: bytes that were sent to it.
            received: bytes that it has sent.
        """
        if sent > UNPROVED_BYTES:
            self._proved(fd)
            return Look.PROVED
        if received > HANDSHAKE_BYTES:
            return Look.TOO_MUCH
        is_owed = received >= next(asked for below, asked in _OWED if sent < below)
        return Look.OWED if is_owed and len(self._newcomers) <= self._room(self.limits.backlog) else Look.NEW

    def surplus(self, now: float) -> Arrival | None:
        """Who is to be looked at, and must go if that is NEW; None while there are not too many newcomers."""
        if len(self._newcomers) <= self._room(self.limits.newcomers):
            return None
        most = max(self._new_of.values(), key=len)
        oldest = self._newcomers[next(iter(most))]
        if now - oldest.at >= FAIR_S:
            return oldest
        if len(self._newcomers) > self._room(self.limits.backlog):
            return self._newcomers[next(reversed(most))]
        return None

    def pass_over(self, fd: int, now: float) -> None:
        """It is not the turn of this newcomer: it is as if it had come now."""
        arrival = self._newcomers[fd]
        arrival.at = now
        self._newcomers.move_to_end(fd)
        self._new_of[arrival.share].move_to_end(fd)

    def _room(self, most: int) -> int:
        return max(1, min(most, self.limits.total - len(self._members)))

    def _settle(self, now: float) -> None:
        while self._newcomers:
            oldest = next(iter(self._newcomers.values()))
            if now - oldest.at <= self.limits.settled_s:
                return
            self._proved(oldest.fd)

    def _proved(self, fd: int) -> None:
        arrival = self._pop_newcomer(fd)
        if arrival is not None:
            self._members[fd] = arrival
            self._members_of[arrival.share] += 1

    def _pop_newcomer(self, fd: int) -> Arrival | None:
        arrival = self._newcomers.pop(fd, None)
        if arrival is not None:
            same = self._new_of[arrival.share]
            del same[fd]
            if not same:
                del self._new_of[arrival.share]
        return arrival


def share_of(host: str) -> str:
    """Whose connections are counted together: an IPv4 address's, or those of an IPv6 network of 64 bits."""
    if ":" not in host:
        return host
    return f"{int(ipaddress.IPv6Address(host.partition('%')[0])) >> 64:x}"
