"""LogPrinter: prints the output of workers in the driver's terminal.

The loop thread queues the lines. A thread of the printer writes those that log_view.LogView chooses, because a slow
terminal blocks.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from rlinf_actors import exhaustion, shown
from rlinf_actors.last_line import last_line
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.log_view import Line, LogView
from rlinf_actors.wire.agent_messages import UPDATE, LogCredit, LogLines
from rlinf_actors.wire.control_codec import Body

log = logging.getLogger(__name__)

END_S = 2.0
"""Seconds that an ending driver waits for its workers' output. Later lines are counted and not printed."""
STUCK_S = 0.5
"""Additional seconds that an ending driver waits for a write that blocks."""

WIDTH = 80
"""Columns assumed for a terminal of unknown width."""

Source = tuple[str, str]
"""A prefix such as "[group:rank@node] ", and "out" or "err" for the worker's stdout or stderr."""


class LogPrinter:
    """Prints the output of a job's workers in the driver, as ``[group:rank@node] text`` on stdout and stderr.

    The output of a worker's progress bar, which rewrites its line by carriage returns, is shown on the last line of the
    terminal. If the driver's output is not a terminal, only the last state of the bar is printed.

    Control characters are shown as escapes, except tabs and the sequences of colours: a worker must not write to the
    terminal of its driver what hides or forges lines.

    Args:
        credit: called on the printer's thread after lines were printed, or wait for equal ones, with a LogCredit to
            send to the head: the agentd that sent the lines may then send more.
        raw: True to print workers' lines as they are.
        view: decides which lines are printed, and when; None to print all at once.

    Attributes:
        left: number of lines that were not printed. The key is the node and the path of its log files ("" if unknown).
    """

    def __init__(self, credit: Callable[[Body], None], raw: bool = False, view: LogView | None = None) -> None:
        self._credit = credit
        self._view = view or LogView(0.0, False, str)
        self._safe: Callable[[str], str] = str if raw else shown.output
        self.left: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[LogLines | Callable[[], object] | None] = queue.SimpleQueue()
        self._until = float("inf")
        self._printing: LogLines | None = None
        self._writing: list[Line] = []  # those that the view has given
        self._bars: dict[Source, str] = {}  # the last state of each, in the order of their changes
        self._open: TextIO | None = None  # the terminal whose last line is a bar's
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="rlinf-actors-logs", daemon=True)
        exhaustion.start(self._thread)

    def show(self, lines: LogLines) -> None:
        """Queue *lines*, which an agentd has sent, for printing. Any thread.

        The queue stays short, because an agentd sends more lines only after it got a LogCredit for printed ones.
        """
        self.left_out(lines.node, lines.where, lines.left)
        self._queue.put(lines)

    def after(self, callback: Callable[[], object]) -> None:
        """Call *callback* on the printer's thread after all lines that were given to `show` so far are printed."""
        self._queue.put(callback)

    def close(self, patience_s: float = END_S) -> None:
        """Print queued lines for at most *patience_s* seconds, count the rest in `left`, and end the thread."""
        self._until = min(self._until, time.monotonic() + patience_s)
        self._queue.put(None)
        self._thread.join(patience_s + STUCK_S)
        if self._printing is not None or self._writing:  # the thread is blocked in a write, or died
            self._leave_out([*self._writing, *self._view.rest(0.0)])
            if self._printing is not None:
                self._leave_out_unread(self._printing)
            with contextlib.suppress(queue.Empty):
                while True:
                    left = self._queue.get_nowait()
                    if isinstance(left, LogLines):
                        self._leave_out_unread(left)
        if self._thread.is_alive():
            self._queue.put(None)

    def hurry(self) -> None:
        """Print no more lines, because the driver ends: lines that are still queued are only counted, in `left`."""
        self._until = 0.0

    def left_out(self, node: str, where: str, lines: int) -> None:
        """Count that *lines* lines of *node* are not printed. *where* is the path of its log files, "" if unknown."""
        if lines:
            with self._lock:  # of the loop thread and the printer's
                self.left[node, where] = self.left.get((node, where), 0) + lines

    def _run(self) -> None:
        while (lines := self._next()) is not None:
            if callable(lines):
                self._print(self._view.rest(time.monotonic()))
                lines()
                continue
            self._printing = lines
            now = time.monotonic()
            if now > self._until:
                self._leave_out_unread(lines)
            else:
                self._view.add(lines.node, lines.entries, now)
                self._printing = None
                due = self._view.due(now)
                if lines.skipped:
                    text = f"{counted(lines.skipped, 'line', 'is|are')} not shown here; the log files have all"
                    due.append(Line("err", text, lines.node, count=lines.skipped, node=lines.node))
                self._print(due)
            self._printing = None
            self._credit(LogCredit(lines.owner, lines.node, lines.cost))
        self._print(self._view.rest(time.monotonic()))
        self._finish_bars()

    def _next(self) -> LogLines | Callable[[], object] | None:
        """Return the next entry of the queue. Until it comes, print lines that have waited for equal ones."""
        while True:
            next_at = self._view.next_at
            try:
                return self._queue.get(timeout=None if next_at is None else max(0.0, next_at - time.monotonic()))
            except queue.Empty:
                self._print(self._view.due(time.monotonic()))

    def _leave_out_unread(self, lines: LogLines) -> None:
        self.left_out(lines.node, "", _counted(text for _, _, text in lines.entries) + lines.skipped)

    def _leave_out(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if not line.text.endswith(UPDATE):
                self.left_out(next(iter(line.members.values()), line.node), "", line.count)

    def _print(self, lines: list[Line]) -> None:
        if time.monotonic() > self._until:
            self._leave_out(lines)
            return
        self._writing = lines
        for stream, group in itertools.groupby(lines, key=lambda line: line.stream):
            part = list(group)
            if not self._tried(self._write, stream, part):
                self._leave_out(part)
        self._tried(self._show_bar)
        self._writing = []

    def _tried(self, action: Callable[..., None], *args: object) -> bool:
        """Call *action*, which writes to stdout or stderr. Return False if it raised; no exception leaves this method.

        An exception would end the printer's thread, and the agentds would wait for a LogCredit without end.
        """
        try:
            action(*args)
        except (OSError, ValueError):
            return False  # the terminal or pipe is closed; the files have every line
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("workers' output could not be written to this process's stdout or stderr")
            return False
        return True

    def _write(self, stream: str, lines: list[Line]) -> None:
        out = _stream(stream)
        if out is None:
            return  # pythonw, or a script that closed it
        printed = []
        for line in lines:
            if self._bars:
                for worker, node in line.members.items():
                    self._bars.pop((_prefix(f"{worker}@{node}"), stream), None)
            prefix = _prefix(line.who)
            if line.text.endswith(UPDATE):
                self._bars[prefix, stream] = shown.bar(line.text[:-1])
            else:
                printed.append(f"{prefix}{self._safe(line.text)}\n")
        if printed:
            last_line.clear()
            self._tried(self._clear)
            _put(out, "".join(printed))

    def _clear(self) -> None:
        """If the last line of the terminal shows a progress bar, clear the line."""
        out, self._open = self._open, None
        if out is not None:
            _put(out, "\r\x1b[K")

    def _show_bar(self) -> None:
        """Show the progress bar that changed last on the last line of the terminal, or no bar if all have ended."""
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
        """Print the last state of each progress bar as a line of its own, because the printer ends."""
        self._tried(self._clear)
        for (prefix, stream), text in self._bars.items():
            out = _stream(stream)
            if out is not None:
                self._tried(_put, out, f"{prefix}{text}\n")
        self._bars.clear()


def say(text: str) -> None:
    """Print *text* to stderr with the library's name before it. Logging is not used: its level might hide *text*."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            _put(sys.stderr, f"[rlinf-actors] {shown.lines(text)}\n")


def _prefix(who: str) -> str:
    return f"[{shown.printable(who)}] "


def _stream(name: str) -> TextIO | None:
    return sys.stderr if name == "err" else sys.stdout


def _put(out: TextIO, text: str) -> None:
    """Write *text* to *out* and flush; escape characters that *out* cannot encode.

    A file of the operating system is written without Python's buffer. A write to a pipe that is not read would hold the
    lock of the buffer, and the interpreter flushes stdout before it calls exit handlers, so the driver would not end.
    """
    if isinstance(out, io.TextIOWrapper) and isinstance(out.buffer, io.BufferedWriter):
        out.flush()
        data = memoryview(_encodable(out, text).encode(out.encoding))
        while data:
            data = data[os.write(out.fileno(), data) :]
        return
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
    """Return the width of the terminal *out* in columns, 0 if *out* is not a terminal."""
    isatty = getattr(out, "isatty", None)  # a script's own stdout may lack all but write and flush
    if isatty is None or not isatty():
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns or WIDTH
    except (AttributeError, OSError, ValueError):
        return WIDTH


def _counted(texts: Iterable[str]) -> int:
    """Return how many of *texts* are lines; updates of progress bars do not count."""
    return sum(not text.endswith(UPDATE) for text in texts)
