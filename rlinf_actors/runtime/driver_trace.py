"""What a driver records for `rlinf-actors trace start`: its calls, waits and channel operations.

The head passes the orders on to the driver as it does to agentds. A driver may run where no agentd is, so its ring is
in its memory, and is sent to the head in slices. Loop thread.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from rlinf_actors.exhaustion import explain
from rlinf_actors.tracing import recorder
from rlinf_actors.tracing.recorder import Recorder
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.node_questions import AgentAnswered, AskAgent
from rlinf_actors.wire.trace_values import MAX_TRACE_SLICE, SwitchedWorkers, TraceQuestion, TraceSlice, TraceSwitch

if TYPE_CHECKING:
    from rlinf_actors.runtime.runtime import Runtime

log = logging.getLogger(__name__)

NAME = "driver"
"""Name of the driver's process in a trace, and of its ring."""


def start(runtime: Runtime, events: int) -> Recorder:
    """Record this driver from now on, and return its recorder. Raises OSError if there is no memory for the ring."""
    made = recorder.start(events, {"name": NAME, "node": os.uname().nodename, "host": runtime.host})
    made.waits = True
    return made


class DriverTrace:
    """The trace of this process that the head may switch on and read."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recorder: Recorder | None = None  # it stays after the end of the recording, to be read

    def close(self) -> None:
        """End the recording, because the Cluster has ended: this process may get another one."""
        if recorder.active is self._recorder:
            recorder.stop()

    def answer(self, body: Body) -> Body | None:
        """Return the answer to a notice of the head; None if the notice is unexpected, which the log says."""
        if isinstance(body, AskAgent) and isinstance(body.question, TraceSwitch):
            return AgentAnswered(body.id, self._switch(body.question.events))
        if isinstance(body, AskAgent) and isinstance(body.question, TraceQuestion):
            return AgentAnswered(body.id, self._slice(body.question))
        log.warning("the head sent a %s, which this process does not expect", type(body).__name__)
        return None

    def _switch(self, events: int) -> SwitchedWorkers:
        if not events:
            self.close()
        elif recorder.active is None:
            try:
                self._recorder = start(self._runtime, events)
            except OSError as error:
                return SwitchedWorkers(failed=1, faults=[f"the driver: {explain(error)}"])
            self._recorder.of_job = False
        return SwitchedWorkers(workers=1)

    def _slice(self, question: TraceQuestion) -> TraceSlice:
        """Return a part of the ring, or its name. What was recorded is there until the next `trace start`."""
        ring = recorder.active or self._recorder
        if not question.name:
            head = self._runtime.head
            clock = [(one.at, one.offset, one.error) for one in (head.clock.samples() if head is not None else [])]
            return TraceSlice([NAME] if ring is not None else [], now=time.monotonic(), clock=clock)
        if ring is None or question.name != NAME:
            return TraceSlice(fault=f"there is no trace {question.name!r}")
        return TraceSlice(data=ring.memory[question.offset : question.offset + MAX_TRACE_SLICE])
