"""Makes lines of the slices in which a log file is read. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

LONGEST_LINE = 1 << 20
"""Most bytes of a line. A longer one is shown in pieces."""

M = TypeVar("M")


class SlicedLines(Generic[M]):
    """The lines of a log file, from its slices in their order.

    Args:
        show: called with each line, and the mark that holds for its last byte; None without one.
        limit: the number of last lines to show, at `end`; None to show each line at once.

    Attributes:
        begin: where the last line that was added begins in the slice; negative if it began before it.
    """

    def __init__(self, show: Callable[[str, M | None], object], limit: int | None) -> None:
        self._show = show
        self._last: deque[tuple[str, M | None]] | None = None if limit is None else deque(maxlen=limit)
        self._rest = b""
        self._mark: M | None = None
        self.begin = 0

    @property
    def rest_size(self) -> int:
        """Number of bytes of the line that has not ended yet."""
        return len(self._rest)

    def feed(self, data: bytes, marks: Sequence[tuple[int, M]] = ()) -> None:
        """Take the next slice. Each of *marks* holds from its position in *data* on, the first for what is before."""
        end = -len(self._rest)
        *lines, self._rest = (self._rest + data).split(b"\n")
        pieces = [(line, 1) for line in lines]
        while len(self._rest) > LONGEST_LINE:
            pieces.append((self._rest[:LONGEST_LINE], 0))
            self._rest = self._rest[LONGEST_LINE:]
        self._mark, number = None, 0
        for line, newline in pieces:
            self.begin = end
            end += len(line) + newline
            while number < len(marks) and marks[number][0] < end:
                self._mark, number = marks[number][1], number + 1
            last_state = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # of a progress bar
            self._add(last_state)
        self._mark = marks[-1][1] if marks else None  # of what is left

    def _add(self, line: str) -> None:
        if self._last is None:
            self._show(line, self._mark)
        else:
            self._last.append((line, self._mark))

    def end(self, unfinished: bool = True) -> None:
        """Show what is left, from now on without a limit. With *unfinished*, a last line without its end, too."""
        if unfinished and self._rest:
            rest, self._rest, self.begin = self._rest, b"", -len(self._rest)
            self._add(rest.decode(errors="replace"))
        kept, self._last = self._last or (), None
        for line, mark in kept:
            self._show(line, mark)
