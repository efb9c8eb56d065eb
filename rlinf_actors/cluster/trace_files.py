"""The trace of a job as a file: reads what the nodes have, and writes one Chrome trace.

`JobTrace`, in the job's driver, and `rlinf-actors trace fetch` use it. The question for each part goes through the head
(wire.trace_values.TraceQuestion). The ring of a worker that was killed is read like any other. Times of other machines
are moved to the clock of one machine by what the heartbeats have measured (tracing.clocks).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.tracing import ring
from rlinf_actors.tracing.clocks import Sample, offset_at
from rlinf_actors.tracing.ring import ProcessTrace
from rlinf_actors.tracing.timeline import Event
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered, answer_of
from rlinf_actors.wire.trace_values import TraceQuestion, TraceSlice

if TYPE_CHECKING:
    from rlinf_actors.wire.program import DriverState
    from rlinf_actors.wire.values import NodeState

ANSWER_S = 15.0
"""Seconds that a node may take to send a part of a trace."""
LINES = ".jsonl"
"""Suffix of a file with one event in each line, as RLinf writes it. The Chrome trace is then beside it."""

_encode = msgspec.json.Encoder().encode

_Result = TypeVar("_Result")
Clock = Callable[[], tuple[float, float]]
"""Returns how far the head's clock is ahead of a machine's, and the greatest error of that, in seconds."""


class Ask(Protocol):
    """Sends a request to the head, and returns the answer of the given class."""

    def __call__(self, request: AskNode, kind: type[NodeAnswered], timeout: float, /) -> Awaitable[NodeAnswered]:
        """Raise RlinfActorsError if there is no such answer within *timeout* seconds."""
        ...


class TraceReport(msgspec.Struct):
    """The events that a trace lacks, and the accuracy of its times.

    Attributes:
        processes: number of processes in the trace.
        fallen_out: events that found no room, by process.
        clock_error_ms: greatest error of the times of a node, by node; not of those that have the trace's clock.
        missing: sentences about what could not be read.
    """

    processes: int = 0
    fallen_out: dict[str, int] = msgspec.field(default_factory=dict)
    clock_error_ms: dict[str, float] = msgspec.field(default_factory=dict)
    missing: list[str] = msgspec.field(default_factory=list)

    def count(self, name: str, trace: ProcessTrace) -> None:
        """Add a process to the report."""
        self.processes += 1
        if trace.fallen_out:
            self.fallen_out[name] = self.fallen_out.get(name, 0) + trace.fallen_out
        for number, what in ((trace.unnamed, "names found no room"), (trace.args_lost, "arguments were overwritten")):
            if number:
                self.missing.append(f"{name}: {number} {what}")


class Traced(NamedTuple):
    """Who has rings of a job: a node, for its workers, or a driver.

    Attributes:
        id: id of the node, or incarnation of the driver.
        name: for people.
        host: machine whose clock it has (`NodeReport.host`). Of a driver without a node it is no machine of another.
        is_driver: True for a driver.
    """

    id: str
    name: str
    host: str
    is_driver: bool = False

    @classmethod
    def node(cls, state: NodeState) -> Traced:
        """Return the Traced of a node."""
        return cls(state.report.node_id, f"node {state.report.hostname}", state.report.host)

    @classmethod
    def driver(cls, state: DriverState, nodes: Sequence[NodeState]) -> Traced:
        """Return the Traced of a driver. *nodes* are all nodes."""
        hosts = (node.report.host for node in nodes if node.rank == state.node_rank >= 0)
        return cls(state.incarnation, f"the driver, process {state.pid}", next(hosts, f"of {state.incarnation}"), True)


class NodeTraces:
    """Reads the rings of a job from nodes and drivers. Loop thread only.

    Args:
        ask: sends a request to the head.
        namespace: the job.
        host: machine whose clock the trace has (`NodeReport.host`); "" for that of the first who answers.
        clock: tells about the clock of *host*; for "" not needed.
    """

    def __init__(self, ask: Ask, namespace: str, host: str = "", clock: Clock | None = None) -> None:
        self._send = ask
        self._namespace = namespace
        self._host = host
        self._clock = clock

    async def read(self, places: Iterable[Traced], report: TraceReport) -> AsyncIterator[tuple[str, ProcessTrace, int]]:
        """Yield name, trace, and offset of the clock in nanoseconds, of each traced process. Note in *report* what is
        missing.
        """
        for place in places:
            try:
                listing = await self._ask(place, TraceQuestion(self._namespace))
                offset, error = self._offset(place.host, listing)
                if listing.names and error:
                    report.clock_error_ms[place.name.removeprefix("node ")] = round(error * 1e3, 3)
                for file in listing.names:
                    data = await self._fetch(place, file)
                    try:
                        trace = await aside(partial(ring.read, data))
                    except ValueError as fault:
                        report.missing.append(f"{file} on {place.name} {fault}")
                        continue
                    yield str(trace.process.get("name", file)), trace, int(offset * 1e9)
            except RlinfActorsError as fault:
                report.missing.append(f"{place.name}: {fault}")

    async def _fetch(self, place: Traced, name: str) -> bytes:
        """Return the used part of a ring."""
        data = bytearray()
        events_at = 0
        while True:
            part = (await self._ask(place, TraceQuestion(self._namespace, name, len(data)))).data
            if not part or (events_at and len(data) >= events_at and not part.strip(b"\0")):
                break  # the rest of a ring that is not full is empty
            data += part
            if not events_at:
                try:
                    events_at = ring.layout_of(bytes(data[: ring.HEADER_BYTES])).events_at
                except ValueError:
                    break  # `read` says so
        return bytes(data)

    async def _ask(self, place: Traced, question: TraceQuestion) -> TraceSlice:
        answer = answer_of(await self._send(AskNode(place.id, question), NodeAnswered, ANSWER_S), TraceSlice)
        if answer.fault:
            raise RlinfActorsError(answer.fault)
        return answer

    def _offset(self, host: str, listing: TraceSlice) -> tuple[float, float]:
        """Return how far the trace's clock is ahead of a node's, and the greatest error of that, in seconds."""
        theirs, error = offset_at([Sample(*one) for one in listing.clock], listing.now)
        if not self._host:
            self._host, self._clock = host, lambda: (theirs, error)
        if host == self._host or self._clock is None:  # one kernel, and so one clock
            return 0.0, 0.0
        ours, own_error = self._clock()
        return theirs - ours, error + own_error


async def aside(function: Callable[[], _Result]) -> _Result:
    """Run *function* on another thread; here if the interpreter ends, because it then starts no more threads."""
    try:
        running = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        return function()
    return await running


def chrome_path(path: Path) -> Path:
    """Return the path of the Chrome trace that `TraceFile` writes for *path*."""
    return path.with_suffix(".json") if path.suffix == LINES else path


class TraceFile:
    """Writes the events of a trace to a new file, which replaces the file at *path* when it is complete.

    With the suffix LINES, it also writes the Chrome trace beside it.
    """

    def __init__(self, path: Path) -> None:
        chrome = chrome_path(path)
        self._paths = [chrome] if path == chrome else [chrome, path]
        self._files: list[IO[bytes]] = []
        self._first = True
        self._complete = False

    def __enter__(self) -> TraceFile:
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._files = [open(self._fresh(path), "wb") for path in self._paths]  # noqa: SIM115 - closed by __exit__
        self._files[0].write(b'{"traceEvents":[\n')
        return self

    def add(self, events: Iterator[Event]) -> None:
        """Write some events."""
        for event in events:
            line = _encode(event)
            self._files[0].write(line if self._first else b",\n" + line)
            self._first = False
            for file in self._files[1:]:
                file.write(line + b"\n")

    def finish(self, about: dict[str, Any]) -> None:
        """Write the end, with *about* the trace. Without it the file at the path stays as it was."""
        self._files[0].write(b'\n],"displayTimeUnit":"ms","otherData":' + _encode(about) + b"}\n")
        self._complete = True

    def __exit__(self, *_error: object) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            if self._complete:
                os.replace(self._fresh(path), path)
            else:
                self._fresh(path).unlink(missing_ok=True)

    def _fresh(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")
