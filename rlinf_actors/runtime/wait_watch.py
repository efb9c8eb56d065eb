"""The driver's lines about waits: a wait that lasts long, and an error after a time limit, say what the workers do.

Waits keep no books, so that a call costs nothing for this (`runtime.waits`). Therefore the watch looks at the threads
and tasks of the driver a few times a minute. `QuietWaits` decides, and is pure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from rlinf_actors.model.readable import duration, ranges
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.runtime import timeout_facts
from rlinf_actors.runtime.future import Future
from rlinf_actors.runtime.late_report import ANSWER_S, Find, LateReport
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.waits import Waiting, all_waits, described
from rlinf_actors.wire.values import CHANNEL_GROUPS, RELAY_GROUPS

log = logging.getLogger(__name__)

LOOKS = 4
"""Looks in the time after which a wait is reported first."""
LONGEST_S = 1800.0
"""Longest time between two lines about one wait."""
MIN_LIMIT_S = 1.0
"""Shortest time limit whose error says what the workers do: who polls is not held up."""
AGAIN_S = 5.0
"""Seconds until another error may say what the workers do, if they must be asked for it."""


class _Known(msgspec.Struct):
    progress: int
    since: float  # of the wait, or of its last progress
    due: float


class QuietWaits:
    """Decides when a line about a wait is due: after *first_s* without progress, and then after twice as long each.

    Times are seconds of one clock.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._known: dict[Hashable, _Known] = {}

    def due(self, waits: Iterable[tuple[Hashable, float, int]], now: float) -> list[tuple[Hashable, float]]:
        """Return the waits of which a line is due *now*, each with the seconds for which nothing has happened.

        *waits* are all waits: a key, when the wait began, and a number that grows with progress.
        """
        known, self._known = self._known, {}
        found = []
        for key, since, progress in waits:
            one = known.get(key)
            if one is None:
                one = _Known(progress, since, since + self._first_s)
            elif one.progress != progress:
                one = _Known(progress, now, now + self._first_s)
            if one.due <= now:
                quiet = now - one.since
                found.append((key, quiet))
                one.due = now + min(max(quiet, self._first_s), LONGEST_S)
            self._known[key] = one
        return found


class WaitWatch:
    """Logs a line about each wait of this driver that lasts long, and gives errors of time limits their facts.

    Args:
        loop: the loop of the I/O thread.
        first_s: seconds after which a wait is reported first, 0 for never.
        find: returns the connection to a worker, by its name.
        groups: returns the groups that this process knows.
        namespace: the driver's job.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        first_s: float,
        find: Find,
        groups: Callable[[], Sequence[RemoteGroup]],
        namespace: str,
    ) -> None:
        self._loop = loop
        self._first_s = first_s
        self._find = find
        self._groups = groups
        self._namespace = namespace
        self._quiet = QuietWaits(first_s)
        self._timer: asyncio.TimerHandle | None = None
        self._asked_at = 0.0

    def start(self) -> None:
        """Begin. Loop thread."""
        if self._first_s:
            timeout_facts.job_report = self.job_report
            self._set_timer()

    def close(self) -> None:
        """End. Loop thread; may be called again."""
        if timeout_facts.job_report == self.job_report:
            timeout_facts.job_report = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def job_report(self, timeout: float) -> LateReport | None:
        """Ask the workers of the job what they do, for the error of a wait that had *timeout* seconds.

        Returns:
            A promise that ends within ANSWER_S, whose `describe` has the text. None if they were asked just before, or
            if *timeout* is short. Any thread.
        """
        now = time.monotonic()
        if timeout < MIN_LIMIT_S or now < self._asked_at + AGAIN_S or self._timer is None:
            return None
        self._asked_at = now
        return self._report(self._peers(), only_busy=True)

    def _peers(self) -> list[Peer]:
        """Return the connections that exist to workers of this job, without channel hosts and relays. Any thread."""
        groups = [group for group in self._groups() if group.namespace == self._namespace]
        others = (CHANNEL_GROUPS, RELAY_GROUPS)
        return [peer for group in groups if not group.name.startswith(others) for peer in group.peers if peer.connected]

    def _report(self, peers: Sequence[Peer], only_busy: bool = False) -> LateReport:
        report = LateReport(peers, self._find, only_busy)
        call_threadsafe(self._loop, self._loop.call_later, ANSWER_S, partial(report.resolve, None))
        return report

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._first_s / LOOKS, self._look)

    def _look(self) -> None:
        self._set_timer()
        waits: dict[Hashable, Waiting] = {(id(one.future), one.since): one for one in all_waits()}
        seen = [(key, one.since, len(one.future._ranks()[1])) for key, one in waits.items()]
        for key, quiet_s in self._quiet.due(seen, time.monotonic()):
            self._say(waits[key].future, quiet_s)

    def _say(self, waited: Future[Any], quiet_s: float) -> None:
        late, answered = waited._ranks()
        what, _ = described(waited)
        report = self._report(late or self._peers(), only_busy=not late)

        def say() -> None:
            facts = [f"{_names(answered)} answered"] if answered else []
            said = report.describe()
            facts.append(said or "no worker of this job runs a call")
            if not waited.done():
                log.warning("waiting for %s for %s: %s", what, duration(quiet_s), "; ".join(facts))

        report._on_done(lambda: call_threadsafe(self._loop, say))


def _names(peers: Sequence[Peer]) -> str:
    return f"{peers[0].name.rpartition(':')[0]}:{ranges(peer.rank for peer in peers)}"
