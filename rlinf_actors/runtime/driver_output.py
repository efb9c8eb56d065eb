"""Workers' lines in the driver's terminal, on a thread of its own: a slow terminal stalls nothing else.

Errors that nobody awaits: reported once, and the script's exit code is not 0 because of them.

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
import contextlib
import ctypes
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, TextIO

from rlinf_actors import exhaustion
from rlinf_actors.wire.agent_messages import UPDATE, LogCredit, LogLines
from rlinf_actors.wire.control_codec import Body

log = logging.getLogger(__name__)

END_S = 2.0
"""How long a driver that ends waits for its workers' output; what was not shown by then is counted."""
STUCK_S = 0.5
"""How long it waits beyond that for a terminal that takes nothing."""

WIDTH = 80
"""Columns of a terminal that does not say how many it has."""

Source = tuple[str, str]
"""A worker with its node, and the stream: who wrote a line."""


class LogPrinter:
    """Prints ``[group:rank@node] text``. `show`, `close` and `left_out` may be called from any thread.

    A progress bar, which rewrites its line by carriage returns, keeps one line of a terminal up to date. Where the
    output is no terminal, its last state alone is printed, once the bar ends its line.

    Args:
        shown: called with a LogCredit for what was printed, so that the sender may go on. Printer's thread.

    Attributes:
        left: lines that were left out, by node and where they are.
    """

    def __init__(self, shown: Callable[[Body], None]) -> None:
        self._shown = shown
        self.left: dict[tuple[str, str], int] = {}
        self._queue: queue.SimpleQueue[LogLines | Callable[[], object] | None] = queue.SimpleQueue()
        self._until = float("inf")
        self._printing: LogLines | None = None
        self._bars: dict[Source, str] = {}  # the last state of each, in the order of their changes
        self._open: TextIO | None = None  # the terminal whose last line is a bar's
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="rlinf-actors-logs", daemon=True)
        exhaustion.start(self._thread)

    def show(self, lines: LogLines) -> None:
        """Print soon. Memory is bounded by the credit that the sender has."""
        self.left_out(lines.node, lines.where, lines.left)
        self._queue.put(lines)

    def after(self, callback: Callable[[], object]) -> None:
        """Call *callback* on the printer's thread once all that `show` was given so far is printed."""
        self._queue.put(callback)

    def close(self, patience_s: float = END_S) -> None:
        """Print for *patience_s* seconds what is left, then end. A terminal that takes nothing is given up."""
        self._until = min(self._until, time.monotonic() + patience_s)
        self._queue.put(None)
        self._thread.join(patience_s + STUCK_S)
        # Nothing is left of a thread that ended in order: this is of one in a write that does not end, or that died.
        left = self._printing
        while left is not None:
            self._leave_out(left)
            left = self._next_lines()
        if self._thread.is_alive():
            self._queue.put(None)

    def _next_lines(self) -> LogLines | None:
        """Take what the thread has not come to; None if there is nothing."""
        while not self._queue.empty():
            with contextlib.suppress(queue.Empty):
                lines = self._queue.get_nowait()
                if isinstance(lines, LogLines):
                    return lines
        return None

    def hurry(self) -> None:
        """Print no more: count what is left."""
        self._until = 0.0

    def left_out(self, node: str, where: str, lines: int) -> None:
        """Count lines that are not shown."""
        if lines:
            self.left[node, where] = self.left.get((node, where), 0) + lines

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            if callable(lines):
                lines()
                continue
            self._printing = lines
            if time.monotonic() > self._until:
                self._leave_out(lines)
            else:
                self._print(lines)
            self._printing = None
            self._shown(LogCredit(lines.owner, lines.node, lines.cost))
        self._finish_bars()

    def _leave_out(self, lines: LogLines) -> None:
        self.left_out(lines.node, "", _counted(text for _, _, text in lines.entries) + lines.skipped)

    def _print(self, lines: LogLines) -> None:
        for stream, group in _by_stream(lines):
            if not self._tried(self._write, stream, group):
                self.left_out(lines.node, "", _counted(text for _, text in group))
        if lines.skipped:
            text = f"{lines.skipped} lines are not shown here; the log files have them"
            if not self._tried(self._write, "err", [(f"[{lines.node}] ", text)]):
                self.left_out(lines.node, "", lines.skipped)
        self._tried(self._show_bar)

    def _tried(self, action: Callable[..., None], *args: object) -> bool:
        """Call *action*, which writes; True if it was done. No error ends the thread: the senders wait for credit."""
        try:
            action(*args)
        except (OSError, ValueError):
            return False  # the terminal or pipe is gone, or closed; the files have every line
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("workers' output could not be written to this process's stdout or stderr")
            return False
        return True

    def _write(self, stream: str, group: list[tuple[str, str]]) -> None:
        """Print lines of one stream; *group* has a prefix and a text for each."""
        out = _stream(stream)
        if out is None:
            return  # pythonw, or a script that closed it
        printed = []
        for prefix, text in group:
            source = (prefix, stream)
            self._bars.pop(source, None)
            if text.endswith(UPDATE):
                self._bars[source] = text[:-1]
            else:
                printed.append(f"{prefix}{text}\n")
        if printed:
            self._tried(self._clear)
            _put(out, "".join(printed))

    def _clear(self) -> None:
        """Remove the bar from the terminal's last line."""
        out, self._open = self._open, None
        if out is not None:
            _put(out, "\r\x1b[K")

    def _show_bar(self) -> None:
        """Show the bar that changed last, if it is for a terminal."""
        for (prefix, stream), text in reversed(self._bars.items()):
            out = _stream(stream)
            width = _columns(out) if out is not None else 0
            if out is not None and width:
                if self._open is not out:
                    self._clear()
                # a line that the terminal wraps could not be rewritten
                _put(out, "\r\x1b[K" + _encodable(out, f"{prefix}{text}")[: width - 1])
                self._open = out
                return
        self._clear()

    def _finish_bars(self) -> None:
        """Print the last state of each bar, as a line."""
        self._tried(self._clear)
        for (prefix, stream), text in self._bars.items():
            out = _stream(stream)
            if out is not None:
                self._tried(_put, out, f"{prefix}{text}\n")
        self._bars.clear()


def say(text: str) -> None:
    """Print a line of ours where workers' lines are printed: a logging level must not hide that others are missing."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was closed
            _put(sys.stderr, f"[rlinf-actors] {text}\n")


def _stream(name: str) -> TextIO | None:
    return sys.stderr if name == "err" else sys.stdout


def _put(out: TextIO, text: str) -> None:
    """Write and flush *text*, with escapes for the characters that *out* cannot encode."""
    try:
        out.write(text)
    except UnicodeEncodeError:
        out.write(_encodable(out, text))
    out.flush()


def _encodable(out: TextIO, text: str) -> str:
    """Return *text* with escapes for the characters that *out* cannot encode."""
    encoding = getattr(out, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _columns(out: TextIO) -> int:
    """Return how many columns the terminal *out* has, 0 if it is no terminal."""
    isatty = getattr(out, "isatty", None)  # a script's own stdout may lack all but write and flush
    if isatty is None or not isatty():
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns or WIDTH
    except (AttributeError, OSError, ValueError):
        return WIDTH


def _counted(texts: Iterable[str]) -> int:
    """Return how many of *texts* are lines, and no states of a progress bar."""
    return sum(not text.endswith(UPDATE) for text in texts)


def _by_stream(lines: LogLines) -> list[tuple[str, list[tuple[str, str]]]]:
    """Runs of lines of one stream, in order, with their prefix."""
    runs: list[tuple[str, list[tuple[str, str]]]] = []
    for worker, stream, text in lines.entries:
        if not runs or runs[-1][0] != stream:
            runs.append((stream, []))
        runs[-1][1].append((f"[{worker}@{lines.node}] ", text))
    return runs


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

    def raised(self) -> Exception:
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
