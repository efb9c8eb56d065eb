"""Makes lines of the slices in which a log file is read. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LONGEST_LINE = 1 << 20
"""Most bytes of a line. A longer one is shown in pieces."""


class SlicedLines:
    """The lines of a log file, from its slices in their order.

    Args:
        show: called with each line.
        limit: the number of last lines to show, at `end`; None to show each line at once.
    """

    def __init__(self, show: Callable[[str], object], limit: int | None) -> None:
        self._show = show
        self._last: deque[str] | None = None if limit is None else deque(maxlen=limit)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next slice."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > LONGEST_LINE:
            lines.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        for line in lines:
            last_state = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # of a progress bar
            self._add(last_state)

    def _add(self, line: str) -> None:
        if self._last is None:
            self._show(line)
        else:
            self._last.append(line)

    def end(self, unfinished: bool = True) -> None:
        """Show what is left, from now on without a limit. With *unfinished*, a last line without its end, too."""
        if unfinished and self._rest:
            rest, self._rest = self._rest, b""
            self._add(rest.decode(errors="replace"))
        kept, self._last = self._last or (), None
        for line in kept:
            self._show(line)
