"""The Chrome trace (trace event format) of a job, from the rings of its processes. Pure.

Perfetto shows it. Each process of the job has a ``pid`` of its own, counted from 1, and each of its threads one or more
``tid``: spans of one tid must lie within each other, and spans of an event loop need not, so a thread has as many tids
("lanes") as its spans need. Spans become ``X`` events, arrows pairs of ``s`` and ``f``, marks ``i``. Times are
microseconds of one clock, the driver's CLOCK_MONOTONIC.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from rlinf_actors.tracing.ring import Point, ProcessTrace, TraceSpan

Event = dict[str, Any]
_FLOW = "flow"


class ThreadLanes:
    """The lanes of one thread. Spans are placed in the order of their starts."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []  # for each lane the ends of the spans that lie within each other there

    def place(self, start: int, end: int) -> int:
        """Return the first lane in which a span fits: within the last one that has not ended, or after it."""
        for lane, ends in enumerate(self._open):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return lane
        self._open.append([end])
        return len(self._open) - 1


class Timeline:
    """Makes the events of a Chrome trace: call `process` for each process of the job, then `arrows`."""

    def __init__(self) -> None:
        self._pids = itertools.count(1)
        self._starts: dict[int, tuple[int, int, int]] = {}  # by flow: pid, tid and nanoseconds of its start
        self._ends: list[tuple[int, int, int, int]] = []  # flow, pid, tid, nanoseconds

    def process(self, trace: ProcessTrace, title: str, offset: int = 0, until: int = 0) -> Iterator[Event]:
        """Yield the events of one process, without its arrows.

        Args:
            trace: what its ring had.
            title: the name of the process.
            offset: nanoseconds to add to its times.
            until: time, by its clock, up to which spans without an end are shown; at least that of its last event.
        """
        pid, last = next(self._pids), max(until, trace.last)
        yield _meta("process_name", pid, 0, {"name": title})
        yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
        lanes: dict[int, ThreadLanes] = {}
        tids: dict[tuple[int, int], int] = {}
        placed: dict[int, tuple[int, TraceSpan]] = {}
        for span in sorted(trace.spans, key=lambda one: (one.start, -_end_of(one, last))):
            end = _end_of(span, last)
            lane = lanes.setdefault(span.thread, ThreadLanes()).place(span.start, end)
            tid = tids.get((span.thread, lane))
            if tid is None:
                tid = tids[span.thread, lane] = len(tids) + 1
                yield from _thread(pid, tid, trace.threads.get(span.thread, "thread"), span.thread, lane)
            placed[span.number] = (tid, span)
            args = span.args if span.end >= 0 else {**span.args, "unfinished": True}
            event: Event = {
                "name": span.name, "cat": span.cat or "default", "ph": "X", "ts": _us(span.start + offset),
                "dur": _us(end - span.start), "pid": pid, "tid": tid,
            }  # fmt: skip
            yield {**event, "args": args} if args else event
        for point in trace.points:
            if point.span in placed:  # else it fell out of the ring: an arrow needs one
                self._note(point, pid, *placed[point.span], last, offset)

    def _note(self, point: Point, pid: int, tid: int, span: TraceSpan, last: int, offset: int) -> None:
        at = min(max(point.at, span.start), max(span.start, _end_of(span, last) - 1)) + offset
        if point.kind == "out":
            self._starts[point.flow] = (pid, tid, at)
        else:
            self._ends.append((point.flow, pid, tid, at))

    def arrows(self) -> Iterator[Event]:
        """Yield the arrows of which both ends were recorded. An arrow with several ends becomes several."""
        numbers = itertools.count(1)
        for flow, pid, tid, at in self._ends:
            start = self._starts.get(flow)
            if start is None:
                continue
            number = next(numbers)
            common = {"name": _FLOW, "cat": _FLOW, "id": number}
            yield {**common, "ph": "s", "ts": _us(start[2]), "pid": start[0], "tid": start[1]}
            yield {**common, "ph": "f", "bp": "e", "ts": _us(at), "pid": pid, "tid": tid}


def _end_of(span: TraceSpan, last: int) -> int:
    return span.end if span.end >= 0 else max(last, span.start)


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _thread(pid: int, tid: int, name: str, thread: int, lane: int) -> Iterator[Event]:
    title = f"{name} ({lane + 1})" if lane else name
    yield _meta("thread_name", pid, tid, {"name": title})
    yield _meta("thread_sort_index", pid, tid, {"sort_index": thread * 100 + min(lane, 99)})


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
