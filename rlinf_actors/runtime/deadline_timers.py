"""DeadlineTimers: timers for code without an event loop. One thread runs all timers of the process.

A timer's function must be short and must not block, because it delays the other timers. Starting or cancelling a timer
takes some microseconds: the thread is woken only for a timer that is due before the thread's next wake-up.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable

from rlinf_actors import exhaustion, forks

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""Seconds without a timer after which the thread ends, so that a loop of short waits does not start many threads."""


class DeadlineTimer:
    """A function that the timer thread will call at a set time, unless it is cancelled; see `DeadlineTimers.start`."""

    __slots__ = ("_at", "_function", "_timers")

    def __init__(self, timers: DeadlineTimers, at: float, function: Callable[[], object]) -> None:
        self._timers = timers
        self._at = at
        self._function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Cancel the timer: if its function has not started, the function is never called.

        May be called on any thread, in a destructor, and more than once.
        """
        self._timers._cancel(self)

    def __lt__(self, other: DeadlineTimer) -> bool:
        return self._at < other._at


class DeadlineTimers:
    """Calls functions after a delay, for code without an event loop, such as a channel's get with a timeout.

    One thread calls all functions. The thread starts with the first timer and ends `IDLE_S` after the last timer.
    """

    def __init__(self) -> None:
        self._heap: list[DeadlineTimer] = []
        self.note_fork()
        forks.watch(self)

    def note_fork(self) -> None:
        """Drop all timers. Called in a forked child, because its parent's timer thread does not exist there."""
        self._changed = threading.Condition()  # reentrant: a destructor may cancel while its own thread is in here
        self._heap.clear()
        self._live = 0
        self._running = False
        self._wakes = 0.0

    def start(self, seconds: float, function: Callable[[], object]) -> DeadlineTimer:
        """Call *function* on the timer thread after *seconds*, and return the timer. Any thread.

        Raises:
            RuntimeError: no more threads can be started; the message names the limit and how to raise it.
        """
        timer = DeadlineTimer(self, time.monotonic() + max(0.0, seconds), function)
        with self._changed:
            if not self._running:
                self._wakes = timer._at
                exhaustion.start(exhaustion.OwnThread(target=self._run, name="rlinf-actors-timers", daemon=True))
                self._running = True
            if len(self._heap) > 64 + 2 * self._live:  # most were cancelled: free them before their time
                self._heap = [known for known in self._heap if known._function is not None]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, timer)
            self._live += 1
            if timer._at < self._wakes:
                self._changed.notify()
        return timer

    def _cancel(self, timer: DeadlineTimer) -> None:
        with self._changed:
            if timer._function is None:
                return
            timer._function = None
            self._live -= 1
            if not self._live and self._wakes > time.monotonic() + IDLE_S:
                self._changed.notify()

    def _run(self) -> None:
        idle = False
        while True:
            with self._changed:
                now = time.monotonic()
                due = self._first()
                if due is None and idle and now >= self._wakes:
                    self._running = False
                    return
                idle = due is None
                self._wakes = now + IDLE_S if due is None else due._at
                if due is None or due._at > now:
                    self._changed.wait(min(self._wakes - now, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self._heap)
                function, due._function = due._function, None
                self._live -= 1
            try:
                assert function is not None
                function()
            except Exception:
                log.exception("internal error: a timer's function failed; the other timers go on")
            function = due = None  # what they hold may be large, and the next wait long

    def _first(self) -> DeadlineTimer | None:
        """Return the pending timer that is due first, or None if no timer is pending. Forget cancelled timers."""
        if not self._live:
            self._heap.clear()
        while self._heap and self._heap[0]._function is None:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


timers = DeadlineTimers()
"""The DeadlineTimers of this process."""
