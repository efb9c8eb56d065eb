"""Values by which a person talks to the debugger of a worker that waits in a breakpoint. Pure.

A question goes from a command to the node (wire.node_questions), and from agentd to the worker by its template
(wire.worker_questions). Input and output are the user's texts: they are passed on, and never interpreted. A question
waits in the worker until there is something to say.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rlinf_actors.wire.bounds import Name, Text
from rlinf_actors.wire.protocol import Number
from rlinf_actors.wire.values import Value

MAX_INPUT, MAX_OUTPUT = 4096, 8192
"""Most characters of input in one question, and of output in one answer."""
MAX_DEBUG_WAIT_S = 20.0
"""Longest time that a worker waits for output before it answers with none, in seconds."""
Position = Annotated[int, Meta(ge=-1, le=2**53)]
"""A position in the output of a breakpoint, in characters, or a number of an input or breakpoint."""
FREE, WAITS, OVER, REPLACED = "free", "waits", "over", "replaced"
"""States: no thread waits in a breakpoint; this one waits or steps on; it is left; another attachment has come."""


class DebugQuestion(Value, frozen=True, tag="AttachDebugger"):
    """What an attachment, one run of `rlinf-actors attach`, says to the debugger of a worker.

    Attributes:
        namespace, worker: the job, and the worker's id.
        attachment: its name. One that the worker does not know becomes its only one if `number` is 0.
        by: who attaches, for people.
        number: number of the input. An input that comes again is not taken again.
        input: lines for the debugger.
        stop: number of the breakpoint, 0 for the one that waits now.
        offset: position of the first character of output to send; -1 for the line where the thread waits.
        wait_s: seconds to wait for output if there is none after the offset.
        interrupts: True to raise KeyboardInterrupt in the command that the debugger runs, with the next `number`.
    """

    namespace: Name
    worker: Name
    attachment: Name
    by: Name = ""
    number: Position = 0
    input: Annotated[str, Meta(max_length=MAX_INPUT, title="input", description="Longer input is sent in parts.")] = ""
    stop: Position = 0
    offset: Position = -1
    wait_s: Number = 0.0
    interrupts: bool = False


class DebugAnswer(Value, frozen=True, tag=True):
    """What a worker's debugger answers to an attachment.

    Attributes:
        id: the worker.
        state: FREE, WAITS, OVER or REPLACED; "" with a fault.
        stop: number of the breakpoint.
        place: where the thread waits, such as "train.py:42 in step".
        thread: name of the thread.
        asks: True if the debugger waits for input.
        output: text from `offset` on. An offset after that of the question says that output was dropped.
        offset: position of the first character of `output`.
        queued: number of further threads that wait in breakpoints for their turn.
        by: who has attached in place of an attachment that was REPLACED.
        fault: why there is no answer of the worker, for people.
        runs_s: for how many seconds a command of the debugger has been running, 0.0 if none runs.
    """

    id: Name
    state: Name = ""
    stop: Position = 0
    place: Text = ""
    thread: Name = ""
    asks: bool = False
    output: Annotated[
        str, Meta(max_length=MAX_OUTPUT, title="debugger output", description="Longer output is sent in parts.")
    ] = ""
    offset: Position = 0
    queued: Position = 0
    by: Name = ""
    fault: Text = ""
    runs_s: Number = 0.0


def attach_command(name: str, namespace: str) -> str:
    """Return the command that attaches to a worker. It names the job, because other jobs may have such a group too."""
    return f"rlinf-actors attach {name} --job {namespace}"
