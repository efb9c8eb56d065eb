"""The stacks of this worker process: what each thread and asyncio task runs, and what it waits for.

agentd asks for them (template_protocol.ShowStacks). `main` takes them on the I/O thread, so that a worker answers while
its main thread blocks. What a thread or task waits for is recorded nowhere: it is read in the frame in which
`runtime.future.Future` waits, which has the future and the time at which the wait began.

House rules: no code of the user runs here, so no repr, no property and no comparison of its objects is used. Nothing
waits, and no lock is taken: the thread that holds it may be the one that hangs. Other threads go on meanwhile, so the
frames of a thread that runs may be of two moments.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import types
from asyncio.base_events import BaseEventLoop
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.messaging.blocking_receive import BlockingReceive
from rlinf_actors.messaging.receive import PendingReceive
from rlinf_actors.runtime.future import ChainedWork, Future, _Mapped
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
from rlinf_actors.worker.executors import Activity, BesideExecutor, Executor, LoopExecutor, SerialExecutor
from rlinf_actors.worker.invocation import own_steps

OUTER_FRAMES = 8
"""Number of the outermost frames that are shown of a stack with more than MAX_FRAMES frames."""
MAX_DEPTH = 100_000
"""Most frames of a thread that are looked at."""
MAX_TASKS = 5000
"""Most tasks that are looked at: the I/O thread has other work."""
NAME_CHARS, PATH_CHARS, WHAT_CHARS = 256, 200, 1000
_FRAME_BYTES = 32
"""Bytes of a frame in a message in addition to its texts; likewise of a wait."""
_SENDING = "send() to "

_BLOCKED = Future._block_until_done.__code__
_AWAITED = Future.__await__.__code__
_OWN_STEPS = own_steps.__code__
_TASKS = (asyncio.Task, asyncio.tasks._PyTask)  # type: ignore[attr-defined]  # the second in Python, for subclasses
_RUNS_LOOP = BaseEventLoop.run_forever.__code__


class _Taken(msgspec.Struct):
    """A thread or task: its name, its frames with the innermost first, and whether it is a task."""

    name: str
    frames: list[types.FrameType]
    is_task: bool = False
    is_main: bool = False


def worker_stacks(id: str, doing: Activity, executor: Executor | None) -> WorkerStacks:
    """Return what this process does now, except for the calling thread. *doing* and *executor* are the worker's.

    Any thread. *executor* is None while the user's class is constructed.
    """
    taken = [*_threads()]
    tasks = [task for loop in _loops(taken, executor) for task in _tasks(loop)]
    taken += map(_chain_of, tasks[:MAX_TASKS])
    alone = executor is None or type(executor) in (SerialExecutor, LoopExecutor)  # no other thread runs calls
    now = time.monotonic()
    waits = [wait for one in taken if (wait := _wait_of(one, now, alone)) is not None]
    stacks, cut = _bounded(_merged(taken), STACK_BYTES)
    named, left_out = _bounded_waits(waits, STACK_BYTES // 4)
    cut += left_out + len(tasks[MAX_TASKS:])
    call_s = max(0.0, now - doing.since) if doing.method else 0.0
    return WorkerStacks(id, _text(doing.method, WHAT_CHARS), call_s, doing.waiting, named, stacks, cut)


def _threads() -> list[_Taken]:
    """Return all threads but this one, the main thread first."""
    names: dict[int, Any] = dict(threading._active)  # type: ignore[attr-defined]  # threading.enumerate takes a lock
    here, main = threading.get_ident(), threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != here:
            thread = names.get(ident)
            name = f"thread {ident}" if thread is None else _text(_own(thread, "_name"), NAME_CHARS)
            found.append(_Taken(name, _outwards(frame), is_main=ident == main))
    return sorted(found, key=lambda one: (not one.is_main, one.name))


def _outwards(frame: types.FrameType | None) -> list[types.FrameType]:
    found: list[types.FrameType] = []
    while frame is not None and len(found) < MAX_DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _loops(threads: Iterable[_Taken], executor: Executor | None) -> list[asyncio.AbstractEventLoop]:
    """Return the event loop of *executor*, and those of asyncio that *threads* run. Loops of uvloop have no frames."""
    main = executor.main if isinstance(executor, BesideExecutor) else executor
    found: list[asyncio.AbstractEventLoop] = [main._loop] if isinstance(main, LoopExecutor) else []
    for thread in threads:
        for frame in thread.frames:
            loop = frame.f_locals.get("self") if frame.f_code is _RUNS_LOOP else None
            if isinstance(loop, asyncio.AbstractEventLoop) and all(loop is not known for known in found):
                found.append(loop)
    return found


def _tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # tasks begin and end faster than they can be listed
        return []
    return [task for task in tasks if issubclass(type(task), _TASKS)]  # else a class of the user's own


def _chain_of(task: asyncio.Task[Any]) -> _Taken:
    kind = next(kind for kind in _TASKS if issubclass(type(task), kind))  # whose methods run no code of a subclass
    chain = _await_chain(kind.get_coro(task))
    return _Taken(_text(kind.get_name(task), NAME_CHARS), chain[::-1], is_task=True)


def _await_chain(awaited: Any) -> list[types.FrameType]:
    """Return the frames of a coroutine and of what it awaits, as far as these are coroutines and generators."""
    found: list[types.FrameType] = []
    while len(found) < MAX_DEPTH:
        frame: types.FrameType | None
        kind = type(awaited)
        if kind is types.CoroutineType:
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif kind is types.GeneratorType:
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
            if frame is not None and frame.f_code is _OWN_STEPS:  # advances it by itself
                awaited = frame.f_locals.get("coroutine")
        elif kind is types.AsyncGeneratorType:
            frame, awaited = awaited.ag_frame, awaited.ag_await
        else:
            break
        if frame is None:  # it has ended
            break
        found.append(frame)
    return found


# --- waits ---


def _wait_of(taken: _Taken, now: float, alone: bool) -> Wait | None:
    """Return what a thread or task waits for; None if it waits for no operation of this library.

    *alone* is True if only the main thread runs calls.
    """
    code = _AWAITED if taken.is_task else _BLOCKED
    frame = next((frame for frame in taken.frames if frame.f_code is code), None)
    known = {} if frame is None else frame.f_locals
    future, since, limit = known.get("self"), known.get("since"), known.get("timeout")
    if not isinstance(future, Future) or type(since) is not float:  # it has just begun
        return None
    what, on = _described(future)
    return Wait(
        _text(what, WHAT_CHARS),
        max(0.0, now - since),
        [_text(name, NAME_CHARS) for name in on[:MAX_WAITS]],
        taken.name,
        taken.is_main and alone,
        limit if isinstance(limit, float) else 0.0,
    )


def _described(future: Future[Any]) -> tuple[str, Sequence[str]]:
    """Return what *future* is the result of, and the names of the workers that must act for it to end."""
    for _ in range(MAX_FRAMES):  # a chain of works may be long
        before = future._source if isinstance(future, _Mapped) else None
        before = future._before if isinstance(future, ChainedWork) else before
        if before is None:
            break
        future = before
    what = future._what
    if isinstance(future, WorkerGroupFuncResult):
        late = [peer.name for peer in future._missing()[:MAX_WAITS]]
        return f"{what}() of {', '.join(late)}", late
    if isinstance(future, BlockingReceive):
        return what, [future.key[0]]
    if isinstance(future, PendingReceive):
        return what, [future.posted.key[0]]
    return what, [what.removeprefix(_SENDING)] if what.startswith(_SENDING) else []


def _bounded_waits(waits: list[Wait], most: int) -> tuple[list[Wait], int]:
    """Return the first of *waits*, which have at most *most* bytes, and the number of the others."""
    for number, wait in enumerate(waits):
        most -= _FRAME_BYTES + _size(wait.what) + _size(wait.where) + sum(map(_size, wait.on))
        if most < 0 or number == MAX_WAITS:
            return waits[:number], len(waits) - number
    return waits, 0


# --- stacks ---


def _merged(taken: Iterable[_Taken]) -> list[Stack]:
    """Return the stacks, those with equal frames as one."""
    found: dict[tuple[bool, tuple[tuple[int, int | None], ...]], list[_Taken]] = {}
    for one in taken:
        key = one.is_task, tuple((id(frame.f_code), frame.f_lineno) for frame in one.frames)
        found.setdefault(key, []).append(one)
    return [Stack(some[0].name, _shown(some[0].frames), some[0].is_task, len(some)) for some in found.values()]


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
    return StackFrame(_text(code.co_filename, PATH_CHARS, end=True), frame.f_lineno or 0, _text(name, NAME_CHARS))


def _bounded(stacks: list[Stack], most: int) -> tuple[list[Stack], int]:
    """Return those of *stacks* that have room in *most* bytes, in order, and how many threads and tasks have none."""
    kept: list[Stack] = []
    left_out = 0
    for stack in stacks:
        size = _FRAME_BYTES + _size(stack.name)
        size += sum(_FRAME_BYTES + _size(frame.file) + _size(frame.function) for frame in stack.frames)
        if size > most or len(kept) == MAX_STACKS:
            left_out += stack.count
        else:
            most -= size
            kept.append(stack)
    return kept, left_out


# --- values of the user ---


def _own(thing: object, name: str) -> object:
    """Return an attribute that the standard library has set, without code of a class that overrides its access."""
    try:
        return object.__getattribute__(thing, name)
    except AttributeError:
        return None


def _text(value: object, limit: int, *, end: bool = False) -> str:
    """Return *limit* characters of a text: the first, or the last if *end*. A subclass of str is not looked at."""
    if type(value) is not str:
        return "?"
    return (value[-limit:] if end else value[:limit]).encode("utf-8", "replace").decode()


def _size(text: str) -> int:
    return len(text.encode())
