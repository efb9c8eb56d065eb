"""Refused messages and connections: counts repetitions, and enters them into the event log as few entries. Pure.

A refused peer adds at most one entry a minute and kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.head.commands import LogEvent
from rlinf_actors.head.timers import HeapTimer

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

WINDOW_S = 60.0
"""Seconds between two entries about repetitions of one refusal."""
KINDS = 64
"""Number of kinds of refusals that are counted separately at one time; further kinds are counted together."""


class Due(msgspec.Struct, frozen=True):
    """One report of refusals, which the head now writes as one entry of the event log.

    Attributes:
        text: the text of the last of these refusals.
        times: the number of refusals.
        again: True if the report is not the first of its kind: it counts repetitions since the report before it.
        others: True if the refusals are of several kinds, counted together because there were too many kinds.
    """

    text: str
    times: int
    again: bool = False
    others: bool = False


class _Kind(msgspec.Struct):
    text: str
    count: int = 0
    until: float = -math.inf  # time at which its next report is due; the first is due at once


class RefusalTally:
    """Counts refusals by kind until `take` returns them. Times are in seconds.

    The first refusal of a kind is due for a report at once. Repetitions within *window_s* are reported as one number
    when that time is over. So a refused peer causes at most one report per kind and window, and no refusal is lost.

    Args:
        window_s: time between two reports of one kind.
        kinds: number of kinds that are counted separately at one time; all further kinds are counted together.

    Attributes:
        count: number of refusals so far, reported or not.
    """

    def __init__(self, window_s: float = WINDOW_S, kinds: int = KINDS) -> None:
        self._window_s = window_s
        self._limit = kinds
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._others: _Kind | None = None
        self.count = 0

    def note(self, who: str, kind: str, text: str, now: float, times: int = 1) -> bool:
        """Count *times* refusals of *kind* by *who*. Return True if a report is due now, so that `take` returns it.

        *who* is the refused member or address; refusals with equal *who* and *kind* are repetitions. *text* is for
        people.
        """
        self.count += times
        known = self._kinds.get((who, kind))
        if known is None and len(self._kinds) < self._limit:
            known = self._kinds[who, kind] = _Kind(text)
        elif known is None:
            known = self._others = self._others or _Kind(text, until=now + self._window_s)
        known.text, known.count = text, known.count + times
        return known.until <= now

    def take(self, now: float) -> list[Due]:
        """Return the reports that are due at time *now*, and count from 0 again."""
        due: list[Due] = []
        for key, kind in [(key, kind) for key, kind in self._kinds.items() if kind.until <= now]:
            if kind.count:
                due.append(Due(kind.text, kind.count, again=kind.until > -math.inf))
                kind.until, kind.count = now + self._window_s, 0
            else:
                del self._kinds[key]
        if self._others is not None and self._others.until <= now:
            due.append(Due(self._others.text, self._others.count, others=True))
            self._others = None
        return due

    def next_deadline(self) -> float:
        """Return the earliest time at which a report may become due, infinity for never."""
        others = self._others.until if self._others is not None else math.inf
        return min([others, *(kind.until for kind in self._kinds.values())])


class RefusalLog:
    """Logs refused messages and connections: the first of a kind at once, repetitions as a count once a minute."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._tally = RefusalTally()
        self._timer: HeapTimer | None = None

    @property
    def count(self) -> int:
        return self._tally.count

    def note(self, who: str, kind: str, text: str, times: int = 1) -> None:
        """Count *times* refusals, and log them unless they repeat a refusal of the last minute.

        *who* is the refused member or address; refusals with equal *who* and *kind* are repetitions. *text* is for
        people.
        """
        if self._tally.note(who, kind, text, self._head.now, times):
            self._report()
        elif self._timer is None:
            self._arm()

    def _report(self) -> None:
        for due in self._tally.take(self._head.now):
            self._head.emit(LogEvent("refused", _text(due)))
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        # A timer that is already set is not moved: later refusals are due later.
        self._timer = self._head.timers.at(self._tally.next_deadline(), self._time_passed)
        if self._timer.action is None:
            self._timer = None

    def _time_passed(self) -> None:
        self._timer = None
        self._report()


def _text(due: Due) -> str:
    text = due.text
    if due.others:
        return f"{due.times} more refusals of other kinds in the last {WINDOW_S:.0f} s, the last one: {text}"
    if due.again:
        return f"{text} ({due.times} more in the last {WINDOW_S:.0f} s)"
    return f"{text} ({due.times} times)" if due.times > 1 else text
