"""What was refused, bounded: the first of each kind at once, repetitions by their number. Pure; time is an argument.

House rules: whoever is refused can make us say one thing in a window, and not more. Nothing is lost: what is not said
yet is counted, however long nobody takes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

KINDS = 64
"""So many kinds are told apart at a time; what comes on top is counted together."""


@dataclass(frozen=True)
class Due(Generic[T]):
    """What is to be said now.

    Attributes:
        what: the last of them.
        times: so many were refused.
        again: they repeat one that was said in the window before.
        others: they are of several kinds, for which there was no room.
    """

    what: T
    times: int
    again: bool = False
    others: bool = False


@dataclass
class _Kind(Generic[T]):
    what: T
    count: int = 0
    until: float = -math.inf  # when its number is due: the first at once


class RefusalTally(Generic[T]):
    """Counts refusals until they are taken.

    Args:
        window_s: seconds between two numbers of one kind.
        kinds: that are told apart at a time.

    Attributes:
        count: so many by now.
    """

    def __init__(self, window_s: float, kinds: int = KINDS) -> None:
        self._window_s = window_s
        self._limit = kinds
        self._kinds: dict[tuple[str, str], _Kind[T]] = {}
        self._others: _Kind[T] | None = None
        self.count = 0

    def note(self, who: str, kind: str, what: T, now: float, times: int = 1) -> bool:
        """Something was refused, *times* times; returns whether it is due at once.

        Args:
            who: was refused; a refusal is a repetition of the one before if *who* and *kind* are the same.
            kind: of the refusal.
            what: is handed back when it is due.
            now: the time.
            times: how often.
        """
        self.count += times
        known = self._kinds.get((who, kind))
        if known is None and len(self._kinds) < self._limit:
            known = self._kinds[who, kind] = _Kind(what)
        elif known is None:
            known = self._others = self._others or _Kind(what, until=now + self._window_s)
        known.what, known.count = what, known.count + times
        return known.until <= now

    def take(self, now: float) -> list[Due[T]]:
        """What is due by now; whoever cannot say it notes it again."""
        due: list[Due[T]] = []
        for key, kind in [(key, kind) for key, kind in self._kinds.items() if kind.until <= now]:
            if kind.count:
                due.append(Due(kind.what, kind.count, again=kind.until > -math.inf))
                kind.until, kind.count = now + self._window_s, 0
            else:
                del self._kinds[key]
        if self._others is not None and self._others.until <= now:
            due.append(Due(self._others.what, self._others.count, others=True))
            self._others = None
        return due

    def next_deadline(self) -> float:
        """When `take` has something to do, infinity for never."""
        others = self._others.until if self._others is not None else math.inf
        return min([others, *(kind.until for kind in self._kinds.values())])
