"""Children that user code makes by os.fork, and the one check that refuses them what they cannot do.

A child has a copy of this process's memory and only the thread that forked. The I/O thread, and with it every
connection, stays with the parent: what the child asked would never be answered. So whatever talks or waits calls
`check` with the generation in which it was made.

What runs user code (the executors of a worker) compares generations when that code comes back, and gives a child to
`end_child`: a second copy of an executor would wait for calls that it never gets.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from rlinf_actors.errors import UsageError

T = TypeVar("T")

EXIT_CODE = 1
"""Of a child that comes back from user code otherwise than by SystemExit."""


class Watcher(Protocol):
    """Has to know at once that it was forked."""

    def note_fork(self) -> None:
        """This process is a child: called in the thread that forked, before user code goes on."""


_generation = 0
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def generation() -> int:
    """Return how many forks lie between the driver or worker and this process: another number in each child."""
    return _generation


def begin() -> None:
    """Count from here: this process is a worker, and what its template had imported before the fork is its own."""
    global _generation
    _generation = 0


def watch(watcher: Watcher) -> None:
    """Call *watcher* in every child that is forked while it lives."""
    _watchers.add(watcher)


def free_in_children(lock: threading.Lock) -> threading.Lock:
    """Return *lock*, which lives as long as the process, so that a child has it free: who held it is not there."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def check(made_in: int) -> None:
    """Raise in a child for what was made before the fork.

    Args:
        made_in: the generation in which it was made.

    Raises:
        UsageError: it is the parent's; says what to do instead.
    """
    if made_in != _generation:
        raise UsageError(
            f"process {os.getpid()} is a fork of the driver or worker that has the connections, and cannot use them: "
            "make the call in the parent and hand the result over, or start this process with the spawn method "
            "(multiprocessing.get_context('spawn')). A child of a worker that constructs Worker(parent_address=...) "
            "has connections of its own"
        )


def guarded(what: str, function: Callable[[], T]) -> T:
    """Call user code, and end a forked child that comes back from it; *what* as for `end_child`."""
    here = _generation
    try:
        value = function()
    except BaseException as error:
        if _generation != here:
            end_child(what, error)
        raise
    if _generation != here:
        end_child(what, None)
    return value


def end_child(what: str, error: BaseException | None) -> NoReturn:
    """End a forked child that came back from user code.

    Prints what user code raised, a warning, and what is left in the buffers of stdout and stderr. The exit code is
    that of SystemExit, else `EXIT_CODE`.

    Args:
        what: that user code, for people.
        error: what it raised, if anything.
    """
    code = EXIT_CODE
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = (error.code or 0) & 0xFF
        elif isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
        elif error is not None:
            traceback.print_exception(type(error), error, error.__traceback__)
        print(  # noqa: T201 - to the user's terminal, whatever logging does
            f"WARNING: process {os.getpid()}, made by os.fork() in {what}, came back from there and ends here with "
            f"exit code {code}; its parent alone goes on. End such a child with os._exit(), or use multiprocessing",
            file=sys.stderr,
        )
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(code)


def _in_child() -> None:
    global _generation
    _generation += 1
    for watcher in list(_watchers):
        watcher.note_fork()


os.register_at_fork(after_in_child=_in_child)  # once: what is registered stays for the life of the process
