"""Reads log files for `rlinf-actors logs`, merges their lines by time, and follows them.

A file is read in slices. The next one is asked for when the lines of the slice before it are taken, so neither long
files nor a slow reader cost memory. For the last lines of a worker, its files are read twice: first to find where these
begin.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rlinf_actors.cli.log_sources import ASKED_NODES, Source, ask
from rlinf_actors.cli.output import note, plain
from rlinf_actors.cli.queries import TIMEOUT_S, Observer
from rlinf_actors.cluster.event_stream import EventCursor, patience
from rlinf_actors.errors import ClusterTimeoutError, NodeLostError, RlinfActorsError
from rlinf_actors.model.log_lines import SlicedLines
from rlinf_actors.model.readable import duration
from rlinf_actors.wire.client_messages import Events, GetStatus, Status
from rlinf_actors.wire.log_values import MAX_LOG_SLICE, MAX_LOG_WAIT_S, LogMark, LogQuestion
from rlinf_actors.wire.protocol import expected
from rlinf_actors.wire.values import NodeState

LINE_BYTES = (256, 4096)
"""Bytes that are read for each of the last lines, and those if lines are longer. Still longer ones are fewer."""
BACK_S = 30.0
"""Seconds after the start of a head within which a node that it does not know may still come back."""
KEPT_BYTES = 1 << 26
"""Bytes of all files together that are kept while their lines are merged."""


class Start(NamedTuple):
    """Where a line begins: the name of the part of a log file, the position in it, and its inode."""

    name: str
    offset: int
    inode: int


class Line(NamedTuple):
    """A line of a log file.

    Attributes:
        at: the time of its mark, or of a later line before it: it never descends within a file. 0 without a mark.
    """

    at: float
    text: str
    mark: LogMark | None
    start: Start


class Reading:
    """Reads the log file of a source, with its older part.

    Args:
        since: if not 0, only what was written after this time.
        tail: number of last bytes to read, None for all. With *start*, all from there on.
        most: number of bytes of which lines are kept.
        left: number of lines to read, None for all.

    Attributes:
        lines: the lines that were read and are not taken yet.
        ended: True if no more lines will come.
        is_cut: True if *tail* has left out the first bytes.
    """

    def __init__(
        self,
        client: Observer,
        source: Source,
        since: float = 0.0,
        tail: int | None = None,
        start: Start | None = None,
        most: int = MAX_LOG_SLICE,
        left: int | None = None,
    ) -> None:
        self.source = source
        self.lines: deque[Line] = deque()
        self.left = left
        self._client = client
        self._since = since if start is None else 0.0
        self._most = most
        self._sliced: SlicedLines[LogMark] = SlicedLines(self._add, None)
        self._question: LogQuestion | None = None
        self._inode = start.inode if start is not None else 0
        spans = {name: part.span(source.only, source.goes_on) for name, part in source.parts.items()}
        skipped = 0 if tail is None else max(0, sum(end - begin for begin, end, _ in spans.values()) - tail)
        self.is_cut = skipped > 0
        self._spans: deque[tuple[str, int, int, bool]] = deque()
        for name, (begin, end, grows) in spans.items():
            cut = min(begin + skipped, end)
            skipped -= cut - begin
            self._spans.append((name, cut, end, grows))
        while start is not None and self._spans[0][0] != start.name:
            self._spans.popleft()
        self._begin = self._spans[0][1] if start is None else start.offset
        self._base = Start(self._spans[0][0], self._begin, self._inode)  # of the slice that is read
        self._rest: Start | None = None  # where the unfinished line begins
        self._at = 0.0

    @property
    def ended(self) -> bool:
        return not self._spans

    @property
    def place(self) -> Start:
        """Where the first line begins that was not added to `lines` yet."""
        return self._rest or self._base

    async def read(self, wait_s: float = 0.0) -> bool:
        """Read further lines. Return False if there are none within *wait_s* seconds; `ended` says if more may come.

        If it raises an error, it can be called again: nothing was left out.
        """
        while self._spans and self.left != 0:
            name, begin, end, grows = self._spans[0]
            if self._question is None:
                if begin == end and not (grows and len(self._spans) == 1):
                    self._next_part()
                    continue
                # a question with a time begins with the file, and what is before `begin` is left out below
                offset = 0 if self._since else self._begin
                job = self.source.job if self.source.rank else None
                self._question = LogQuestion(job, name, offset, self._inode, self._since)
            question = msgspec.structs.replace(self._question, wait_s=wait_s)
            answer = await ask(self._client, self.source.node, question)
            if answer.lost:
                note(plain(f"{self.source.worker}: some of its output is gone: its log files were renamed meanwhile"))
            at = answer.offset - len(answer.data)
            cut = max(0, self._begin - at)
            data = answer.data[cut:] if grows else answer.data[cut : max(0, end - at)]
            at, offset = at + cut, max(answer.offset, self._begin)
            if len(data) > self._most:
                data, offset = data[: self._most], at + self._most
            if data:
                marks = [(mark.offset - at, mark) for mark in answer.marks if mark.offset < at + len(data)]
                self._feed(data, marks, Start(name, at, answer.inode))
                self._begin = 0  # the file that comes after a renaming has no such place
            else:
                self._base = Start(name, offset, answer.inode)
            self._question = msgspec.structs.replace(self._question, offset=offset, inode=answer.inode, since=0.0)
            if not grows and offset >= end:
                self._next_part()
            elif not answer.data:
                if len(self._spans) == 1 and not answer.ended:
                    return False
                self._next_part()
            if self.lines:
                return True
        self.finish()
        return bool(self.lines)

    def finish(self) -> None:
        """Add the unfinished last line: nothing is read after it."""
        self._spans.clear()
        self._sliced.end()
        self._rest = None

    def _next_part(self) -> None:
        self._spans.popleft()
        self._question, self._inode = None, 0
        self._begin = self._spans[0][1] if self._spans else 0

    def _feed(self, data: bytes, marks: list[tuple[int, LogMark]], base: Start) -> None:
        self._base = base
        self._sliced.feed(data, marks)
        self._base = base._replace(offset=base.offset + len(data))
        size = self._sliced.rest_size
        if not size:
            self._rest = None
        elif size <= len(data):
            self._rest = self._base._replace(offset=self._base.offset - size)

    def _add(self, text: str, mark: LogMark | None) -> None:
        begin = self._sliced.begin  # before this slice if negative
        start = self._base._replace(offset=self._base.offset + begin) if begin >= 0 or not self._rest else self._rest
        self._at = max(self._at, mark.at if mark is not None else 0.0)
        self.lines.append(Line(self._at, text, mark, start))


Each = Callable[[Reading, Line], object]
Failed = Callable[[Reading, RlinfActorsError], object]


async def merge(readings: Sequence[Reading], each: Each, failed: Failed, finish: bool) -> None:
    """Call *each* with the lines of log files, the earlier first; of lines of one time, those of the first file first.

    It ends when there are no more lines now; with *finish* an unfinished last line counts. *failed* is called with a
    file that cannot be read (any further).
    """
    at_once = asyncio.Semaphore(ASKED_NODES)

    async def filled(reading: Reading) -> bool:
        try:
            async with at_once:
                if not await reading.read() and finish:
                    reading.finish()
        except RlinfActorsError as error:
            failed(reading, error)
        return bool(reading.lines)

    found = await asyncio.gather(*map(filled, readings))
    first = [(readings[number].lines[0].at, number) for number, lines in enumerate(found) if lines]
    heapq.heapify(first)
    while first:
        number = first[0][1]
        reading = readings[number]
        if reading.left != 0:
            each(reading, reading.lines.popleft())
            if reading.left is not None:
                reading.left -= 1
        if reading.left != 0 and (reading.lines or await filled(reading)):
            heapq.heapreplace(first, (reading.lines[0].at, number))
        else:
            heapq.heappop(first)


async def last_lines(
    client: Observer, sources: Sequence[Source], limit: int, since: float, failed: Failed, finish: bool
) -> list[tuple[Source, Start, int]]:
    """Find the last *limit* lines of one worker in its log files, *sources*. Return for each file that can be read
    where they begin, and how many they are.
    """
    for line_bytes in LINE_BYTES:
        readings = [Reading(client, source, since, tail=limit * line_bytes) for source in sources]
        broken: dict[Reading, RlinfActorsError] = {}
        last, read = await _last(readings, limit, broken.__setitem__, finish)
        kept = Counter(reading for reading, _ in last)
        if not any(reading.is_cut and limit and read[reading] == kept[reading] for reading in readings):
            break  # else a line before the tail may be one of the last ones
    for reading, error in broken.items():
        failed(reading, error)
    starts = {reading: [start for of, start in last if of is reading] for reading in readings}
    return [
        (reading.source, found[0] if found else reading.place, len(found))
        for reading, found in starts.items()
        if reading not in broken
    ]


async def _last(
    readings: Sequence[Reading], limit: int, failed: Failed, finish: bool
) -> tuple[deque[tuple[Reading, Start]], Counter[Reading]]:
    """Return where the last *limit* lines begin, and how many lines each file has."""
    last: deque[tuple[Reading, Start]] = deque(maxlen=limit)
    read: Counter[Reading] = Counter()

    def each(reading: Reading, line: Line) -> None:
        read[reading] += 1
        last.append((reading, line.start))

    await merge(readings, each, failed, finish)
    return last, read


class Follower:
    """Follows log files until their workers have ended, over restarts of the head and of agentds.

    Attributes:
        lost: the host names of the nodes that were lost meanwhile, by id.
    """

    def __init__(self, client: Observer, each: Each, failed: Failed) -> None:
        self.lost: dict[str, str] = {}
        self._client = client
        self._each = each
        self._failed = failed
        self._late: set[str] = set()
        self._head_away = False
        self._one = asyncio.Lock()

    async def follow(self, reading: Reading) -> None:
        """Call `each` with the lines of a log file that follow, until its worker has ended or its node is lost."""
        try:
            await self._follow(reading)
        except RlinfActorsError as error:
            self._failed(reading, error)

    async def _follow(self, reading: Reading) -> None:
        node = reading.source.node
        while True:
            try:
                await reading.read(MAX_LOG_WAIT_S)
                self._late.discard(node.report.node_id)
            except (ClusterTimeoutError, NodeLostError) as error:
                if not await self._goes_on(node, error):
                    return
            while reading.lines:
                self._each(reading, reading.lines.popleft())
            if reading.ended:
                return

    async def _goes_on(self, node: NodeState, error: RlinfActorsError) -> bool:
        """Return True when a node can be asked again that has not answered; False if it is lost."""
        id, name, events = node.report.node_id, node.report.hostname, EventCursor(since=None)
        while True:
            async with self._one:
                status = await self._status()
            found = next((one for one in status.nodes if one.report.node_id == id), None)
            is_awaited = status.uptime_s < BACK_S if found is None else found.state == "registering"
            if not is_awaited:
                break
            try:
                asked = events.request(True)
                events.take(expected(await self._client.listen(asked, patience(asked), again=True), Events))
            except ClusterTimeoutError:
                continue
        if found is None or found.state == "lost":
            if id not in self.lost:
                self.lost[id] = name
                ago = f", last seen {duration(found.last_seen_s)} ago" if found is not None else ""
                note(plain(f"node {name} is lost{ago}: the output of its workers is not followed any further"))
            return False
        head_was_away = status.uptime_s < BACK_S  # which `_status`, or the restart, has ended
        if isinstance(error, ClusterTimeoutError) and not head_was_away and id not in self._late:
            self._late.add(id)
            note(plain(f"{error}; waiting for it"))
        return True

    async def _status(self) -> Status:
        """Return the state of the cluster, when the head answers."""
        while True:
            try:
                status = expected(await self._client.request(GetStatus(), TIMEOUT_S), Status)
                self._head_away = False
                return status
            except ClusterTimeoutError as error:
                if not self._head_away:
                    note(plain(f"{error}; waiting for it"))
                self._head_away = True
