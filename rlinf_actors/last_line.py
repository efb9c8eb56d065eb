"""The last line on stderr, which shows a wait: rewritten in a terminal and in a notebook, printed elsewhere.

`runtime.progress` decides what it says and when. Whatever else prints there clears it first.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from typing import Any

from rlinf_actors.settings import takes_sequences
from rlinf_actors.shown import printable

COLUMNS = 80
"""Columns assumed for a notebook, and for a terminal of unknown width."""
_NOTEBOOK = "ipykernel.iostream"
"""The module of a notebook's stderr. Its fileno() is the terminal of the server, which nobody reads."""


class LastLine:
    """The last line on stderr, as far as this process shows a wait there. Any thread.

    A terminal that takes no output (Ctrl-S) holds nobody up: the line is left out then.

    Attributes:
        shown: number of characters that the line has now, 0 if there is none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shown = 0
        self._waits: list[object] = []

    def begin(self, wait: object) -> None:
        """Give the line to *wait*. The waits before get the line back at its end."""
        with self._lock:
            self._waits.append(wait)

    def end(self, wait: object) -> None:
        """Take the line from *wait*, and remove what it shows."""
        with self._lock:
            if self._waits[-1] is wait:
                self._clear()
            self._waits.remove(wait)

    @property
    def is_rewritten(self) -> bool:
        """True if `show` replaces the line before, in a terminal or notebook. Elsewhere it prints a further line."""
        return _is_terminal() or _is_notebook()

    def show(self, wait: object, text: str, prefix: str) -> None:
        """Show *text* about *wait* in place of the line before, unless another wait has begun since.

        Where no line can be replaced, print it with *prefix*.
        """
        with self._lock:
            if self._waits[-1] is not wait:
                return
            if _is_terminal():
                line = printable(text, _columns() - 1)  # a line that the terminal wraps could not be rewritten
                _write(f"{self._erased()}{line}")
                self.shown = len(line)
            elif _is_notebook():  # which knows no sequence that clears a line
                line = printable(text, COLUMNS * 2)
                _write(f"\r{line.ljust(self.shown)}")
                self.shown = len(line)
            else:
                _write(f"{prefix}{printable(text)}\n")

    def clear(self) -> None:
        """Remove the line that `show` has left in a terminal or notebook."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self.shown:
            _write(self._erased())
            self.shown = 0

    def _erased(self) -> str:
        """Return what clears the line that is shown now, and goes back to its begin."""
        if takes_sequences(sys.stderr):
            return "\r\x1b[2K"
        return f"\r{' ' * self.shown}\r" if self.shown else "\r"


last_line = LastLine()


def _is_terminal() -> bool:
    isatty: Any = getattr(sys.stderr, "isatty", None)  # a script's own stderr may lack all but write
    return isatty is not None and isatty() and os.environ.get("TERM") != "dumb"


def _is_notebook() -> bool:
    return type(sys.stderr).__module__ == _NOTEBOOK


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS


def _write(text: str) -> None:
    out = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        if not (isinstance(out, io.TextIOWrapper) and isinstance(out.buffer, io.BufferedWriter)):
            if out is not None:
                out.write(text)
                out.flush()
            return
        out.flush()
        fd = out.fileno()
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, text.encode(out.encoding or "ascii", "backslashreplace"))
