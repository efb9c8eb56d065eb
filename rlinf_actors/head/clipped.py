"""What agents and clients say in words, at most as long as the head keeps and shows it. Pure.

Whatever comes from others and is kept here, told to others or shown to people goes through here first: one message must
neither push everything else out of the event log nor stay in memory by the megabyte.
"""

from __future__ import annotations

from msgspec.structs import replace

from rlinf_actors.wire.agents import WorkersHealth
from rlinf_actors.wire.bounds import printable
from rlinf_actors.wire.session import AgentHello
from rlinf_actors.wire.values import ExitReport, RunningWorker, WorkerHealth

TAIL_LINES, TAIL_LINE_CHARS = 20, 4097
"""Of a worker's stderr: what agents send (worker.drain)."""
REASON_CHARS = 16384
"""Of why a worker ended: it may be the traceback of a module that cannot be imported."""


def exit_report(said: ExitReport) -> ExitReport:
    """How a worker ended. Its last lines and its traceback are shown as they are, as in its files."""
    tail = [line[:TAIL_LINE_CHARS] for line in said.stderr_tail[-TAIL_LINES:]]
    reason = said.reason[:REASON_CHARS]
    return ExitReport(printable(said.kind), said.exit_code, said.signal, printable(said.oom), tail, reason)


def hello(said: AgentHello) -> AgentHello:
    """The ends of workers in it."""
    ended = {id: why[:REASON_CHARS] for id, why in said.ended.items()}
    return replace(said, workers=list(map(_running, said.workers)), ended=ended)


def health(said: WorkersHealth) -> WorkersHealth:
    """How workers are."""
    return WorkersHealth(list(map(_health, said.workers)))


def _running(said: RunningWorker) -> RunningWorker:
    return said if said.exit is None else replace(said, exit=exit_report(said.exit))


def _health(said: WorkerHealth) -> WorkerHealth:
    return replace(said, unresponsive=printable(said.unresponsive), method=printable(said.method))
