"""Whom a worker's sockets do not let in: a line in its own log, and by its template and agent to the event log."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from rlinf_actors.wire.agents import Refusal, RefusalReport
from rlinf_actors.wire.refusalnotes import RefusalNotes

log = logging.getLogger(__name__)

WINDOW_S = 1.0
"""Seconds between two numbers of one kind: short, since they end with the worker. The head says them by the minute."""


class Strangers:
    """Counts and tells. Loop thread only.

    Args:
        loop: the I/O thread's.
        send: tells the template; False if it does not take it now.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[RefusalReport], bool]) -> None:
        self._loop = loop
        self._send = send
        self._notes = RefusalNotes(WINDOW_S)
        self._timer: asyncio.TimerHandle | None = None
        self.count = 0

    def refused(self, text: str, times: int = 1) -> None:
        """Somebody was not let in. Said in the log the 1st, 10th, 100th, ... time: a flood shall not fill it.

        Args:
            text: what follows "refused" in a line for people.
            times: how often.
        """
        said, self.count = len(str(self.count)) if self.count else 0, self.count + times
        if len(str(self.count)) > said:
            log.warning("refused %s (%d by now)", text, self.count)
        if self._notes.add(Refusal(text, times), self._loop.time()):
            self._tell()

    def close(self) -> None:
        """Tell no more. Twice is fine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        self.close()
        now = self._loop.time()
        report = self._notes.take(now)
        if report is not None and not self._send(report):
            for refusal in report.refusals:  # it stands still: told with the next number
                self._notes.add(refusal, now)
        due = self._notes.next_deadline()
        if due < math.inf:
            self._timer = self._loop.call_at(due, self._tell)
