"""Values inside control messages about stacks of workers. Pure; the house rules of values.py hold.

Names of files, functions, threads and tasks are the user's: they are shown, and never interpreted.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import Meta

from rlinf_actors.wire.bounds import Method, Name, Path, Text
from rlinf_actors.wire.protocol import Count, Number
from rlinf_actors.wire.values import Value

T = TypeVar("T")

MAX_FRAMES = 64
"""Most frames of one stack in a message."""
MAX_STACKS = 256
"""Most stacks of one worker in a message."""
MAX_WAITS = 64
"""Most waits of one worker in a message, and most workers that one wait names."""
Waits = Annotated[
    list[T],
    Meta(max_length=MAX_WAITS, title="waits", description="Mostly one; a call may wait for many ranks."),
]
MAX_ASKED = 64
"""Most workers in one question: their stacks have at most 3 MiB."""
OfAsked = Annotated[
    list[T],
    Meta(max_length=MAX_ASKED, title="asked", description="Longer lists are asked for in parts."),
]
"""One for each worker whose stacks are asked for."""
IO_THREAD, SIGNAL, PY_SPY, NATIVE = "io-thread", "signal", "py-spy", "native"
"""The levels, by which the stacks of a worker are taken: its I/O thread answers; a signal makes C code in the worker
write them; py-spy reads them from outside; the same with the frames of C code."""
LEVELS = (IO_THREAD, SIGNAL, PY_SPY, NATIVE)
STOPPED = "its process is stopped (state T)"
"""Begin of the reason why a worker shows no stacks by any level, before `stopped` says what to do."""
STACK_BYTES = 40 << 10
"""Most bytes of the stacks of one worker, about: the packet that has them may have 64 KiB."""


class StackQuestion(Value, frozen=True, tag="ReadStacks"):
    """Request to a node: send the stacks of these workers, which are of the job `namespace`, by `level` of LEVELS."""

    namespace: Name
    ids: OfAsked[Name]
    level: Name = IO_THREAD


class StackFrame(Value, frozen=True):
    """One frame of a stack. In place of frames that were left out, a frame without `file` says so."""

    file: Path
    line: int
    function: Name


class Stack(Value, frozen=True):
    """The frames of a thread, or the await chain of an asyncio task, with the innermost frame last.

    Attributes:
        name: name of the thread or task.
        frames: the frames.
        is_task: True for a task.
        count: number of threads or tasks with these frames; `name` is that of the first.
        depth: number of tasks above that wait for this one, each by the next: the last stack before with a smaller
            depth awaits it. 0 for threads, and for tasks that no task awaits.
        awaits: what a task awaits, such as "gather() of 3, 1 done", "" if its innermost frame says it. Tasks that it
            awaits follow it.
    """

    name: Name
    frames: Annotated[
        list[StackFrame],
        Meta(max_length=MAX_FRAMES, title="frames", description="The outer and the inner ones of a deep stack."),
    ] = []
    is_task: bool = False
    count: Count = 1
    depth: Count = 0
    awaits: Name = ""


class Wait(Value, frozen=True):
    """A thread or task that waits for an operation of this library.

    Attributes:
        what: the operation, such as "recv() from env:0".
        seconds: how long it has been waiting.
        on: names of the workers that it waits for; all of them must answer.
        where: name of the thread or task.
        blocks: True if the worker runs no other call meanwhile.
        limit_s: time limit of the wait in seconds, 0 for none.
    """

    what: Method
    seconds: Number
    on: Waits[Name] = []
    where: Name = ""
    blocks: bool = False
    limit_s: Number = 0.0


class WorkerStacks(Value, frozen=True, tag=True):
    """What a worker does, as its I/O thread says. Other levels know its stacks only.

    Attributes:
        method: the call that has been running longest, "" for none.
        call_s: for how many seconds it has been running.
        queued: number of calls that wait for their turn.
        waits: what its threads and tasks wait for.
        stacks: its threads, the main thread first, and its asyncio tasks; not the I/O thread.
        cut: number of stacks and waits that were left out.
        fault: why there is no answer of the worker, for people; "" if there is one.
        level: by which of LEVELS the stacks were taken.
    """

    id: Name
    method: Method = ""
    call_s: Number = 0.0
    queued: int = 0
    waits: Waits[Wait] = []
    stacks: Annotated[
        list[Stack],
        Meta(max_length=MAX_STACKS, title="stacks", description="Threads and tasks; equal stacks are sent once."),
    ] = []
    cut: int = 0
    fault: Text = ""
    level: Name = IO_THREAD


def stopped(pid: int) -> str:
    """Return the reason why a worker gives no answer whose process *pid* a signal such as SIGSTOP has stopped."""
    return f"{STOPPED}: `kill -CONT {pid}` on its node lets it go on"


class StackAnswer(Value, frozen=True, tag=True):
    """Answer of a node to a StackQuestion, with an entry for each worker in it."""

    workers: OfAsked[WorkerStacks]
