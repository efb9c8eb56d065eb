"""Counts refused connections and requests, and limits how often they are reported. Pure; time is an argument.

The first refusal of a kind is due for a report at once. Repetitions within a window are counted and reported as one
number at its end. So a refused peer causes at most one report per kind and window. Unreported refusals are not lost:
their number stays until `take` returns it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

KINDS = 64
"""Number of kinds that are counted separately at one time; further kinds are counted together."""


@dataclass(frozen=True)
class Due(Generic[T]):
    """A report of refusals that is due now.

    Attributes:
        what: the value that was given to `note` with the last of these refusals.
        times: the number of refusals.
        again: True if they repeat a kind that was reported in the window before.
        others: True if they are of several kinds, which were counted together because there were too many kinds.
    """

    what: T
    times: int
    again: bool = False
    others: bool = False


@dataclass
class _Kind(Generic[T]):
    what: T
    count: int = 0
    until: float = -math.inf  # time at which its next report is due; the first is due at once


class RefusalTally(Generic[T]):
    """Counts refusals by kind until `take` returns them.

    Args:
        window_s: seconds between two reports of one kind.
        kinds: number of kinds that are counted separately at one time.

    Attributes:
        count: number of refusals so far, reported or not.
    """

    def __init__(self, window_s: float, kinds: int = KINDS) -> None:
        self._window_s = window_s
        self._limit = kinds
        self._kinds: dict[tuple[str, str], _Kind[T]] = {}
        self._others: _Kind[T] | None = None
        self.count = 0

    def note(self, who: str, kind: str, what: T, now: float, times: int = 1) -> bool:
        """Count a refusal. Return True if a report of it is due at once, so that the caller should call `take`.

        Args:
            who: the refused peer. Refusals with equal *who* and *kind* count as repetitions of each other.
            kind: kind of the refusal.
            what: value that `take` returns in `Due.what`.
            now: the time, in seconds.
            times: number of refusals.
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
        """Return the reports that are due at time *now*, and count from 0 again.

        A caller that cannot deliver a report passes it to `note` again.
        """
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
        """Return the time at which `take` has something to do, infinity for never."""
        others = self._others.until if self._others is not None else math.inf
        return min([others, *(kind.until for kind in self._kinds.values())])
