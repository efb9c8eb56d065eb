"""Questions of agentd to the I/O threads of its workers, and their answers: one pair of packets. Pure.

The template passes a question on to the worker, and the answer back. Only stacks that are not taken by the I/O thread
it takes itself. An answer has the worker's id, which agentd sets, and may have a fault: why the worker gave none.
"""

from __future__ import annotations

from typing import Union

from rlinf_actors.wire.bounds import Name, Path, Text
from rlinf_actors.wire.debug_values import DebugAnswer, DebugQuestion
from rlinf_actors.wire.figure_values import WorkerFigures
from rlinf_actors.wire.protocol import ControlMessage, Number
from rlinf_actors.wire.stack_values import IO_THREAD, WorkerStacks
from rlinf_actors.wire.values import Value


class ShowStacks(Value, frozen=True, tag=True):
    """Take the stacks of a worker by `level`. Answered by WorkerStacks."""

    level: Name = IO_THREAD


class ShowFigures(Value, frozen=True, tag=True):
    """Say what the worker uses. Answered by WorkerFigures.

    `at` is the time at which agentd asked, in seconds of CLOCK_MONOTONIC.
    """

    at: Number = 0.0


class RecordTrace(Value, frozen=True, tag=True):
    """Record a trace in a new file from now on, or no longer. Answered by TraceRecorded.

    A worker that records already because its driver's configuration says so goes on as it is.

    Attributes:
        path: the file that the worker makes, "" to record no longer.
        events: number of events that it keeps.
    """

    path: Path = ""
    events: int = 0


class TraceRecorded(Value, frozen=True, tag=True):
    """Answer to RecordTrace. `fault` says why the worker records none."""

    id: Name
    fault: Text = ""


WorkerQuestion = Union[ShowStacks, ShowFigures, RecordTrace, DebugQuestion]
WorkerAnswer = Union[WorkerStacks, WorkerFigures, TraceRecorded, DebugAnswer]


class AskWorker(ControlMessage, frozen=True):
    """Packet of agentd: the worker `id` answers `question` by WorkerAnswered with the same `request`, perhaps later."""

    id: Name
    request: int
    question: WorkerQuestion


class WorkerAnswered(ControlMessage, frozen=True):
    """Packet of a worker, or of its template: the answer to an AskWorker."""

    id: Name
    request: int
    answer: WorkerAnswer
