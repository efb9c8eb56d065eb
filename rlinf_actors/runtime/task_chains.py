"""asyncio tasks seen from any thread: their frames, and the tasks that each of them awaits.

From Python 3.14 on asyncio.graph knows both. Until then they are in attributes of coroutines, and in private ones of
asyncio that are the same in 3.10 to 3.13. Only this module reads them. The house rules of `runtime.waits` hold.
"""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import Callable, Iterable
from itertools import compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

from rlinf_actors.compat import TaskGroup

MAX_DEPTH = 100_000
"""Most frames of a thread or task that are looked at."""

_TASKS = (asyncio.Task, asyncio.tasks._PyTask)  # type: ignore[attr-defined]  # the second in Python, for subclasses
_FUTURES = (asyncio.Future, asyncio.futures._PyFuture)  # type: ignore[attr-defined]
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

_HELD: dict[types.CodeType, tuple[str, str]] = {
    asyncio.wait_for.__code__: ("wait_for()", "fut"),  # until Python 3.11; later it awaits the task itself
    asyncio.tasks._cancel_and_wait.__code__: ("wait_for()", "fut"),  # type: ignore[attr-defined]
    asyncio.tasks._wait.__code__: ("wait()", "fs"),  # type: ignore[attr-defined]
}
"""Code of asyncio that waits for other futures by one of its own: what people call it, and the variable with them."""
_GROUPS = {getattr(TaskGroup, name).__code__ for name in ("__aexit__", "_aexit") if hasattr(TaskGroup, name)}
_SHIELD = {code for code in asyncio.shield.__code__.co_consts if isinstance(code, types.CodeType)}
_ASYNCIO = os.path.dirname(asyncio.__file__)


class Awaited(NamedTuple):
    """What a task awaits: *how*, for people, "" if its innermost frame says it, and the *tasks* that have not ended."""

    how: str = ""
    tasks: tuple[asyncio.Task[Any], ...] = ()


def tasks_of(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # tasks begin and end faster than they can be listed
        return []
    return [task for task in tasks if _is_task(task)]  # else a class of the user's own


def name_of(task: asyncio.Task[Any]) -> object:
    return _kind(task).get_name(task)


def frames_of(task: asyncio.Task[Any]) -> list[types.FrameType]:
    """Return the frames of a task's coroutine and of what it awaits, as far as these are coroutines and generators, the
    innermost first. The innermost ones are missing if the task runs, on another thread.
    """
    coroutine = _kind(task).get_coro(task)
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
    return found[::-1]


def awaited_by(task: asyncio.Task[Any], frames: list[types.FrameType]) -> Awaited:
    """Return what *task*, whose *frames* have the innermost first, awaits."""
    waiter = own(task, "_fut_waiter")
    if waiter is None:  # it runs, or it will soon
        return Awaited()
    if _is_task(waiter):
        return Awaited("a task", (waiter,))
    how, futures = _held(waiter, frames[0] if frames else None)
    if not futures:
        told = bool(frames) and frames[0].f_code.co_filename.startswith(_ASYNCIO)  # such as Queue.get()
        return Awaited("" if told else "a future")
    left = [future for future in futures if not _kind(future, _FUTURES).done(future)]
    done = f", {len(futures) - len(left)} done" if len(left) < len(futures) else ""
    number = f" of {len(futures)}" if len(futures) > 1 else ""
    return Awaited(f"{how}{number}{done}", tuple(future for future in left if _is_task(future)))


def _held(waiter: object, frame: types.FrameType | None) -> tuple[str, list[Any]]:
    """Return the futures for which asyncio itself waits by *waiter*, which the innermost *frame* awaits, and how."""
    if type(waiter) is asyncio.tasks._GatheringFuture:  # type: ignore[attr-defined]
        return "gather()", _futures(waiter._children)  # type: ignore[attr-defined]
    for callback, *_ in (own(waiter, "_callbacks") or ()) if type(waiter) in _FUTURES else ():
        if type(callback) is types.FunctionType and callback.__code__ in _SHIELD:
            return "shield()", _futures(cell.cell_contents for cell in callback.__closure__ or ())
    if frame is not None and frame.f_code in _GROUPS:
        return "TaskGroup", _futures(own(frame.f_locals.get("self"), "_tasks"))
    how, variable = _HELD.get(frame.f_code, ("", "")) if frame is not None else ("", "")
    return how, _futures(frame.f_locals.get(variable)) if frame is not None and how else []


def _futures(found: object) -> list[Any]:
    """Return the futures of asyncio in *found*, which asyncio has made: a future, or a collection of them."""
    some = list(found) if isinstance(found, (list, tuple, set, types.GeneratorType)) else [found]
    return [one for one in some if issubclass(type(one), _FUTURES)]


def _is_task(value: object) -> bool:
    return issubclass(type(value), _TASKS)


def _kind(task: asyncio.Future[Any], kinds: Iterable[type] = _TASKS) -> Any:
    """Return the class of asyncio that a task or future has, whose methods run no code of a subclass."""
    return next(kind for kind in kinds if issubclass(type(task), kind))


def own(thing: object, name: str) -> Any:
    """Return an attribute that the standard library has set, without code of a class that overrides its access."""
    try:
        return object.__getattribute__(thing, name)
    except AttributeError:
        return None
