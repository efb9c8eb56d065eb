"""LogPrinter: print workers' lines in the driver's terminal, on a thread that a slow terminal may block."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from rlinf_actors import exhaustion
from rlinf_actors.wire.agent_messages import UPDATE, LogCredit, LogLines
from rlinf_actors.wire.control_codec import Body

log = logging.getLogger(__name__)

END_S = 2.0
"""How long a driver that ends waits for its workers' output; lines not shown by then are counted."""
STUCK_S = 0.5
"""How much longer it waits for a blocked terminal."""

WIDTH = 80
"""Columns assumed for a terminal of unknown width."""

Source = tuple[str, str]
"""The writer of a line: a worker with its node, and the stream."""


class LogPrinter:
    """Prints ``[group:rank@node] text``. `show`, `close` and `left_out` may be called from any thread.

    A progress bar, which rewrites its line by carriage returns, keeps one line of the terminal up to date. If the
    output is not a terminal, only the bar's last state is printed.

    Args:
        shown: called with a LogCredit for printed lines, so that the sender may go on. Printer's thread.

    Attributes:
        left: number of lines that were not shown, by node and place.
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
        """Print lines soon. The sender's credit bounds the memory."""
        self.left_out(lines.node, lines.where, lines.left)
        self._queue.put(lines)

    def after(self, callback: Callable[[], object]) -> None:
        """Call *callback* on the printer's thread when all lines given to `show` so far are printed."""
        self._queue.put(callback)

    def close(self, patience_s: float = END_S) -> None:
        """Print the remaining lines for *patience_s* seconds, then end; do not wait for a blocked terminal."""
        self._until = min(self._until, time.monotonic() + patience_s)
        self._queue.put(None)
        self._thread.join(patience_s + STUCK_S)
        # a thread that ended in order has left nothing; one that is blocked in a write, or died, has
        left = self._printing
        while left is not None:
            self._leave_out(left)
            left = self._next_lines()
        if self._thread.is_alive():
            self._queue.put(None)

    def _next_lines(self) -> LogLines | None:
        """Return lines that the thread has not taken, None if there are none."""
        while not self._queue.empty():
            with contextlib.suppress(queue.Empty):
                lines = self._queue.get_nowait()
                if isinstance(lines, LogLines):
                    return lines
        return None

    def hurry(self) -> None:
        """Count the remaining lines instead of printing them."""
        self._until = 0.0

    def left_out(self, node: str, where: str, lines: int) -> None:
        """Count lines as not shown."""
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
        """Call *action*, which writes; return False if it failed. No error ends the thread: senders wait for credit."""
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
    """Print a line of the library among workers' lines: a logging level must not hide that lines are missing."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
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
    """Return the width of the terminal *out*, 0 if it is not a terminal."""
    isatty = getattr(out, "isatty", None)  # a script's own stdout may lack all but write and flush
    if isatty is None or not isatty():
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns or WIDTH
    except (AttributeError, OSError, ValueError):
        return WIDTH


def _counted(texts: Iterable[str]) -> int:
    """Return the number of lines in *texts*, without states of progress bars."""
    return sum(not text.endswith(UPDATE) for text in texts)


def _by_stream(lines: LogLines) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return runs of lines of one stream, in order, with their prefix."""
    runs: list[tuple[str, list[tuple[str, str]]]] = []
    for worker, stream, text in lines.entries:
        if not runs or runs[-1][0] != stream:
            runs.append((stream, []))
        runs[-1][1].append((f"[{worker}@{lines.node}] ", text))
    return runs
