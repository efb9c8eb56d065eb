"""Whom a head has given up on, so that they are refused by name when they return. Pure.

House rule: nobody pushes out what is known of others. What is remembered because a member says so is counted under that
member's name, and makes room for itself.
"""

from __future__ import annotations

from rlinf_actors.head.commands import Emit, Keep
from rlinf_actors.head.remembered import KEPT, ForgetGaveUp, GaveUp, Remembered
from rlinf_actors.security.members import LOCAL, Member

KEPT_OF_ONE = 1024
"""So many of each kind are remembered because one member says so."""
ID_CHARS = 256
"""Longer ones are nobody's: ids are made by rlinf-actors, of a few dozen characters."""


class Ended:
    """Who has ended and why, the last *limit* of them.

    Args:
        kind: of those who end; see head.remembered.
        emit: takes commands: a head that is restarted is to know those who may still be there.
        before: what an earlier head at this place knew.
        limit: so many are remembered.
        limit_of_one: so many for one member.
    """

    def __init__(
        self, kind: str, emit: Emit, before: Remembered, limit: int = KEPT, limit_of_one: int = KEPT_OF_ONE
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
            self._emit(Keep(GaveUp(self._kind, id, reason)))
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
            self._emit(Keep(ForgetGaveUp(self._kind, id)))


def label(member: Member) -> str:
    """Under which name a member's share is counted; local peers, who may do everything, have no limit of their own."""
    return "" if member.role == "local" else str(member)
