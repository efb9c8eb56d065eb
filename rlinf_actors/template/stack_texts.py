"""The output of faulthandler and of py-spy as stacks. Pure. What is not understood is left out."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rlinf_actors.wire.stack_values import MAX_FRAMES, MAX_STACKS, STACK_BYTES, Stack, StackFrame, WorkerStacks

OUTER_FRAMES = 8
NAME_CHARS, PATH_CHARS = 256, 200
_FRAME_BYTES = 32

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class _SpyFrame(msgspec.Struct):
    name: str = "?"
    filename: str = ""
    line: int = 0
    module: str | None = None


class _SpyThread(msgspec.Struct):
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None
    owns_gil: bool = False
    frames: list[_SpyFrame] = []


def of_faulthandler(text: str) -> list[Stack]:
    """Return the stacks that faulthandler has written, that of the oldest thread, mostly the main thread, first.

    If the output has several dumps, because earlier signals came late, the last one counts.
    """
    found: list[Stack] = []
    known: set[str] = set()  # threads of this dump
    name = ""
    frames: list[StackFrame] = []
    for line in text.splitlines():
        thread, frame = _THREAD.fullmatch(line), _FRAME.fullmatch(line)
        if thread is not None:
            if name:
                found.append(Stack(name, _bounded(frames)))
            if thread[1] in known:
                found, known = [], set()
            known.add(thread[1])
            name, frames = _cut(thread[2] or thread[1], NAME_CHARS), []
        elif frame is not None:
            number = int(frame[2]) if frame[2].isdigit() else 0
            frames.append(StackFrame(_cut(frame[1][-PATH_CHARS:], PATH_CHARS), number, _cut(frame[3], NAME_CHARS)))
        elif line == "  ...":
            frames.append(StackFrame("", 0, "further frames are left out"))
    if name:
        found.append(Stack(name, _bounded(frames)))
    return found[::-1]


def of_py_spy(text: str) -> list[Stack]:
    """Return the stacks in py-spy's JSON, the main thread first. A thread that holds the interpreter's lock says so."""
    try:
        threads = msgspec.json.decode(text, type=list[_SpyThread])
    except msgspec.MsgspecError:
        return []
    threads.sort(key=lambda one: one.os_thread_id != one.pid)
    return [Stack(_name(one), _bounded([_frame(frame) for frame in one.frames])) for one in threads]


def _name(thread: _SpyThread) -> str:
    name = _cut(thread.thread_name or str(thread.os_thread_id or "?"), NAME_CHARS - 32)
    return f"{name} (holds the GIL)" if thread.owns_gil else name


def _frame(frame: _SpyFrame) -> StackFrame:
    file = frame.filename or frame.module or "?"
    return StackFrame(_cut(file[-PATH_CHARS:], PATH_CHARS), max(0, frame.line), _cut(frame.name, NAME_CHARS))


def _bounded(frames: list[StackFrame]) -> list[StackFrame]:
    """Return frames, given with the innermost first, with the innermost last; without the middle of a deep stack."""
    left_out = len(frames) - MAX_FRAMES + 1
    if left_out < 2:
        return frames[::-1]
    gap = StackFrame("", 0, f"{left_out} frames are left out")
    return [*frames[: -OUTER_FRAMES - 1 : -1], gap, *frames[MAX_FRAMES - 2 - OUTER_FRAMES :: -1]]


def shown(id: str, level: str, stacks: list[Stack]) -> WorkerStacks:
    """Return the answer with as many of *stacks* as have room in it."""
    kept: list[Any] = []
    most = STACK_BYTES
    for stack in stacks:
        most -= len(stack.name.encode()) + sum(
            _FRAME_BYTES + len(frame.file.encode()) + len(frame.function.encode()) for frame in stack.frames
        )
        if most < 0 or len(kept) == MAX_STACKS:
            break
        kept.append(stack)
    return WorkerStacks(id, stacks=kept, cut=len(stacks) - len(kept), level=level)


def _cut(text: str, limit: int) -> str:
    return text[:limit].encode("utf-8", "replace").decode()
