"""What the threads and asyncio tasks of this process wait for, read in their frames.

No wait is recorded anywhere, so that a call costs nothing for it: `runtime.future.Future` waits in a frame that has the
future and the time at which the wait began.

House rules: no code of the user runs here, so no repr, no property and no comparison of its objects is used. Nothing
waits, and no lock is taken: the thread that holds it may be the one that hangs. Other threads go on meanwhile, so the
frames of a thread that runs may be of two moments.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import types
from asyncio.base_events import BaseEventLoop
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from rlinf_actors.net import reading
from rlinf_actors.net.loop_reader import LoopReader
from rlinf_actors.runtime import task_chains
from rlinf_actors.runtime.future import ChainedWork, Future, _Mapped
from rlinf_actors.runtime.task_chains import MAX_DEPTH, Awaited, tasks_of
from rlinf_actors.wire.stack_values import MAX_FRAMES, MAX_WAITS, Wait

MAX_TASKS = 5000
"""Most tasks that are looked at: the I/O thread has other work."""
MAX_TAKEN_AGAIN = 10
"""Most times that the frames of one thread are read again, because it left a coroutine while they were read."""
NAME_CHARS, WHAT_CHARS = 256, 1000

_SENDING = "send() to "

_BLOCKED = Future._block_until_done.__code__
_AWAITED = Future.__await__.__code__
_RUNS_LOOP = BaseEventLoop.run_forever.__code__
_CAN_BE_LEFT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Taken(msgspec.Struct):
    """A thread or task: its name, and its frames with the innermost first. A task has what it awaits."""

    name: str
    frames: list[types.FrameType]
    is_task: bool = False
    is_main: bool = False
    task: asyncio.Task[Any] | None = None
    awaits: Awaited = Awaited()


def threads(*, here: bool = False) -> list[Taken]:
    """Return all threads, the main thread first. The calling thread is left out unless *here* is True."""
    names: dict[int, Any] = dict(threading._active)  # type: ignore[attr-defined]  # threading.enumerate takes a lock
    own, main = 0 if here else threading.get_ident(), threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            thread = names.get(ident)
            name = f"thread {ident}" if thread is None else text_of(task_chains.own(thread, "_name"), NAME_CHARS)
            found.append(Taken(name, _whole(ident, frame), is_main=ident == main))
    return sorted(found, key=lambda one: (not one.is_main, one.name))


def _whole(ident: int, frame: types.FrameType) -> list[types.FrameType]:
    """Return the frames of the thread *ident* from *frame* on, the innermost first.

    The thread goes on meanwhile. If it leaves a coroutine or generator, the frame of that no longer leads to a caller,
    so the frames seem to end there. Those of a thread never do, so they are read again.
    """
    frames = _outwards(frame)
    for _ in range(MAX_TAKEN_AGAIN):
        now = sys._current_frames().get(ident) if frames[-1].f_code.co_flags & _CAN_BE_LEFT else None
        if now is None:  # the frames are whole, or the thread has ended
            break
        frames = _outwards(now)
    return frames


def _outwards(frame: types.FrameType | None) -> list[types.FrameType]:
    found: list[types.FrameType] = []
    while frame is not None and len(found) < MAX_DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def loops(threads: Iterable[Taken], known: Sequence[asyncio.AbstractEventLoop] = ()) -> list[asyncio.AbstractEventLoop]:
    """Return the *known* event loops, those of asyncio that *threads* run, and others that await results of ours."""
    found = list(known)
    active = reading.active
    followers = [] if active is None else list(active.followers.values())
    awaiting = [follower._loop() for follower in followers if isinstance(follower, LoopReader)]  # loops of uvloop
    running = [frame.f_locals.get("self") for one in threads for frame in one.frames if frame.f_code is _RUNS_LOOP]
    for loop in [*running, *awaiting]:
        if isinstance(loop, asyncio.AbstractEventLoop) and all(loop is not other for other in found):
            found.append(loop)
    return found


def chain_of(task: asyncio.Task[Any]) -> Taken:
    """Return a task with the frames of its await chain, and what it awaits."""
    frames = task_chains.frames_of(task)
    name = text_of(task_chains.name_of(task), NAME_CHARS)
    taken = Taken(name, frames, is_task=True, task=task)
    ours = waiting_in(taken)
    taken.awaits = task_chains.awaited_by(task, frames) if ours is None else Awaited(described(ours.future)[0])
    return taken


# --- waits ---


class Waiting(NamedTuple):
    """A thread or task that waits: for *future*, since the time *since* of time.monotonic, for *limit_s* seconds at
    most, 0 for no limit.
    """

    taken: Taken
    future: Future[Any]
    since: float
    limit_s: float

    def wait(self, now: float, alone: bool) -> Wait:
        """Return the wait for people and for other processes. *alone*: True if only the main thread runs calls."""
        what, on = described(self.future)
        return Wait(
            text_of(what, WHAT_CHARS),
            max(0.0, now - self.since),
            [text_of(name, NAME_CHARS) for name in on[:MAX_WAITS]],
            self.taken.name,
            self.taken.is_main and alone,
            self.limit_s,
        )


def waiting_in(taken: Taken) -> Waiting | None:
    """Return for what a thread or task waits; None if it waits for no operation of this library."""
    code = _AWAITED if taken.is_task else _BLOCKED
    frame = next((frame for frame in taken.frames if frame.f_code is code), None)
    known = {} if frame is None else frame.f_locals
    future, since, limit = known.get("self"), known.get("since"), known.get("timeout")
    if not isinstance(future, Future) or type(since) is not float:  # it has just begun
        return None
    return Waiting(taken, future, since, limit if isinstance(limit, float) else 0.0)


def all_waits(known: Sequence[asyncio.AbstractEventLoop] = ()) -> list[Waiting]:
    """Return all waits of this process, also one of the calling thread. *known* are event loops to look at. Any
    thread.
    """
    taken = threads(here=True)
    tasks = [task for loop in loops(taken, known) for task in tasks_of(loop)]
    taken += map(chain_of, tasks[:MAX_TASKS])
    return [waiting for one in taken if (waiting := waiting_in(one)) is not None]


def described(future: Future[Any]) -> tuple[str, Sequence[str]]:
    """Return what *future* is the result of, and the names of the workers that must act for it to end."""
    for _ in range(MAX_FRAMES):  # a chain of works may be long
        before = future._source if isinstance(future, _Mapped) else None
        before = future._before if isinstance(future, ChainedWork) else before
        if before is None:
            break
        future = before
    what, on = future._waited_for()
    return what, [what.removeprefix(_SENDING)] if what.startswith(_SENDING) else on


# --- values of the user ---


def text_of(value: object, limit: int, *, end: bool = False) -> str:
    """Return *limit* characters of a text: the first, or the last if *end*. A subclass of str is not looked at."""
    if type(value) is not str:
        return "?"
    return (value[-limit:] if end else value[:limit]).encode("utf-8", "replace").decode()
