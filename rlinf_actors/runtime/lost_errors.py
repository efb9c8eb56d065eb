"""Errors that nobody awaits: reported once, and the script's exit code is not 0 because of them.

Theory of operation. A failed call, stream or launch registers itself here when its error arrives (I/O thread).
Code that waits already gets the error as an exception and nothing is reported. Code that is just about to wait has
`GRACE_S`; after that the error is reported, also while the driver blocks elsewhere: to the exception handler of the
event loop in which the call was made, as asyncio does for tasks, or else to the log. Whoever waits later still gets
the exception, and the error is not reported again. The exit code counts the errors that nobody had taken at the end.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import ctypes
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

log = logging.getLogger(__name__)

GRACE_S = 0.3
"""How long an error waits for somebody to await it before it is reported: `result = group.step()` and
`result.wait()` in the next statements make no noise.
"""
LOOP_PATIENCE_S = 0.5
"""How long an event loop may take to run its exception handler; the log has the error of a loop that is blocked."""

REMEMBERED = 64
"""Errors by which several calls may fail, and that are not reported again."""

Later = Callable[[float, Callable[[], object]], object]
"""Run a function after so many seconds, on a thread of the runtime's own."""


class Failed(Protocol):
    """Something that failed."""

    @property
    def cause(self) -> Exception | None:
        """The error, where several may have failed by one and the same: it is reported once."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that ran where this was begun, None without one."""

    @property
    def shared(self) -> bool:
        """True if calls fail by the very same error, so that whoever sees it there has seen it here."""

    def describe(self) -> str:
        """The error in full, for the log. Any thread: it must not unpickle."""

    def raised(self) -> BaseException:
        """The error as the caller would get it. The thread of `loop`."""


class _Open:
    """A failure that nobody has taken yet: held until it is reported, watched afterwards."""

    __slots__ = ("held", "ref", "reported")

    def __init__(self, failed: Failed, held: bool) -> None:
        self.ref = weakref.ref(failed)
        self.held = failed if held else None
        self.reported = False


class LostErrors:
    """Keeps the failures that no caller has seen. Any thread.

    Args:
        change_exit_code: whether a script that would end with 0 ends with 1 if an error was lost.
        later: the timer that ends the grace.

    Attributes:
        count: how many were reported.
    """

    def __init__(self, change_exit_code: bool, later: Later) -> None:
        self._open: dict[int, _Open] = {}
        self._reported: collections.deque[Exception] = collections.deque(maxlen=REMEMBERED)
        self._shared: weakref.WeakValueDictionary[int, Failed] = weakref.WeakValueDictionary()  # by id of their cause
        self._handed: set[Callable[[], object]] = set()
        self._later = later
        self._exit_code = _ExitCode.watched() if change_exit_code else None
        self.count = 0

    @property
    def script_failed(self) -> bool:
        """Whether the script ends by an exception, or with a code other than 0; False if that is not watched."""
        return self._exit_code is not None and self._exit_code.chosen

    def failed(self, failed: Failed, *, awaited: bool) -> None:
        """Register a failure, to be reported after the grace unless `seen`.

        Args:
            failed: what failed; the same object is given to `seen` and `collected`.
            awaited: whether somebody waits for it already, and gets the error by exception.
        """
        record = self._open[id(failed)] = _Open(failed, held=not awaited)
        if failed.shared:
            self._shared[id(failed.cause)] = failed
        if awaited:
            self._known(failed)
        else:
            self._later(GRACE_S, lambda: self._overdue(record))

    def seen(self, failed: Failed) -> None:
        """The error was raised to somebody."""
        self._open.pop(id(failed), None)
        self._known(failed)

    def _known(self, failed: Failed) -> None:
        """Somebody sees this error, and with it what failed by the same one."""
        sharing = self._shared.pop(id(failed.cause), None)
        if sharing is not None:
            self._open.pop(id(sharing), None)

    def collected(self, failed: Failed) -> None:
        """The last reference to a failure that nobody saw is gone. Called by its destructor."""
        record = self._open.pop(id(failed), None)
        if record is not None:
            self._lost(failed, record)

    def close(self) -> None:
        """Report what is still unseen, and log what a loop's handler has not taken since the last call.

        Called when the process's connection to the cluster ends, and again when that has ended.
        """
        for take in list(self._handed):
            take()
        for key, record in list(self._open.items()):
            failed = record.held or record.ref()
            if failed is not None and self._open.pop(key, None) is record:
                self._lost(failed, record)
        exit_code, self._exit_code = self._exit_code, None
        if exit_code is not None:
            exit_code.release()

    def _overdue(self, record: _Open) -> None:
        failed, record.held = record.held, None  # from here on its collection is heard of
        if failed is not None and self._open.get(id(failed)) is record:
            record.reported = True
            self._report(failed)

    def _lost(self, failed: Failed, record: _Open) -> None:
        """Nobody can see it any more."""
        if self._exit_code is not None:
            self._exit_code.lost = True
        if not record.reported:
            self._report(failed)

    def _report(self, failed: Failed) -> None:
        cause = failed.cause
        if cause is not None:
            if any(cause is known for known in self._reported):
                return  # of a worker that died every call has the same error
            self._reported.append(cause)
        self.count += 1
        text, loop = failed.describe(), failed.loop
        if loop is None or not loop.is_running():
            _log(text)
            return
        self._hand_over(failed, text, loop)

    def _hand_over(self, failed: Failed, text: str, loop: asyncio.AbstractEventLoop) -> None:
        """Give it to the loop's exception handler, or to the log if the loop does not take it in time."""
        turn = threading.Lock()  # whoever gets it reports

        def handle() -> None:
            if turn.acquire(blocking=False):
                self._handed.discard(take)
                loop.call_exception_handler({"message": _TEXT, "exception": failed.raised(), "future": failed})

        def take() -> None:
            if turn.acquire(blocking=False):
                self._handed.discard(take)
                _log(text)

        self._handed.add(take)
        try:
            loop.call_soon_threadsafe(handle)
        except RuntimeError:
            if not loop.is_closed():
                raise
            take()
        else:
            self._later(LOOP_PATIENCE_S, take)


_TEXT = "A call failed and nobody awaits it (wait() or await its result to handle the error)"


def _log(text: str) -> None:
    log.error("%s: %s", _TEXT, text)


class _ExitCode:
    """Makes an exit with 0 one with 1 if an error was lost. A code given to sys.exit, and 1 of an exception, stay.

    Python tells nobody the code it exits with, so sys.exit is wrapped while a cluster is connected. (``raise
    SystemExit(3)`` passes by unseen and becomes 1.) Everything that runs at exit runs as usual: the code is changed
    by the last of the process's steps, a C exit handler.
    """

    _current: ClassVar[_ExitCode | None] = None

    def __init__(self) -> None:
        self.lost = False
        self._users = 0
        self.chosen = False
        self._exit, self._hook = sys.exit, sys.excepthook
        sys.exit = self._note_exit  # type: ignore[assignment]
        sys.excepthook = self._note_exception
        atexit.register(self._at_exit)  # before the cluster's own, so that it runs after: errors are lost there too

    @classmethod
    def watched(cls) -> _ExitCode:
        """The process's one; `release` it."""
        if cls._current is None:
            cls._current = cls()
        cls._current._users += 1
        return cls._current

    def release(self) -> None:
        """With the last user everything is as before, unless an error was lost."""
        self._users -= 1
        if self._users or self.lost:
            return
        if sys.exit == self._note_exit and sys.excepthook == self._note_exception:
            sys.exit, sys.excepthook = self._exit, self._hook
            atexit.unregister(self._at_exit)
            _ExitCode._current = None

    def _note_exit(self, status: Any = None, /) -> None:
        if threading.current_thread() is threading.main_thread():
            self.chosen = status not in (None, 0)
        self._exit(status)

    def _note_exception(self, *error: Any) -> None:
        self.chosen = True
        self._hook(*error)

    def _at_exit(self) -> None:
        if self.chosen or not self.lost:
            return
        libc = ctypes.CDLL(None)
        at_exit = getattr(libc, "__cxa_atexit")
        at_exit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(1), None)
