"""The trace of a job: started with the driver's Cluster, collected from all nodes, and written as one Chrome trace.

The driver asks each node, through the head, for the rings of the job's workers (wire.client_messages.ReadTrace): at the
end, when all workers have ended, and on demand. A ring of a worker that was killed is read like any other. Times of
other machines are moved to the driver's clock by what the heartbeats have measured (tracing.clocks).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, overload

import msgspec

from rlinf_actors.errors import ConfigError, RlinfActorsError, UsageError
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.log_printer import say
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.tracing import recorder, ring
from rlinf_actors.tracing.clocks import Sample, offset_at
from rlinf_actors.tracing.ring import ProcessTrace
from rlinf_actors.tracing.timeline import Event, Timeline
from rlinf_actors.wire.client_messages import ReadTrace, TraceRead
from rlinf_actors.wire.trace_values import TraceQuestion, TraceSlice

if TYPE_CHECKING:
    from rlinf_actors.config.small_sections import TracerConfig
    from rlinf_actors.wire.values import NodeState

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""Seconds that a node may take to send a part of a trace."""
DEFAULT_FILE = "trace.json"
LINES = ".jsonl"
"""Suffix of a file with one event in each line, as RLinf writes it. The Chrome trace is then beside it."""

_encode = msgspec.json.Encoder().encode

_Result = TypeVar("_Result")


class TraceReport(msgspec.Struct):
    """The events that a trace lacks, and the accuracy of its times.

    Attributes:
        processes: number of processes in the trace.
        fallen_out: events that found no room, by process.
        clock_error_ms: greatest error of the times of a node that is not the driver's, by node.
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


class JobTrace:
    """Records and collects the trace of the job whose driver this process is.

    Args:
        runtime: runtime of the driver.
        config: the ``tracer`` section.
        directory: directory of the file if the configuration names none.
    """

    def __init__(self, runtime: Runtime, config: TracerConfig, directory: str) -> None:
        self.path = Path(config.output_file or Path(directory, DEFAULT_FILE)).absolute()
        self._runtime = runtime
        self._writing = asyncio.Lock()
        about = {"name": "driver", "node": os.uname().nodename, "host": runtime.host}
        self._recorder = recorder.start(config.events, about)

    @classmethod
    def start(cls, runtime: Runtime, config: TracerConfig | None, log_dir: str | None) -> JobTrace | None:
        """Trace this driver from now on if the configuration says so, else return None.

        Raises:
            ConfigError: the directory of the file cannot be made or written to; known now, not when the job has run.
        """
        if config is None or not config.enable:
            return None
        trace = cls(runtime, config, log_dir or os.getcwd())
        folder = trace.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(0, "this process may not write there")
        except OSError as error:
            recorder.stop()
            runtime.close()
            raise ConfigError(
                f"{folder} cannot be used ({error.strerror}): this driver writes the trace there when the job ends",
                path="cluster.tracer.output_file",
            ) from None
        return trace

    async def finish(self, states: Sequence[NodeState]) -> None:
        """Write the trace of the job, whose workers have ended, and trace this process no longer. Loop thread."""
        try:
            report = await self.write(states, self.path)
            said = ", ".join(f"{name} {count}" for name, count in report.fallen_out.items())
            if said:
                text = "events that found no room in the rings and are not in the trace: %s; set cluster.tracer.events"
                log.warning(text, said)
            for line in report.missing:
                log.warning("the trace is not complete: %s", line)
            say(f"the trace of {report.processes} processes is in {self._chrome(self.path)} (https://ui.perfetto.dev)")
            for state in states:
                question = TraceQuestion(self._runtime.namespace, drop=True)
                with contextlib.suppress(RlinfActorsError):  # then its agentd drops the traces by itself, later
                    await self._runtime.ask(ReadTrace(state.report.node_id, question), TraceRead, ANSWER_S)
        except OSError as error:
            log.error("the trace cannot be written to %s: %s", error.filename or self.path, error.strerror)
        except Exception:  # a fault here; the shutdown must go on
            log.exception("the trace cannot be written to %s", self.path)
        finally:
            if recorder.active is self._recorder:
                recorder.stop()

    async def collect(self, states: Sequence[NodeState], path: Path | None) -> str:
        """Write what was recorded until now to *path*, by default to the job's file. Return the path of the Chrome
        trace. Loop thread.

        Raises:
            OSError: the file cannot be written.
        """
        chosen = path or self.path
        for line in (await self.write(states, chosen)).missing:
            log.warning("the trace is not complete: %s", line)
        return str(self._chrome(chosen))

    async def write(self, states: Sequence[NodeState], path: Path) -> TraceReport:
        """Collect what all processes of the job have recorded until now, and write it to *path*. Loop thread.

        Raises:
            OSError: the file cannot be written.
        """
        async with self._writing:
            report, timeline = TraceReport(), Timeline()
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(_TraceFile(path, self._chrome(path)))
                now = time.monotonic_ns()
                own = await _aside(lambda: ring.read(bytes(self._recorder.memory)))
                report.count("driver", own)
                await _aside(lambda: file.add(timeline.process(own, "driver", until=now)))
                async for name, trace, offset in self._others(states, report):
                    report.count(name, trace)
                    await _aside(partial(file.add, timeline.process(trace, name, offset)))
                await _aside(lambda: file.add(timeline.arrows()))
                file.finish(msgspec.to_builtins(report))
            return report

    def _chrome(self, path: Path) -> Path:
        return path.with_suffix(".json") if path.suffix == LINES else path

    async def _others(
        self, states: Sequence[NodeState], report: TraceReport
    ) -> AsyncIterator[tuple[str, ProcessTrace, int]]:
        """Yield name, trace, and offset of the clock in nanoseconds, of each traced worker."""
        for state in states:
            node = state.report.hostname
            try:
                listing = await self._ask(state, TraceQuestion(self._runtime.namespace))
                offset, error = self._offset(state.report.host, listing)
                if listing.names and error:
                    report.clock_error_ms[node] = round(error * 1e3, 3)
                for file in listing.names:
                    data = await self._fetch(state, file)
                    try:
                        trace = await _aside(partial(ring.read, data))
                    except ValueError as fault:
                        report.missing.append(f"{file} on node {node} {fault}")
                        continue
                    yield str(trace.process.get("name", file)), trace, int(offset * 1e9)
            except RlinfActorsError as fault:
                report.missing.append(f"node {node}: {fault}")

    async def _fetch(self, state: NodeState, name: str) -> bytes:
        """Return the used part of a ring."""
        data = bytearray()
        events_at = 0
        while True:
            part = (await self._ask(state, TraceQuestion(self._runtime.namespace, name, len(data)))).data
            if not part or (events_at and len(data) >= events_at and not part.strip(b"\0")):
                break  # the rest of a ring that is not full is empty
            data += part
            if not events_at:
                try:
                    events_at = ring.layout_of(bytes(data[: ring.HEADER_BYTES])).events_at
                except ValueError:
                    break  # `read` says so
        return bytes(data)

    async def _ask(self, state: NodeState, question: TraceQuestion) -> TraceSlice:
        answer = (await self._runtime.ask(ReadTrace(state.report.node_id, question), TraceRead, ANSWER_S)).answer
        if answer.fault:
            raise RlinfActorsError(answer.fault)
        return answer

    def _offset(self, host: str, listing: TraceSlice) -> tuple[float, float]:
        """Return how far the driver's clock is ahead of a node's, and the greatest error of that, in seconds."""
        if host == self._runtime.host:  # one kernel, and so one clock
            return 0.0, 0.0
        theirs, error = offset_at([Sample(*one) for one in listing.clock], listing.now)
        session = self._runtime.head
        ours, own_error = offset_at(session.clock.samples() if session is not None else [], time.monotonic())
        return theirs - ours, error + own_error


async def _aside(function: Callable[[], _Result]) -> _Result:
    """Run *function* on another thread; here if the interpreter ends, because it then starts no more threads."""
    try:
        running = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        return function()
    return await running


class TracedCluster:
    """The methods of Cluster for the trace of its job."""

    runtime: Runtime
    _states: list[NodeState]
    _trace: JobTrace | None = None  # of a driver that records one

    @overload
    def collect_trace(self, path: str | os.PathLike[str] | None = None, async_op: Literal[False] = False) -> str: ...

    @overload
    def collect_trace(
        self, path: str | os.PathLike[str] | None = None, *, async_op: Literal[True]
    ) -> AsyncWork[str]: ...

    def collect_trace(self, path: str | os.PathLike[str] | None = None, async_op: bool = False) -> str | AsyncWork[str]:
        """Write what all processes of the job have traced until now, and return the path of the Chrome trace.

        The end of the job writes the whole trace.

        Args:
            path: path of the file; None for the file of the configuration.
            async_op: True to return an AsyncWork of the path at once instead of blocking.

        Raises:
            UsageError: this process is no driver, or ``cluster.tracer.enable`` is not set.
            OSError: the file cannot be written.
        """
        if self._trace is None:
            raise UsageError(
                "this process traces no job: set cluster.tracer.enable in the driver's configuration, and collect the "
                "trace in the driver"
            )
        chosen = Path(path).absolute() if path else None
        work = AsyncWork.of(self.runtime.io, self._trace.collect(self._states, chosen), "collect_trace()")
        return work if async_op else work.wait()

    async def _finish_trace(self, whole: bool) -> None:
        """Write the trace if this process records one. *whole* is False if the Cluster did not start."""
        if self._trace is not None and whole:
            await self._trace.finish(self._states)
        elif self._trace is not None:
            recorder.stop()


class _TraceFile:
    """Writes the events of a trace to a new file, which replaces the file at its path when it is complete."""

    def __init__(self, path: Path, chrome: Path) -> None:
        self._paths = [chrome] if path == chrome else [chrome, path]
        self._files: list[IO[bytes]] = []
        self._first = True
        self._complete = False

    def __enter__(self) -> _TraceFile:
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._files = [open(self._fresh(path), "wb") for path in self._paths]  # noqa: SIM115 - closed by __exit__
        self._files[0].write(b'{"traceEvents":[\n')
        return self

    def add(self, events: Iterator[Event]) -> None:
        for event in events:
            line = _encode(event)
            self._files[0].write(line if self._first else b",\n" + line)
            self._first = False
            for file in self._files[1:]:
                file.write(line + b"\n")

    def finish(self, about: dict[str, Any]) -> None:
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
