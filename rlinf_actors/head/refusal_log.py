"""Events that may repeat, such as refusals: counts them, and enters them into the event log as few entries. Pure.

A refused peer, for example, adds at most one entry a minute and kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.commands import LogEvent
from rlinf_actors.head.timers import HeapTimer

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

T = TypeVar("T")

WINDOW_S = 60.0
"""Seconds between two entries about repetitions of one event."""
KINDS = 64
"""Number of kinds of events that are counted separately at one time; further kinds are counted together."""


class Due(msgspec.Struct, Generic[T], frozen=True):
    """One report of events, which the head now writes as one entry of the event log.

    Attributes:
        said: the last of these events.
        times: the number of events.
        again: True if the report is not the first of its kind: it counts repetitions since the report before it.
        others: True if the events are of several kinds, counted together because there were too many kinds.
    """

    said: T
    times: int
    again: bool = False
    others: bool = False


class _Kind(msgspec.Struct, Generic[T]):
    said: T
    count: int = 0
    until: float = -math.inf  # time at which its next report is due; the first is due at once


class Tally(Generic[T]):
    """Counts events by kind until `take` returns them. Times are in seconds.

    The first event of a kind is due for a report at once. Repetitions within *window_s* are reported as one number when
    that time is over. So there is at most one report per kind and window, and no event is lost.

    Args:
        window_s: time between two reports of one kind.
        kinds: number of kinds that are counted separately at one time; all further kinds are counted together.

    Attributes:
        count: number of events so far, reported or not.
    """

    def __init__(self, window_s: float = WINDOW_S, kinds: int = KINDS) -> None:
        self._window_s = window_s
        self._limit = kinds
        self._kinds: dict[tuple[str, str], _Kind[T]] = {}
        self._others: _Kind[T] | None = None
        self.count = 0

    def note(self, who: str, kind: str, said: T, now: float, times: int = 1) -> bool:
        """Count *times* events of *kind* by *who*. Return True if a report is due now, so that `take` returns it.

        Events with equal *who* and *kind* are repetitions.
        """
        self.count += times
        known = self._kinds.get((who, kind))
        if known is None and len(self._kinds) < self._limit:
            known = self._kinds[who, kind] = _Kind(said)
        elif known is None:
            known = self._others = self._others or _Kind(said, until=now + self._window_s)
        known.said, known.count = said, known.count + times
        return known.until <= now

    def take(self, now: float) -> list[Due[T]]:
        """Return the reports that are due at time *now*, and count from 0 again."""
        due: list[Due[T]] = []
        for key, kind in [(key, kind) for key, kind in self._kinds.items() if kind.until <= now]:
            if kind.count:
                due.append(Due(kind.said, kind.count, again=kind.until > -math.inf))
                kind.until, kind.count = now + self._window_s, 0
            else:
                del self._kinds[key]
        if self._others is not None and self._others.until <= now:
            due.append(Due(self._others.said, self._others.count, others=True))
            self._others = None
        return due

    def next_deadline(self) -> float:
        """Return the earliest time at which a report may become due, infinity for never."""
        others = self._others.until if self._others is not None else math.inf
        return min([others, *(kind.until for kind in self._kinds.values())])


class RepetitionLog:
    """Logs events that may repeat: the first of a kind at once, repetitions as a count once a minute.

    *what* names the events, such as "refusals".
    """

    def __init__(self, head: Coordinator, what: str) -> None:
        self._head = head
        self._what = what
        self._tally = Tally[LogEvent]()
        self._timer: HeapTimer | None = None

    @property
    def count(self) -> int:
        return self._tally.count

    def note(self, who: str, kind: str, event: LogEvent, times: int = 1) -> None:
        """Count *event*, *times* times, and log it unless it repeats an event of the last minute: one with equal *who*
        and *kind*.
        """
        if self._tally.note(who, kind, event, self._head.now, times):
            self._report()
        elif self._timer is None:
            self._arm()

    def _report(self) -> None:
        for due in self._tally.take(self._head.now):
            self._head.emit(replace(due.said, text=self._text(due)))
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        # A timer that is already set is not moved: later events are due later.
        self._timer = self._head.timers.at(self._tally.next_deadline(), self._time_passed)
        if self._timer.action is None:
            self._timer = None

    def _time_passed(self) -> None:
        self._timer = None
        self._report()

    def _text(self, due: Due[LogEvent]) -> str:
        text = due.said.text
        if due.others:
            return f"{due.times} more {self._what} of other kinds in the last {WINDOW_S:.0f} s, the last one: {text}"
        if due.said.at is not None:  # it has its own time
            return f"{text} ({due.times - 1} more in the {WINDOW_S:.0f} s before)" if due.times > 1 else text
        if due.again:
            return f"{text} ({due.times} more in the last {WINDOW_S:.0f} s)"
        return f"{text} ({due.times} times)" if due.times > 1 else text


class RefusalLog:
    """Logs refused messages and connections: the first of a kind at once, repetitions as a count once a minute."""

    def __init__(self, head: Coordinator) -> None:
        self._log = RepetitionLog(head, "refusals")

    @property
    def count(self) -> int:
        return self._log.count

    def note(self, who: str, kind: str, text: str, times: int = 1) -> None:
        """Count *times* refusals, and log them unless they repeat a refusal of the last minute.

        *who* is the refused member or address; refusals with equal *who* and *kind* are repetitions. *text* is for
        people.
        """
        self._log.note(who, kind, LogEvent("refused", text), times)
