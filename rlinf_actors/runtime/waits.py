"""What the threads and asyncio tasks of this process wait for, read in their frames.

No wait is recorded anywhere, so that a call costs nothing for it: `runtime.future.Future` waits in a frame that has the
future and the time at which the wait began.

House rules: no code of the user runs here, so no repr, no property and no comparison of its objects is used. Nothing
waits, and no lock is taken: the thread that holds it may be the one that hangs. Other threads go on meanwhile, so the
frames of a thread that runs may be of two moments.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

import msgspec

from rlinf_actors.net import reading
from rlinf_actors.net.loop_reader import LoopReader
from rlinf_actors.runtime.future import ChainedWork, Future, _Mapped
from rlinf_actors.wire.stack_values import MAX_FRAMES, MAX_WAITS, Wait

MAX_DEPTH = 100_000
"""Most frames of a thread that are looked at."""
MAX_TASKS = 5000
"""Most tasks that are looked at: the I/O thread has other work."""
NAME_CHARS, WHAT_CHARS = 256, 1000

_SENDING = "send() to "

_BLOCKED = Future._block_until_done.__code__
_AWAITED = Future.__await__.__code__
_TASKS = (asyncio.Task, asyncio.tasks._PyTask)  # type: ignore[attr-defined]  # the second in Python, for subclasses
_RUNS_LOOP = BaseEventLoop.run_forever.__code__

_FRAME: dict[type, Callable[[Any], types.FrameType | None]] = {
    types.CoroutineType: attrgetter("cr_frame"),
    types.GeneratorType: attrgetter("gi_frame"),
    types.AsyncGeneratorType: attrgetter("ag_frame"),
}
_AWAITS: dict[type, Callable[[Any], Any]] = {
    types.CoroutineType: attrgetter("cr_await"),
    types.GeneratorType: attrgetter("gi_yieldfrom"),
    types.AsyncGeneratorType: attrgetter("ag_await"),
}
_RUNS: dict[type, Callable[[Any], bool]] = {
    types.CoroutineType: attrgetter("cr_running"),
    types.GeneratorType: attrgetter("gi_running"),
}

ADVANCES: dict[types.CodeType, str] = {}
"""Code of generators that advance a coroutine by themselves, and the name of the variable that has the coroutine."""


class Taken(msgspec.Struct):
    """A thread or task: its name, its frames with the innermost first, and whether it is a task."""

    name: str
    frames: list[types.FrameType]
    is_task: bool = False
    is_main: bool = False


def threads(*, here: bool = False) -> list[Taken]:
    """Return all threads, the main thread first. The calling thread is left out unless *here* is True."""
    names: dict[int, Any] = dict(threading._active)  # type: ignore[attr-defined]  # threading.enumerate takes a lock
    own, main = 0 if here else threading.get_ident(), threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            thread = names.get(ident)
            name = f"thread {ident}" if thread is None else text_of(_own(thread, "_name"), NAME_CHARS)
            found.append(Taken(name, _outwards(frame), is_main=ident == main))
    return sorted(found, key=lambda one: (not one.is_main, one.name))


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


def tasks_of(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # tasks begin and end faster than they can be listed
        return []
    return [task for task in tasks if issubclass(type(task), _TASKS)]  # else a class of the user's own


def chain_of(task: asyncio.Task[Any]) -> Taken:
    kind = next(kind for kind in _TASKS if issubclass(type(task), kind))  # whose methods run no code of a subclass
    chain = _await_chain(kind.get_coro(task))
    return Taken(text_of(kind.get_name(task), NAME_CHARS), chain[::-1], is_task=True)


def _await_chain(coroutine: Any) -> list[types.FrameType]:
    """Return the frames of a task's coroutine and of what it awaits, as far as these are coroutines and generators.

    The innermost ones are missing if the task runs, on another thread.
    """
    found: list[types.FrameType] = []
    awaited, runs = coroutine, _RUNS.get(type(coroutine))
    while runs is not None and len(found) < MAX_DEPTH and (kind := type(awaited)) in _FRAME:
        frame = _FRAME[kind](awaited)
        if frame is None:  # it has ended
            break
        found.append(frame)
        # CPython up to 3.12 crashes if what a coroutine awaits is read while it is being entered. This is one call
        # of C code, so no other thread goes on between the check and the read.
        of = next(map(_AWAITS[kind], compress((awaited,), map(not_, map(runs, (coroutine,))))), None)
        awaited = frame.f_locals.get(ADVANCES[frame.f_code]) if frame.f_code in ADVANCES else of
    return found


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


def _own(thing: object, name: str) -> object:
    """Return an attribute that the standard library has set, without code of a class that overrides its access."""
    try:
        return object.__getattribute__(thing, name)
    except AttributeError:
        return None


def text_of(value: object, limit: int, *, end: bool = False) -> str:
    """Return *limit* characters of a text: the first, or the last if *end*. A subclass of str is not looked at."""
    if type(value) is not str:
        return "?"
    return (value[-limit:] if end else value[:limit]).encode("utf-8", "replace").decode()
