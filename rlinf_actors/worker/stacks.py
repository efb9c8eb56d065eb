"""The stacks of this worker process: what each thread and asyncio task runs, and what it waits for.

agentd asks for them (worker_questions.ShowStacks). `main` takes them on the I/O thread, so that a worker answers while
its main thread blocks. `runtime.waits` finds the threads, the tasks and their waits; its house rules hold here too.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Iterable, Sequence

from rlinf_actors.runtime.task_chains import tasks_of
from rlinf_actors.runtime.waits import (
    MAX_TASKS,
    NAME_CHARS,
    WHAT_CHARS,
    Taken,
    all_waits,
    chain_of,
    loops,
    text_of,
    threads,
    waiting_in,
)
from rlinf_actors.wire.stack_values import (
    MAX_FRAMES,
    MAX_STACKS,
    MAX_WAITS,
    STACK_BYTES,
    Stack,
    StackFrame,
    Wait,
    WorkerStacks,
)
from rlinf_actors.worker import task_trees
from rlinf_actors.worker.executors import Activity, BesideExecutor, Executor, LoopExecutor, SerialExecutor
from rlinf_actors.worker.task_trees import Lines, lines_of

OUTER_FRAMES = 8
"""Number of the outermost frames that are shown of a stack with more than MAX_FRAMES frames."""
PATH_CHARS = 200
_FRAME_BYTES = 32
"""Bytes of a frame in a message in addition to its texts; likewise of a wait."""


def worker_stacks(id: str, doing: Activity, executor: Executor | None) -> WorkerStacks:
    """Return what this process does now, except for the calling thread. *doing* and *executor* are the worker's.

    Any thread. *executor* is None while the user's class is constructed.
    """
    running = threads()
    tasks = [task for loop in loops(running, _own_loops(executor)) for task in tasks_of(loop)]
    chains = sorted(
        map(chain_of, tasks[:MAX_TASKS]), key=lambda one: (len(one.name), one.name)
    )  # Task-2 before Task-10
    now, alone = time.monotonic(), _is_alone(executor)
    waits = [found.wait(now, alone) for one in (*running, *chains) if (found := waiting_in(one)) is not None]
    stacks, cut = _bounded([*_merged(running), *_merged_tasks(chains)], STACK_BYTES)
    named, left_out = _bounded_waits(waits, STACK_BYTES // 4)
    cut += left_out + len(tasks[MAX_TASKS:])
    call_s = max(0.0, now - doing.since) if doing.method else 0.0
    return WorkerStacks(id, text_of(doing.method, WHAT_CHARS), call_s, doing.waiting, named, stacks, cut)


def worker_waits(executor: Executor | None) -> list[Wait]:
    """Return what the threads and tasks of this worker wait for, also the calling thread, the longest wait first."""
    now, alone = time.monotonic(), _is_alone(executor)
    found = sorted(all_waits(_own_loops(executor)), key=lambda waiting: waiting.since)
    return _bounded_waits([waiting.wait(now, alone) for waiting in found], STACK_BYTES // 4)[0]


def _is_alone(executor: Executor | None) -> bool:
    """Return True if no other thread than the main thread runs calls."""
    return executor is None or type(executor) in (SerialExecutor, LoopExecutor)


def _own_loops(executor: Executor | None) -> list[asyncio.AbstractEventLoop]:
    main = executor.main if isinstance(executor, BesideExecutor) else executor
    return [main._loop] if isinstance(main, LoopExecutor) else []


def _bounded_waits(waits: list[Wait], most: int) -> tuple[list[Wait], int]:
    """Return the first of *waits*, which have at most *most* bytes, and the number of the others."""
    for number, wait in enumerate(waits):
        most -= _FRAME_BYTES + _size(wait.what) + _size(wait.where) + sum(map(_size, wait.on))
        if most < 0 or number == MAX_WAITS:
            return waits[:number], len(waits) - number
    return waits, 0


# --- stacks ---


def _merged(taken: Iterable[Taken]) -> list[Stack]:
    """Return the stacks of threads, those with equal frames as one."""
    found: dict[Lines, list[Taken]] = {}
    for one in taken:
        found.setdefault(lines_of(one), []).append(one)
    return [Stack(some[0].name, _shown(some[0].frames), count=len(some)) for some in found.values()]


def _merged_tasks(chains: Sequence[Taken]) -> list[Stack]:
    """Return the stacks of tasks, each with those that it awaits behind it. Equal ones that a task awaits are one."""
    return [
        Stack(one.first.name, _shown(one.first.frames), True, one.number, one.depth, text_of(one.awaits, NAME_CHARS))
        for one in task_trees.placed(chains)
    ]


def _shown(frames: list[types.FrameType]) -> list[StackFrame]:
    """Return frames, given with the innermost first, with the innermost last; without the middle of a deep stack."""
    left_out = len(frames) - MAX_FRAMES + 1
    if left_out < 2:
        return [_frame(frame) for frame in reversed(frames)]
    inner = MAX_FRAMES - 1 - OUTER_FRAMES
    gap = StackFrame("", 0, f"{left_out} frames are left out")
    outer = [_frame(frame) for frame in reversed(frames[-OUTER_FRAMES:])]
    return [*outer, gap, *(_frame(frame) for frame in reversed(frames[:inner]))]


def _frame(frame: types.FrameType) -> StackFrame:
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
    return StackFrame(text_of(code.co_filename, PATH_CHARS, end=True), frame.f_lineno or 0, text_of(name, NAME_CHARS))


def _bounded(stacks: list[Stack], most: int) -> tuple[list[Stack], int]:
    """Return those of *stacks* that have room in *most* bytes, in order, and how many threads and tasks have none. With
    a task, those that it awaits are left out.
    """
    kept: list[Stack] = []
    left_out, above = 0, -1  # depth of the task that was left out
    for stack in stacks:
        if 0 <= above < stack.depth:
            left_out += stack.count
            continue
        above = -1
        size = _FRAME_BYTES + _size(stack.name) + _size(stack.awaits)
        size += sum(_FRAME_BYTES + _size(frame.file) + _size(frame.function) for frame in stack.frames)
        if size > most or len(kept) == MAX_STACKS:
            left_out, above = left_out + stack.count, stack.depth
        else:
            most -= size
            kept.append(stack)
    return kept, left_out


def _size(text: str) -> int:
    return len(text.encode())
