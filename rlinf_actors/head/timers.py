"""The timers of the head: one heap for all tables. Pure: the time is an argument.

A table schedules a method of its own with `TimerHeap.at` and cancels what it no longer needs. Deadlines that often move
to later, as a lease does with each heartbeat, stay where they are on the heap: when such a timer fires too early, its
action schedules the next one. So an event costs a handful of heap operations, however many nodes, clients and groups
the cluster has.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

TURN = 16
"""Most actions that run in one call: the waits of thousands of requests may end at one moment."""
Action = Callable[[], None]


class HeapTimer:
    """One scheduled action, due at `at`. `action` is None once the timer has fired or was cancelled."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Action) -> None:
        self.at = at
        self.action: Action | None = action


class TimerHeap:
    """All timers, the next one first; timers with the same deadline fire in the order of their scheduling."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, HeapTimer]] = []
        self._sequence = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def at(self, deadline: float, action: Action) -> HeapTimer:
        """Schedule *action* for the time *deadline*, and return its timer. If *deadline* is infinity, it never runs."""
        timer = HeapTimer(deadline, action)
        if deadline < math.inf:
            heapq.heappush(self._heap, (deadline, next(self._sequence), timer))
        else:
            timer.action = None
        return timer

    def cancel(self, timer: HeapTimer | None) -> None:
        """Cancel a timer, so that its action does not run. No effect on a timer that has fired, or on None."""
        if timer is None or timer.action is None:
            return
        timer.action = None
        self._cancelled += 1
        # Cancelled timers leave the heap when they come to its top. Waits that end early would pile up until then.
        if self._cancelled > 64 and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next_deadline(self) -> float:
        """Return when the next timer is due, infinity for never."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else math.inf

    def run_due(self, now: float) -> None:
        """Run the actions that are due at *now*, at most TURN of them: `next_deadline` tells of the others.

        Timers that these actions schedule fire in the next call or later.
        """
        due: list[HeapTimer] = []
        while len(due) < TURN and self.next_deadline() <= now:
            due.append(heapq.heappop(self._heap)[2])
        for timer in due:
            action, timer.action = timer.action, None
            if action is None:  # an action before it has cancelled it
                self._cancelled -= 1
            else:
                action()
