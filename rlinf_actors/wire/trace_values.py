"""Values inside control messages about traces. Pure; the house rules of values.py hold."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rlinf_actors.wire.bounds import Name, Path, Text
from rlinf_actors.wire.protocol import Count, Number
from rlinf_actors.wire.values import Value

MAX_TRACE_SLICE = 1 << 18
"""Most bytes of a trace in one message."""
MAX_TRACE_FILES = 4096
"""Most names of traces in one message."""


MAX_FAULTS = 16
"""Most workers of a node whose reasons are in one answer to a TraceSwitch."""


class TraceSwitch(Value, frozen=True, tag="SwitchTrace"):
    """Request to a node: its workers of a job are to record a trace from now on, or no longer.

    Attributes:
        namespace: the job.
        events: number of events that each worker keeps, 0 to record no longer. Workers that record already because
            their driver's configuration says so go on as they are.
    """

    namespace: Name
    events: Annotated[int, Meta(ge=0, le=1 << 22)] = 0


class SwitchedWorkers(Value, frozen=True, tag=True):
    """Answer of a node to a TraceSwitch.

    Attributes:
        workers: number of workers that have confirmed.
        failed: number of workers that have not.
        faults: why not, for people, of the first of them.
    """

    workers: Count = 0
    failed: Count = 0
    faults: Annotated[
        list[Text], Meta(max_length=MAX_FAULTS, title="sixteen", description="One for each of the first workers.")
    ] = []


class TraceQuestion(Value, frozen=True, tag="ReadTrace"):
    """Request to a node or driver: send a part of the traces that the workers of a job, or it, have written there.

    Attributes:
        namespace: the job.
        name: a name of TraceSlice.names; "" to ask for the names.
        offset: position of the first byte to send.
        drop: True if the traces of workers that have ended are to be removed instead.
    """

    namespace: Name
    name: Path = ""
    offset: Annotated[int, Meta(ge=0, le=2**40)] = 0
    drop: bool = False


class TraceSlice(Value, frozen=True, tag=True):
    """Answer of a node to a TraceQuestion.

    Attributes:
        names: names of the traces, if the question named none.
        data: bytes of the trace from the offset on; empty at its end.
        now: the node's monotonic clock, in seconds.
        clock: how far the head's monotonic clock is ahead of the node's: up to two measurements, each as (time of the
            measurement by the node's clock, seconds, greatest error in seconds).
        fault: why there is no answer, for people.
    """

    names: Annotated[
        list[Path],
        Meta(max_length=MAX_TRACE_FILES, title="traces", description="One for each worker of a job on a node."),
    ] = []
    data: Annotated[
        bytes, Meta(max_length=MAX_TRACE_SLICE, title="slice", description="A trace is read in slices.")
    ] = b""
    now: Number = 0.0
    clock: Annotated[
        list[tuple[Number, Number, Number]],
        Meta(max_length=2, title="two", description="The first and the newest measurement."),
    ] = []
    fault: Text = ""
