"""LostErrors: report errors of calls that no code waits for, once, and make the script's exit code non-zero.

A failed call, stream or launch registers itself here when its error arrives, on the loop thread. If code is waiting for
the operation, that code gets the error as an exception and nothing is reported. Otherwise the caller has `GRACE_S` to
start waiting. After that the error is reported, even while the driver blocks elsewhere: to the exception handler of the
event loop in which the call was made, as asyncio does for tasks, or to the log if there was no loop. Code that waits
later still gets the exception, and the error is not reported again. The exit code depends on the errors that no code
had taken by the end of the process.
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
from types import TracebackType
from typing import Any, ClassVar, Protocol

from rlinf_actors.net.loop import call_soon
from rlinf_actors.plurals import counted
from rlinf_actors.shown import printable

log = logging.getLogger(__name__)

GRACE_S = 0.3
"""Seconds before an error that no code waits for is reported: enough for a caller whose next statement waits."""
LOOP_PATIENCE_S = 0.5
"""Seconds that an event loop may take to run its exception handler; after that the error goes to the log."""

REMEMBERED = 64
"""Number of reported error objects that are remembered, because several calls may fail with the same object."""

FAILURE_CHARS = 500
"""Largest length of the text that says how a script failed."""

Later = Callable[[float, Callable[[], object]], object]
"""Runs a function after a number of seconds, on a thread of the runtime."""


class FailedOperation(Protocol):
    """A failed call, stream or launch, as LostErrors needs it to report the error."""

    @property
    def cause(self) -> Exception | None:
        """The error object, if other operations may have failed with the same object; else None.

        LostErrors reports an error object once, however many operations it ended.
        """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which the operation was started, None if it was started outside a loop."""

    @property
    def shared(self) -> bool:
        """True for a launch: if a call on the group has raised the launch's error, the error is not reported."""

    def describe(self) -> str:
        """Return the text of the error for the log. Called on any thread, so it must not unpickle (run user code)."""

    def raised(self) -> BaseException:
        """Return the exception that waiting for the operation raises. Called on the thread of `loop` only."""


class _Open:
    """A failed operation whose error no caller has got.

    `held` keeps the operation alive until its error is reported; after that only the weak reference `ref` is kept.
    """

    __slots__ = ("held", "ref", "reported")

    def __init__(self, failed: FailedOperation, held: bool) -> None:
        self.ref = weakref.ref(failed)
        self.held = failed if held else None
        self.reported = False


class LostErrors:
    """Reports the errors of failed calls, streams and launches that no caller gets as an exception. Any thread.

    Each driver or worker process has one.

    Args:
        change_exit_code: True to make the script's exit code 1 instead of 0 if no caller got some error by the end.
        later: calls a function after a number of seconds, on a thread of the runtime.
        end_driver: called after an error was reported before the process ends, to end the driver; None to let the
            driver go on. Errors are then logged at once, not given to an event loop's exception handler.

    Attributes:
        count: number of reported errors.
        failure: how the script failed (`failure_of`), known after `script_raised` or `close`; "" if it did not.
    """

    def __init__(self, change_exit_code: bool, later: Later, end_driver: Callable[[], object] | None = None) -> None:
        self._open: dict[int, _Open] = {}
        self._reported: collections.deque[Exception] = collections.deque(maxlen=REMEMBERED)
        # by id of `cause`
        self._shared: weakref.WeakValueDictionary[int, FailedOperation] = weakref.WeakValueDictionary()
        self._handed: set[Callable[[], object]] = set()
        self._later = later
        self._end_driver = end_driver
        self._exit_code = _ExitCode.watched() if change_exit_code else None
        self.failure = ""
        self.count = 0

    def script_raised(self, error: BaseException | None) -> None:
        """Note the exception, if any, with which the script leaves its cluster."""
        if error is not None:
            self.failure = self.failure or failure_of(error)

    @property
    def farewell(self) -> str:
        """Why the driver leaves, for the head's event log: an operator does not see the script's terminal."""
        if self.failure or not self.count:
            return self.failure or "the process ends"
        calls = counted(self.count, "failed call", "was|were")
        return f"the process ends; {calls} never awaited"

    def failed(self, failed: FailedOperation, *, awaited: bool) -> None:
        """Register a failed operation. If *awaited* is False, its error is reported after GRACE_S.

        It is not reported if `seen` is called before.

        Args:
            failed: the failed operation; `seen` and `collected` are called with the same object.
            awaited: True if code is waiting for the operation and gets the error as an exception.
        """
        record = self._open[id(failed)] = _Open(failed, held=not awaited)
        if failed.shared:
            self._shared[id(failed.cause)] = failed
        if awaited:
            self._known(failed)
        else:
            self._later(GRACE_S, lambda: self._overdue(record))

    def seen(self, failed: FailedOperation) -> None:
        """Record that a caller got the error of *failed*, so that the error is not reported."""
        record = self._open.pop(id(failed), None)
        if record is not None:
            record.held = None  # else the timer keeps it, with its error, the caller's frames and their locals
        self._known(failed)

    def _known(self, failed: FailedOperation) -> None:
        """If a launch has failed with the same error object as *failed*, do not report the launch's error any more."""
        sharing = self._shared.pop(id(failed.cause), None)
        if sharing is not None:
            self._open.pop(id(sharing), None)

    def collected(self, failed: FailedOperation) -> None:
        """If no caller has got the error of *failed*, count it as lost: report it, and change the script's exit code.

        Called by the destructor of the operation, because no caller can get the error any more.
        """
        record = self._open.pop(id(failed), None)
        if record is not None:
            self._lost(failed, record)

    def expected(self, error: Exception) -> None:
        """Do not report operations that fail with the object *error*, which was made to end them. Any thread."""
        self._reported.append(error)

    def close(self) -> None:
        """Report every error that no caller has got. Log every error that waits for an event loop's exception handler.

        Called when the process begins to disconnect from the cluster, and again after it has disconnected.
        """
        self._end_driver = None  # it ends
        for take in list(self._handed):
            take()
        for key, record in list(self._open.items()):
            failed = record.held or record.ref()
            if failed is not None and self._open.pop(key, None) is record:
                self._lost(failed, record)
        exit_code, self._exit_code = self._exit_code, None
        if exit_code is not None:
            self.failure = self.failure or exit_code.failure
            exit_code.release()

    def _overdue(self, record: _Open) -> None:
        failed, record.held = record.held, None  # from here on its destructor reports the loss
        if failed is not None and self._open.get(id(failed)) is record:
            record.reported = True
            self._report(failed)

    def _lost(self, failed: FailedOperation, record: _Open) -> None:
        if self._exit_code is not None:
            self._exit_code.lost = True
        if not record.reported:
            self._report(failed)

    def _report(self, failed: FailedOperation) -> None:
        cause = failed.cause
        if cause is not None:
            if any(cause is known for known in self._reported):
                return  # every call to a dead worker has the same error
            self._reported.append(cause)
        self.count += 1
        text, loop = failed.describe(), failed.loop
        end_driver, self._end_driver = self._end_driver, None
        if end_driver is not None:
            _log(f"{text}\n{_ENDS}")
            end_driver()
            return
        if loop is None or not loop.is_running():
            _log(text)
            return
        self._hand_over(failed, text, loop)

    def _hand_over(self, failed: FailedOperation, text: str, loop: asyncio.AbstractEventLoop) -> None:
        """Report *failed* to the exception handler of *loop*.

        If *loop* does not run the handler within LOOP_PATIENCE_S, write *text* to the log instead.
        """
        turn = threading.Lock()  # the first to acquire it reports

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
            call_soon(loop, handle)
        except RuntimeError:
            if not loop.is_closed():
                raise
            take()
        else:
            self._later(LOOP_PATIENCE_S, take)


_TEXT = "A call failed and nobody awaits it (wait() or await its result to handle the error)"

_ENDS = (
    "This driver ends because of that error, since its other calls may wait for the failed one without end. A script "
    "that handles such errors itself sets RLINF_ACTORS_LOST_ERRORS=exit-code, and goes on."
)


def failure_of(error: BaseException) -> str:
    """Return how a script fails that ends by *error*, in one line; "" if it does not fail."""
    if isinstance(error, KeyboardInterrupt):
        return "its script was interrupted (Ctrl-C)"
    if isinstance(error, asyncio.CancelledError):
        return "its script was cancelled (Ctrl-C, or cancel() of its task)"
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return ""
        how = f"code {error.code}" if isinstance(error.code, int) else repr(error.code)
        return printable(f"its script exited with {how}", FAILURE_CHARS)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - of the user's class
        text = ""
    said = next((line for line in text.splitlines() if line.strip()), "")
    return printable(f"its script failed: {type(error).__name__}{': ' * bool(said)}{said}", FAILURE_CHARS)


def _log(text: str) -> None:
    log.error("%s: %s", _TEXT, text)


class _ExitCode:
    """Makes the script's exit code 1 instead of 0 if no caller got some error. Other exit codes stay as they are.

    While a cluster is connected, sys.exit and sys.excepthook are replaced, because Python does not tell which exit code
    the script has chosen. (``raise SystemExit(3)`` is not noticed and becomes 1.) All exit handlers run as usual; a C
    exit handler, the last step of the process, sets the code.
    """

    _current: ClassVar[_ExitCode | None] = None

    def __init__(self) -> None:
        self.lost = False
        self._users = 0
        self.chosen = False
        self.failure = ""
        self._exit, self._hook = sys.exit, sys.excepthook
        sys.exit = self._note_exit  # type: ignore[assignment]
        sys.excepthook = self._note_exception
        atexit.register(self._at_exit)  # before the cluster's own, so that it runs after: errors are lost there too

    @classmethod
    def watched(cls) -> _ExitCode:
        """Return the only _ExitCode of this process, made on first use. The caller must `release` it later."""
        if cls._current is None:
            cls._current = cls()
        cls._current._users += 1
        return cls._current

    def release(self) -> None:
        """End one use of this object. The end of the last use restores sys.exit and sys.excepthook.

        They are not restored if an error was lost, because the exit code must still be changed.
        """
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
            self.failure = failure_of(SystemExit(status))
        self._exit(status)

    def _note_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.chosen = True
        self.failure = failure_of(error)
        self._hook(kind, error, trace)

    def _at_exit(self) -> None:
        if self.chosen or not self.lost:
            return
        libc = ctypes.CDLL(None)
        at_exit = getattr(libc, "__cxa_atexit")
        at_exit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(1), None)
