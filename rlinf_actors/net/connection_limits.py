"""How many connections a listener over TCP has, who of them has proved itself, and who must go. Pure.

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

import enum
import ipaddress
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

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
