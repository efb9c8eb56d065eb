"""Forks: child processes that user code makes by os.fork, and the check that stops them from using connections.

A child has a copy of the memory and only the thread that forked. The I/O thread, and so every connection, stays in the
parent: a request of the child would never be answered. So every method that sends or waits calls `check` with the
generation in which its object was made. Executors compare generations when user code returns to them, and end a child
by `end_child`: a second copy of an executor would wait for calls that never come.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol, TypeVar

from rlinf_actors.errors import UsageError
from rlinf_actors.exit_codes import FAILURE

T = TypeVar("T")


class Watcher(Protocol):
    """An object that must know of forks by user code, because it belongs to the parent's connections or threads."""

    def note_fork(self) -> None:
        """Handle a fork by user code. Called in the child, on the thread that forked, before user code continues."""


generation = 0
"""Number of forks by user code from the driver or worker to this process: 0 in the driver or worker itself.

An object keeps the number of when it is made, and passes it to `check` later.
"""
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def begin() -> None:
    """Set the generation of this process to 0, because this process, which a template forked, becomes a worker."""
    global generation
    generation = 0


def watch(watcher: Watcher) -> None:
    """From now on, call *watcher*'s `note_fork` in each forked child, as long as *watcher* lives."""
    _watchers.add(watcher)


def free_in_children(lock: T) -> T:
    """Make *lock* free in forked children, where the thread that held it does not exist. Return *lock*.

    The lock must live as long as the process.
    """
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def handled_in_parent(numbers: Collection[signal.Signals], forget: Callable[[], object]) -> None:
    """Call *forget* in each forked child, to restore the handlers of the signals *numbers*, before one arrives there.

    Until then the signals are blocked in the thread that forks. Else a signal that is sent to a new child, as
    multiprocessing does to end a pool, would run the parent's handler there and wake the parent by a shared descriptor,
    or Python would drop it as one of the parent's.
    """
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def in_child() -> None:
        try:
            forget()
        finally:
            unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_child)


def check(made_in: int) -> None:
    """Raise UsageError if this process is a forked child and the object to use was made before the fork.

    *made_in* is the `generation` in which the object was made.
    """
    if made_in != generation:
        raise UsageError(
            f"process {os.getpid()} is a fork of the driver or worker that has the connections, and cannot use them: "
            "make the call in the parent and hand the result over, or start this process with the spawn method "
            "(multiprocessing.get_context('spawn')). A child of a worker that constructs Worker(parent_address=...) "
            "has connections of its own"
        )


def guarded(what: str, function: Callable[[], T]) -> T:
    """Call *function*, which runs user code, and return its value. If the user code forks and the child returns, end
    the child.

    *what* names the user code, for the warning that the child prints.
    """
    here = generation
    try:
        value = function()
    except BaseException as error:
        if generation != here:
            end_child(what, error)
        raise
    if generation != here:
        end_child(what, None)
    return value


def end_child(what: str, error: BaseException | None) -> NoReturn:
    """End this process, a forked child that has returned from user code instead of ending there.

    Prints a warning, and *error* if the user code raised, and flushes stdout and stderr. The exit code is that of a
    SystemExit, otherwise `FAILURE`. *what* names the user code.
    """
    code = FAILURE
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = (error.code or 0) & 0xFF
        elif isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
        elif error is not None:
            traceback.print_exception(type(error), error, error.__traceback__)
        print(  # noqa: T201 - to the user's terminal, with any logging configuration
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
    global generation
    generation += 1
    for watcher in list(_watchers):
        watcher.note_fork()


os.register_at_fork(after_in_child=_in_child)  # once: registrations stay for the life of the process
