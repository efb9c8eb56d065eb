"""Shows the returns of the rounds: a growing chart on a terminal, one line a round elsewhere."""

from __future__ import annotations

import os
import shutil
import sys

BARS = " ▁▂▃▄▅▆▇█"
HEIGHT = 10
COLUMNS = 3  # of one round
LEFT = 7  # columns before the first round
MARK = "†"


class Screen:
    """Prints to standard output. *top* is the largest return that can be reached."""

    def __init__(self, rounds: int, top: int) -> None:
        self.rounds, self.top, self.values = rounds, top, list[float]()
        self.notes, self.marked = list[str](), set[int]()
        width = LEFT + COLUMNS * rounds
        utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
        room = shutil.get_terminal_size()
        self.draws = (
            sys.stdout.isatty() and utf8 and os.environ.get("TERM", "dumb") != "dumb"
            and room.columns > width and room.lines > HEIGHT + 7
        )  # fmt: skip
        self._drawn = 0

    def show(self, value: float) -> None:
        """Add the mean return of one more round."""
        self.values.append(value)
        if self.draws:
            self._draw()
        else:
            print(self._last(), flush=True)

    def note(self, text: str, mark: bool = False) -> None:
        """Show a line below the chart. With *mark* it is a footnote to the round that is not shown yet."""
        self.notes.append(f"{MARK} {text}" if mark else text)
        if mark:
            self.marked.add(len(self.values))
        if self.draws:
            self._draw()
        else:
            print(text, flush=True)

    def _last(self) -> str:
        return f"round {len(self.values):2}: mean return {self.values[-1]:5.1f}"

    def _draw(self) -> None:
        heights = [value / self.top * HEIGHT for value in self.values]  # in rows, from the middle of the axis
        lines = []
        for row in range(HEIGHT, 0, -1):
            label = f"{self.top * row // HEIGHT:5} ┤" if row % 2 == 0 else " " * (LEFT - 1) + "│"
            eighths = [round(8 * min(max(height - row + 0.5, 0), 1)) for height in heights]
            lines.append(label + "".join(BARS[part] * (COLUMNS - 1) + " " for part in eighths))
        feet = ["▀" if height >= 0.25 else "─" for height in heights] + ["─"] * (self.rounds - len(heights))
        lines.append(f"{0:5} ┼" + "".join(foot * (COLUMNS - 1) + "─" for foot in feet))
        marks = [MARK if at in self.marked else " " for at in range(self.rounds)]
        lines.append("round".ljust(LEFT) + "".join(f"{at + 1:2}{mark}"[:COLUMNS] for at, mark in enumerate(marks)))
        lines.append(" " * LEFT + (self._last() if self.values else ""))
        lines += self.notes
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        print(up + "".join(f"\x1b[2K{line}\n" for line in lines), end="", flush=True)
        self._drawn = len(lines)
