"""Shows the returns of the rounds: a growing chart on a terminal, one line a round elsewhere."""

from __future__ import annotations

import os
import shutil
import sys

BARS = " ▁▂▃▄▅▆▇█"
HEIGHT = 10
COLUMNS = 3  # of one round


class Screen:
    """Prints to standard output. *top* is the largest return that can be reached."""

    def __init__(self, rounds: int, top: int) -> None:
        self.top, self.values, self.notes = top, list[float](), list[str]()
        self.width = 8 + COLUMNS * rounds
        utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
        room = shutil.get_terminal_size()
        self.draws = (
            sys.stdout.isatty() and utf8 and os.environ.get("TERM", "dumb") != "dumb"
            and room.columns > self.width and room.lines > HEIGHT + 6
        )  # fmt: skip
        self._drawn = 0

    def show(self, value: float) -> None:
        """Add the mean return of one more round."""
        self.values.append(value)
        if self.draws:
            self._draw()
        else:
            print(self._last(), flush=True)

    def note(self, text: str) -> None:
        """Show a line below the chart."""
        self.notes.append(text)
        if self.draws:
            self._draw()
        else:
            print(text, flush=True)

    def _last(self) -> str:
        return f"round {len(self.values):2}: mean return {self.values[-1]:5.1f}"

    def _draw(self) -> None:
        lines = []
        for row in reversed(range(HEIGHT)):
            filled = [min(max(value / self.top * HEIGHT - row, 0), 1) for value in self.values]
            label = f"{self.top * (row + 1) // HEIGHT:5}" if row % 3 == 0 else " " * 5
            lines.append(f"{label} ┤" + "".join(BARS[round(part * 8)] * (COLUMNS - 1) + " " for part in filled))
        lines.append(" " * 6 + "└" + "─" * (self.width - 8))
        lines.append(" " * 7 + (self._last() if self.values else ""))
        lines += self.notes
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        print(up + "".join(f"\x1b[2K{line}\n" for line in lines), end="", flush=True)
        self._drawn = len(lines)
