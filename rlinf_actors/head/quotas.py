"""Limits on the number of things that one member may make the head store or wait for. Pure.

Members may be faulty or hostile. A waiting request is examined again and again, and stored state takes memory and disk,
so each kind has a limit in the table `LIMITS`. A quota refuses a request that exceeds its limit. A tombstone is never
refused: the oldest tombstone of the same member is dropped for it, so that no member pushes out the tombstones of
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from rlinf_actors.head.commands import KEPT, Emit, ForgetTombstone, Persist, Refused, Snapshot, Tombstone
from rlinf_actors.security.members import LOCAL, Member

K = TypeVar("K")


class Limit(NamedTuple):
    """The largest number of things of one kind that one holder, such as a member, may have. `LIMITS` has all limits.

    `most` is that number. The error text calls the things `what` and the holder `holder`, and says what to do by
    `advice`.
    """

    most: int
    what: str
    holder: str
    advice: str = ""


LIMITS: dict[str, Limit] = {
    # A process has a few dozen requests open: calls of its own threads and children.
    "requests": Limit(1024, "requests without an answer", "connection or key", ": wait for answers first"),
    # All workers of a job share one key: more than one request for each worker of the largest job.
    "job requests": Limit(32768, "requests without an answer", "job", ": wait for answers first"),
    # The workers of a job share one key: 18 nodes with 64 workers each are 1,152.
    "sessions": Limit(4096, "sessions with the head", "key", ": end some of them"),
    # A client whose process an agentd watches stays without sending a word, so each costs memory until it ends.
    "drivers": Limit(1000, "driver processes", "driver's key", ": end some of them"),
    # One lives at a time. Lost nodes count while their rank is kept, also those of an agentd that changes its id.
    "nodes": Limit(64, "nodes", "key", ": lost ones count while their rank is kept"),
    # Owners that an agentd names after a restart of the head, and clients whose end a client wants to hear of.
    "expected clients": Limit(16384, "clients that this head has not met", "member"),
    # Workers that a returning client names and no agentd has: a tombstone each.
    "missing workers": Limit(1024, "workers that no node has", "client"),
    # Each has at most 4 MiB; a launch of 100,000 workers has 50.
    "launch parts": Limit(128, "parts of launches that it has not completed", "key", ": complete those"),
    "readers": Limit(1024, "readers of the event log", "head", ": end some of them"),
    # Leaves room for the readers of others.
    "readers of a key": Limit(32, "readers of the event log", "key", ": end some of them"),
    # Drains stay on disk until a person undoes them, also when the node never comes back.
    "drains": Limit(4096, "nodes that are being drained", "head", ": undo some of them (`rlinf-actors nodes`)"),
}

KEPT_OF_ONE = 1024
"""Largest number of tombstones of one kind that the head keeps for one member."""
ID_CHARS = 256
"""Longest id of a tombstone. The ids that rlinf-actors makes have a few dozen characters."""


def check(limit: str, holder: str, count: int, held: Callable[[], str], kind: str = "usage") -> None:
    """Raise Refused if *holder* has reached the limit LIMITS[*limit*].

    *count* is the number of things that *holder* has already. *holder* is the holder's name in the error text, and
    *held* returns which things these are, and whose (`head.owners`).
    *kind* is the `kind` of Refused, which decides the class of the error that the refused process gets.
    """
    most, what, whose, advice = LIMITS[limit]
    if count >= most:
        text = f"{holder} has {most} {what} already, the most that one {whose} may have{advice}. They are {held()}"
        raise Refused(kind, text, logged=True)


class Quota:
    """Counts how many things of one kind each holder has. The holder "" stands for local processes and has no limit.

    Args:
        limit: the key of LIMITS that names the kind.
    """

    def __init__(self, limit: str) -> None:
        self._limit = limit
        self._counts: Counter[bytes | str] = Counter()
        self._by: dict[bytes | str, Counter[bytes]] = {}

    def is_full(self, holder: bytes | str) -> bool:
        return bool(holder) and self._counts[holder] >= LIMITS[self._limit].most

    def check(self, holder: bytes | str, name: str, held: Callable[[], str], kind: str = "usage") -> None:
        """Raise Refused if *holder* has reached the limit. *name* is the holder's name in the error text.

        *held* returns which things *holder* has, and whose. *kind* is the `kind` of Refused, which decides the class
        of the error that the refused process gets.
        """
        if holder:
            check(self._limit, name, self._counts[holder], held, kind)

    def by(self, holder: bytes | str) -> Mapping[bytes, int]:
        """Return how many things of *holder* came by which connections, as `take` was told."""
        return self._by.get(holder, {})

    def take(self, holder: bytes | str, by: bytes = b"") -> None:
        """Count one more thing of *holder*, which came by the connection *by*, b"" if that is not counted."""
        self._counts[holder] += 1
        if by and holder:
            self._by.setdefault(holder, Counter())[by] += 1

    def free(self, holder: bytes | str, by: bytes = b"") -> None:
        _one_less(self._counts, holder)
        if by and holder:
            _one_less(self._by[holder], by)
            if not self._by[holder]:
                del self._by[holder]

    def forget(self, holder: bytes | str) -> None:
        """Set the count of a holder that has ended to zero."""
        self._counts.pop(holder, None)
        self._by.pop(holder, None)


def _one_less(counts: Counter[K], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class RequestQuota:
    """Counts the accepted requests that have no answer yet. Requests of local processes are not counted.

    Most requests are answered at once. So `begin` only notes a request, and `wait` counts it if it is still open.

    Args:
        named: returns the error text's words for how many requests came by which connections.
    """

    def __init__(self, named: Callable[[Mapping[bytes, int]], str]) -> None:
        self._named = named
        self._of_peer: dict[bytes, dict[int, list[tuple[Quota, str]]]] = {}
        self._peers = Quota("requests")
        self._keys = Quota("requests")
        self._jobs = Quota("job requests")
        self._at_hand: tuple[bytes, int, Quota, str] | None = None

    def begin(self, peer: bytes, id: int, member: Member) -> None:
        """Accept a request, or raise Refused if its connection *peer* or its key has too many open requests.

        A request with the number *id* of an open request is a repetition, and is counted too.
        """
        if member.key:
            of_key = self._jobs if member.role == "worker" else self._keys
            self._peers.check(peer, f"this connection of {member}", lambda: self._named(self._peers.by(peer)))
            of_key.check(member.key, str(member), lambda: self._named(of_key.by(member.key)))
            self._at_hand = (peer, id, of_key, member.key)

    def wait(self) -> None:
        """If the last request of `begin` has no answer yet, count it as open. Called at the end of each event."""
        if self._at_hand is not None:
            peer, id, quota, key = self._at_hand
            self._at_hand = None
            self._of_peer.setdefault(peer, {}).setdefault(id, []).append((quota, key))
            self._peers.take(peer, peer)
            quota.take(key, peer)

    def done(self, peer: bytes, id: int) -> None:
        """Stop counting a request that was answered or needs no answer. Unknown requests are ignored."""
        if self._at_hand is not None and self._at_hand[:2] == (peer, id):
            self._at_hand = None
            return
        waiting = self._of_peer.get(peer, {})
        if id not in waiting:
            return
        quota, key = waiting[id].pop()
        quota.free(key, peer)
        self._peers.free(peer, peer)
        if not waiting[id]:
            del waiting[id]
        if not waiting:
            del self._of_peer[peer]

    def forget(self, peer: bytes) -> None:
        if self._at_hand is not None and self._at_hand[0] == peer:
            self._at_hand = None
        for waiting in self._of_peer.pop(peer, {}).values():
            for quota, key in waiting:
                quota.free(key, peer)
                self._peers.free(peer, peer)


class Tombstones:
    """The ids of processes of one kind that the head has declared ended, with the reasons.

    The head refuses a process whose id is here.

    Args:
        kind: NODE, REPLACED, CLIENT or WORKER of head.commands.
        emit: called with Persist commands, because a restarted head must also refuse processes that may still run.
        before: the persistent state that the earlier head left.
    """

    def __init__(self, kind: str, emit: Emit, before: Snapshot) -> None:
        self._kind = kind
        self._emit = emit
        self._reasons = {id: reason for (of, id), reason in before.given_up.items() if of == kind}
        self._of_member: dict[str, dict[str, None]] = {}
        self._member_of: dict[str, str] = {}
        self._persistent = set(self._reasons)

    def add(self, id: str, reason: str, certain: bool = False, by: Member = LOCAL) -> None:
        """Add a tombstone, and drop the oldest tombstone if there are too many.

        If the end is *certain*, the process cannot return, so the tombstone is not written to disk for a restarted
        head. *by* is the member that reported the end, or to which the process belongs.
        """
        if len(id) > ID_CHARS or self._reasons.get(id) == reason:
            return
        self._forget(id)
        self._reasons[id] = reason
        if not certain:
            self._persistent.add(id)
            self._emit(Persist(Tombstone(self._kind, id, reason)))
        if member := label(by):
            self._member_of[id] = member
            own = self._of_member.setdefault(member, {})
            own[id] = None
            if len(own) > KEPT_OF_ONE:
                self._forget(next(iter(own)))
        if len(self._reasons) > KEPT:
            self._forget(next(iter(self._reasons)))

    def get(self, id: str) -> str | None:
        """Return why the process *id* has ended; None if it has no tombstone, or if the tombstone was dropped."""
        return self._reasons.get(id)

    def _forget(self, id: str) -> None:
        if self._reasons.pop(id, None) is None:
            return
        member = self._member_of.pop(id, "")
        if member:
            del self._of_member[member][id]
            if not self._of_member[member]:
                del self._of_member[member]
        if id in self._persistent:
            self._persistent.discard(id)
            self._emit(Persist(ForgetTombstone(self._kind, id)))


def label(member: Member) -> str:
    """Return the holder name under which quotas count *member*; "" for local processes, which have no limit."""
    return "" if member.role == "local" else str(member)
