"""How many requests of one member wait for their answers. Pure.

What waits is looked at again and again, and kept: so nobody may have more of it than an honest process ever has.

Whom a head has given up on, so that they are refused by name when they return. Pure.

House rule: nobody pushes out what is known of others. What is remembered because a member says so is counted under that
member's name, and makes room for itself.
"""

from __future__ import annotations

from collections import Counter

from rlinf_actors.head.commands import KEPT, Emit, ForgetTombstone, Persist, Refusal, Snapshot, Tombstone
from rlinf_actors.security.members import LOCAL, Member

MAX_OF_ONE = 1024
"""By one key, or by one connection of a key that many share: the workers of a job have one."""
MAX_OF_JOB = 32768
"""By all workers of a job: more than one a worker of the largest."""


class RequestQuota:
    """The requests that were let in and not answered yet; not those of local peers, who may do everything.

    The one at hand is counted by `wait` only, if it has no answer by then: most are answered at once.
    """

    def __init__(self) -> None:
        self._of_peer: dict[bytes, dict[int, list[str]]] = {}
        self._counts: Counter[bytes] = Counter()
        self._of_key: Counter[str] = Counter()
        self._at_hand: tuple[bytes, int, str] | None = None

    def begin(self, peer: bytes, id: int, member: Member) -> None:
        """A request comes, or comes again: its answer may have been lost, and it will have another.

        Raises:
            Refusal: too many wait already.
        """
        if not member.key:
            return
        if self._of_peer:
            limit = MAX_OF_JOB if member.role == "worker" else MAX_OF_ONE
            if self._counts[peer] >= MAX_OF_ONE or self._of_key[member.key] >= limit:
                raise Refusal("usage", f"too many requests of {member} wait for their answers already")
        self._at_hand = (peer, id, member.key)

    def wait(self) -> None:
        """The request at hand has no answer yet, if there is one at hand still."""
        if self._at_hand is not None:
            peer, id, key = self._at_hand
            self._at_hand = None
            self._of_peer.setdefault(peer, {}).setdefault(id, []).append(key)
            self._counts[peer] += 1
            self._of_key[key] += 1

    def done(self, peer: bytes, id: int) -> None:
        """It has its answer, or needs none. Unknown ones are ignored."""
        if self._at_hand is not None and self._at_hand[:2] == (peer, id):
            self._at_hand = None
            return
        waiting = self._of_peer.get(peer, {})
        if id not in waiting:
            return
        self._drop(peer, waiting[id].pop())
        if not waiting[id]:
            del waiting[id]
        if not waiting:
            del self._of_peer[peer]

    def forget(self, peer: bytes) -> None:
        """Whoever asked has ended."""
        if self._at_hand is not None and self._at_hand[0] == peer:
            self._at_hand = None
        for keys in self._of_peer.pop(peer, {}).values():
            for key in keys:
                self._drop(peer, key)

    def _drop(self, peer: bytes, key: str) -> None:
        self._counts[peer] -= 1
        self._of_key[key] -= 1
        if not self._counts[peer]:
            del self._counts[peer]
        if not self._of_key[key]:
            del self._of_key[key]


KEPT_OF_ONE = 1024
"""So many of each kind are remembered because one member says so."""
ID_CHARS = 256
"""Longer ones are nobody's: ids are made by rlinf-actors, of a few dozen characters."""


class Tombstones:
    """Who has ended and why, the last *limit* of them.

    Args:
        kind: of those who end; see head.remembered.
        emit: takes commands: a head that is restarted is to know those who may still be there.
        before: what an earlier head at this place knew.
        limit: so many are remembered.
        limit_of_one: so many for one member.
    """

    def __init__(
        self, kind: str, emit: Emit, before: Snapshot, limit: int = KEPT, limit_of_one: int = KEPT_OF_ONE
    ) -> None:
        self._kind = kind
        self._emit = emit
        self._limit = limit
        self._limit_of_one = limit_of_one
        self._reasons = {id: reason for (of, id), reason in before.given_up.items() if of == kind}
        self._by: dict[str, dict[str, None]] = {}
        self._said_by: dict[str, str] = {}
        self._kept = set(self._reasons)

    def add(self, id: str, reason: str, certain: bool = False, by: Member = LOCAL) -> None:
        """Remember; the oldest is forgotten.

        Args:
            id: who has ended.
            reason: why.
            certain: it has ended, and need not be refused by a restarted head.
            by: the member that said so, or whose it is.
        """
        if len(id) > ID_CHARS or self._reasons.get(id) == reason:
            return
        self._forget(id)
        self._reasons[id] = reason
        if not certain:
            self._kept.add(id)
            self._emit(Persist(Tombstone(self._kind, id, reason)))
        if share := label(by):
            self._said_by[id] = share
            own = self._by.setdefault(share, {})
            own[id] = None
            if len(own) > self._limit_of_one:
                self._forget(next(iter(own)))
        if len(self._reasons) > self._limit:
            self._forget(next(iter(self._reasons)))

    def get(self, id: str) -> str | None:
        """Why it ended; None if it did not, or too long ago."""
        return self._reasons.get(id)

    def _forget(self, id: str) -> None:
        if self._reasons.pop(id, None) is None:
            return
        by = self._said_by.pop(id, "")
        if by:
            del self._by[by][id]
            if not self._by[by]:
                del self._by[by]
        if id in self._kept:
            self._kept.discard(id)
            self._emit(Persist(ForgetTombstone(self._kind, id)))


def label(member: Member) -> str:
    """Under which name a member's share is counted; local peers, who may do everything, have no limit of their own."""
    return "" if member.role == "local" else str(member)
