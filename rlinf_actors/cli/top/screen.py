"""The terminal of `rlinf-actors top`: draws by rich, reads keys, and gives the terminal back however it ends.

Everything runs in the event loop of the main thread. A signal, a key, a new sample or a new size of the terminal is an
event of that loop; nothing is drawn in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from typing import Any

from msgspec.structs import replace
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from rlinf_actors.cli.output import drawn_table, plain
from rlinf_actors.cli.top.view import HELP, VIEWS, Choice, headline, keys, pressed, table
from rlinf_actors.model.readable import duration
from rlinf_actors.net.loop import Tasks
from rlinf_actors.sampling.sample import Board
from rlinf_actors.sampling.sampler import Sampler

AROUND = 5
"""Lines of the screen that are no rows: two at the top, the headings, and two at the bottom."""


class Screen:
    """Shows the Board of *sampler* until a person quits. Loop of the main thread."""

    def __init__(self, sampler: Sampler, choice: Choice) -> None:
        self._sampler = sampler
        self._choice = choice
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._before: list[Any] = []  # the terminal's attributes
        self._end = asyncio.Event()

    async def run(self) -> None:
        """Draw and read keys until q, Ctrl-C, a signal or the end of the terminal."""
        loop, tasks = asyncio.get_running_loop(), Tasks()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end.set)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._sampler.on_sample = self._draw
        self._take()
        try:
            loop.add_reader(sys.stdin.fileno(), self._read)
            rounds = tasks.start(self._sampler.run(), "asking the head", expected=Exception)
            ending = tasks.start(self._end.wait(), "waiting for q")
            await asyncio.wait({rounds, ending}, return_when=asyncio.FIRST_COMPLETED)
            if rounds.done():
                rounds.result()
        finally:
            self._give_back()
            loop.remove_reader(sys.stdin.fileno())
            await tasks.close()

    def _take(self) -> None:
        """Take the terminal: its other screen, no cursor, and each key at once."""
        self._before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno())
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._live.start()
        self._draw()

    def _give_back(self) -> None:
        """Give the terminal back as it was."""
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def _suspend(self) -> None:
        """Give the terminal back and stop, as Ctrl-Z asks. Take it again when the shell continues this process."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _read(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), 4096)
        except OSError:  # EIO: the terminal is gone
            data = b""
        if not data:
            self._end.set()
        for key in keys(data.decode(errors="ignore")):
            found = pressed(self._choice, key)
            if found is None:
                self._end.set()
                return
            self._choice = found
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        size = os.get_terminal_size(sys.stdout.fileno())
        self._console.size = ConsoleDimensions(size.columns or 80, size.lines or 24)
        shown, first = drawn(self._sampler.board, self._choice, self._console.width, self._console.height)
        self._choice = replace(self._choice, first=first)
        self._live.update(shown, refresh=True)


def drawn(board: Board, choice: Choice, width: int, height: int) -> tuple[Group, int]:
    """Return what a screen of *width* columns and *height* lines shows, and the index of its first row."""
    found = table(board, choice).narrowed(width)
    room = max(1, height - AROUND)
    first = min(choice.first, max(0, len(found.rows) - room))
    rows = [[plain(cell) for cell in row] for row in found.rows[first : first + room]]
    more = len(found.rows) - first - len(rows)
    middle = drawn_table(found.headings, rows, cut=True) if rows else _line(found.empty)
    where = f"rows {first + 1} to {first + len(rows)} of {len(found.rows)}; arrows scroll" if first or more else ""
    return Group(_headline(board), _chosen(choice), middle, _line(where, "dim"), _help(choice)), first


def _headline(board: Board) -> Text:
    if board.sample.fault:
        age = duration(time.time() - board.last_at)
        return _line(f"no answer for {age}: {board.sample.fault}", "bold red")
    at = time.strftime("%H:%M:%S", time.localtime(board.sample.at))
    return _line(f"{at}  {headline(board)}")


def _chosen(choice: Choice) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for view in VIEWS:
        line.append(f" {view} ", "reverse" if view == choice.view else "")
    line.append(f"  by {choice.order}")
    if choice.typing or choice.query:
        line.append(f"  / {plain(choice.query)}{'_' if choice.typing else ''}", "bold")
    return line


def _help(choice: Choice) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for key, what in (("Enter", "keep"), ("Esc", "no filter")) if choice.typing else HELP:
        line.append(key, "bold").append(f" {what}   ", "dim")
    return line


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style, no_wrap=True, overflow="ellipsis")
