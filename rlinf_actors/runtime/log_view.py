"""LogView: decides which lines of workers a driver shows, and when. Pure: lines and times in, lines to print out.

Equal lines of several ranks of a group become one line with their number, ``[actor:0-7 x8] loading model``. A line
waits HOLD_S for the same line of other ranks. It joins an earlier line only if its worker has shown nothing after that
one, so the lines of each worker keep their order. Only whole lines of equal text join.

A worker that prints more lines than `rate` a second, after a burst, is held back: its lines are counted, and each
NOTE_S a line says how many, and how to see them. The log files have them all. Joined lines cost nothing. stdout and
stderr are counted apart, so that a flood does not hide errors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from rlinf_actors.model.readable import ranges
from rlinf_actors.plurals import counted
from rlinf_actors.wire.agent_messages import CUT, UPDATE

HOLD_S = 0.3
"""Seconds that a line waits for equal lines of other ranks."""
NOTE_S = 5.0
"""Seconds between two notes about lines that are held back. Meanwhile no line of such a worker is shown."""
BURST_S = 50
"""Seconds of output at its full rate that a quiet worker may print at once."""
WORKERS_AT_FULL_RATE, WORKERS_AT_BURST = 5, 2
"""Number of workers whose full rates, or bursts, together are the limit of one stream of all workers."""
MOST_SOURCES = 10_000
"""Number of streams of workers beyond which those are forgotten that are quiet."""

Source = tuple[str, str]
"""GROUP:RANK of a worker, and "out" or "err" for its stdout or stderr."""


class Line(msgspec.Struct, eq=False):
    """A line to print, which may stand for equal lines of several workers, or a note of the view about others.

    Attributes:
        stream: "out" or "err".
        text: the line.
        group: the group of its workers; for a note, what it begins with.
        members: its workers, GROUP:RANK, each with the node; none for a note.
        count: how many lines of workers it stands for; of a note, how many are held back.
        node: of a note, the node of these lines, or of some of them.
        number, until: its place among all lines, and the time until which it waits for equal ones.
    """

    stream: str
    text: str
    group: str = "rlinf-actors"
    members: dict[str, str] = msgspec.field(default_factory=dict)
    count: int = 1
    node: str = ""
    number: int = 0
    until: float = 0.0

    @property
    def who(self) -> str:
        """Return whose line it is, for people: ``actor:3@node``, ``actor:0-7@node x8``, or ``actor:0-7 x8``."""
        if not self.members:
            return self.group
        nodes = set(self.members.values())
        at = f"@{nodes.pop()}" if len(nodes) == 1 else ""
        if self.count == 1:
            return f"{next(iter(self.members))}{at}"
        return f"{_names(self.group, self.members)}{at} x{self.count}"


class _Budget:
    """How many lines may still be shown. It fills up by *rate* lines a second, to *most*."""

    def __init__(self, rate: float, most: float, now: float) -> None:
        self._rate = rate
        self._most = self._left = most
        self._at = now
        self.is_dry = False

    def take(self, now: float) -> bool:
        """Take a line. Return False if there is none left: from then on until `refill` is called."""
        if not self.is_dry:
            self._left = min(self._most, self._left + (now - self._at) * self._rate)
            self._at = now
            self.is_dry = self._left < 1.0
            self._left -= not self.is_dry
        return not self.is_dry

    def refill(self, now: float) -> None:
        """Let a dry budget show the lines of NOTE_S again."""
        if self.is_dry:
            self._left, self._at, self.is_dry = self._rate * NOTE_S, now, False


class LogView:
    """The lines of a job's workers in its driver. Times are of any monotonic clock.

    Args:
        rate: lines a second that each stream of a worker may show in the long run; 0 for no limit.
        joins: False to show equal lines of several ranks each.
        where: returns where all lines of a worker, or of a group, are.
    """

    def __init__(self, rate: float, joins: bool, where: Callable[[str], str]) -> None:
        self._rate = rate
        self._joins = joins
        self._where = where
        self._waiting: deque[Line] = deque()
        self._newest: dict[tuple[str, str, str], Line] = {}  # by stream, group and text
        self._last: dict[Source, int] = {}  # number of the last line of each
        self._number = 0
        self._budgets: dict[Source, _Budget] = {}
        self._of_all: dict[str, _Budget] = {}  # by stream
        self._held: dict[str, int] = {}  # lines that are held back, by worker
        self._held_on: dict[str, str] = {}  # node of the last one, by group
        self._held_since = 0.0
        self._most_sources = MOST_SOURCES

    @property
    def next_at(self) -> float | None:
        """Time at which `due` has lines, None if there is nothing to wait for."""
        times = [self._waiting[0].until] if self._waiting else []
        return min([*times, *[self._held_since + NOTE_S] * bool(self._held)], default=None)

    def add(self, node: str, entries: Iterable[tuple[str, str, str]], now: float) -> None:
        """Take lines of workers on *node*: the worker, "out" or "err", and the text of each. `due` returns them."""
        for worker, stream, text in entries:
            source = worker, stream
            group = worker.rpartition(":")[0]
            joins = self._joins and not text.endswith((UPDATE, CUT))
            same = self._newest.get((stream, group, text)) if joins else None
            if same is not None and self._last.get(source, 0) <= same.number:
                same.count += 1
                same.members[worker] = node
                self._last[source] = same.number
                continue
            if not text.endswith(UPDATE) and not self._may_show(source, now):
                self._held_since = self._held_since if self._held else now
                self._held[worker] = self._held.get(worker, 0) + 1
                self._held_on[group] = node
                continue
            self._number += 1
            until = now + HOLD_S if self._joins else now
            line = Line(stream, text, group, {worker: node}, number=self._number, until=until)
            self._waiting.append(line)
            self._last[source] = self._number
            if len(self._last) > self._most_sources:
                self._forget()
            if joins:
                self._newest[stream, group, text] = line

    def due(self, now: float) -> list[Line]:
        """Return the lines to print now."""
        lines = []
        while self._waiting and self._waiting[0].until <= now:
            line = self._waiting.popleft()
            if self._newest.get((line.stream, line.group, line.text)) is line:
                del self._newest[line.stream, line.group, line.text]
            lines.append(line)
        if self._held and now >= self._held_since + NOTE_S:
            lines += self._notes(now)
        return lines

    def rest(self, now: float) -> list[Line]:
        """Return all lines that wait, and notes about those that are held back, because the output ends."""
        lines = list(self._waiting)
        self._waiting.clear()
        self._newest.clear()
        return lines + self._notes(now)

    def _forget(self) -> None:
        """Forget workers of which nothing waits, and budgets that are not dry: a job may have any number of workers."""
        oldest = self._waiting[0].number
        self._last = {source: number for source, number in self._last.items() if number >= oldest}
        self._budgets = {source: budget for source, budget in self._budgets.items() if budget.is_dry}
        self._most_sources = max(MOST_SOURCES, 2 * len(self._last))

    def _may_show(self, source: Source, now: float) -> bool:
        if not self._rate:
            return True
        budget, stream = self._budgets.get(source), source[1]
        if budget is None:
            rate, most = self._rate, self._rate * BURST_S
            budget = self._budgets[source] = _Budget(rate, most, now)
            self._of_all.setdefault(stream, _Budget(rate * WORKERS_AT_FULL_RATE, most * WORKERS_AT_BURST, now))
        return budget.take(now) and self._of_all[stream].take(now)

    def _notes(self, now: float) -> list[Line]:
        """Return a line for each group about its lines that are held back, and show its lines again."""
        groups: dict[str, dict[str, int]] = {}
        for worker, count in self._held.items():
            groups.setdefault(worker.rpartition(":")[0], {})[worker] = count
        seconds = max(1, round(now - self._held_since))
        notes = []
        for group, counts in groups.items():
            name = _names(group, counts)
            where = self._where(name if len(counts) == 1 else group)
            held = sum(counts.values())
            text = f"{name}: {counted(held, 'line')} held back in the last {seconds} s; all of them: {where}"
            notes.append(Line("err", text, count=held, node=self._held_on[group]))
        self._held.clear()
        for budget in (*self._budgets.values(), *self._of_all.values()):
            budget.refill(now)
        return notes


def _names(group: str, workers: Iterable[str]) -> str:
    """Return the names of workers of a group, such as ``actor:0-3, 7``."""
    ranks = [worker.rpartition(":")[2] for worker in workers]
    if all(rank.isdecimal() for rank in ranks):
        return f"{group}:{ranges(map(int, ranks))}"
    return f"{group}:{', '.join(sorted(ranks))}"
