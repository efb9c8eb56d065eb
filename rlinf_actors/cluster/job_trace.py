"""The trace of a job: started with the driver's Cluster, collected from all nodes, and written as one Chrome trace.

The driver asks each node for the rings of the job's workers (trace_files): at the end, when all workers have ended, and
on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import msgspec

from rlinf_actors.cluster.trace_files import ANSWER_S, NodeTraces, Traced, TraceFile, TraceReport, aside, chrome_path
from rlinf_actors.errors import ConfigError, RlinfActorsError, UsageError
from rlinf_actors.plurals import counted
from rlinf_actors.runtime import driver_trace
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.log_printer import say
from rlinf_actors.runtime.progress import Facts, showing
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.tracing import recorder, ring
from rlinf_actors.tracing.clocks import offset_at
from rlinf_actors.tracing.timeline import Timeline
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered
from rlinf_actors.wire.trace_values import TraceQuestion

if TYPE_CHECKING:
    from rlinf_actors.config.small_sections import TracerConfig
    from rlinf_actors.wire.values import NodeState

log = logging.getLogger(__name__)

DEFAULT_FILE = "trace.json"


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
        self._recorder = driver_trace.start(runtime, config.events)
        self._others = NodeTraces(runtime.ask, runtime.namespace, runtime.host, self._clock)

    def _clock(self) -> tuple[float, float]:
        session = self._runtime.head
        return offset_at(session.clock.samples() if session is not None else [], time.monotonic())

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
            where = f"{chrome_path(self.path)} (https://ui.perfetto.dev)"
            say(f"the trace of {counted(report.processes, 'process')} is in {where}")
            for state in states:
                question = TraceQuestion(self._runtime.namespace, drop=True)
                with contextlib.suppress(RlinfActorsError):  # then its agentd drops the traces by itself, later
                    await self._runtime.ask(AskNode(state.report.node_id, question), NodeAnswered, ANSWER_S)
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
        return str(chrome_path(chosen))

    async def write(self, states: Sequence[NodeState], path: Path) -> TraceReport:
        """Collect what all processes of the job have recorded until now, and write it to *path*. Loop thread.

        Raises:
            OSError: the file cannot be written.
        """
        async with self._writing:
            report, timeline = TraceReport(), Timeline()

            async def look(_missing: bool) -> Facts:
                return Facts(f"reading the trace of this job: {counted(report.processes, 'process')} so far")

            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(showing(look))
                file = stack.enter_context(TraceFile(path))
                now = time.monotonic_ns()
                own = await aside(lambda: ring.read(bytes(self._recorder.memory)))
                report.count(driver_trace.NAME, own)
                await aside(lambda: file.add(timeline.process(own, driver_trace.NAME, until=now)))
                async for name, trace, offset in self._others.read(map(Traced.node, states), report):
                    report.count(name, trace)
                    await aside(partial(file.add, timeline.process(trace, name, offset)))
                await aside(lambda: file.add(timeline.arrows()))
                file.finish(msgspec.to_builtins(report))
            return report


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
