"""A line on stderr about a wait of more than 2 s: how far it is, and after 30 s what is missing.

`Lines` decides when a line is due and what it says, and is pure, as are the functions that make Facts. `showing` is the
shell: a task beside the wait. In a terminal the line is rewritten each second, and removed at the end. Elsewhere a line
is printed after 30 s, and then after twice as long each. RLINF_ACTORS_PROGRESS=0 switches all off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.model.readable import duration
from rlinf_actors.net.loop import Tasks
from rlinf_actors.settings import Settings
from rlinf_actors.shown import printable
from rlinf_actors.wire.stack_values import WorkerStacks
from rlinf_actors.wire.values import NodeState

FIRST_S = 2.0
"""Seconds after which a terminal shows a wait."""
EVERY_S = 1.0
"""Seconds between two lines in a terminal."""
MISSING_S = 30.0
"""Seconds after which a line says what is missing, and after which the first line is printed elsewhere."""
OURS = "rlinf_actors/worker/main.py"
"""The file whose last frame in a stack calls code of the user."""
MOST_NAMED = 4
"""Most nodes or workers that a line names."""


class Facts(NamedTuple):
    """How far a wait is, such as "2 of 3 nodes", and what is missing, "" if that was not asked for."""

    how_far: str
    missing: str = ""


Look = Callable[[bool], Awaitable["Facts | None"]]
"""Returns the Facts of a wait, None if there is nothing to show now. It is called with True if `missing` is wanted."""


class Lines:
    """Decides when a line about a wait is due. All times are seconds since the wait began.

    Attributes:
        next_s: when the next line is due.
    """

    def __init__(self, on_terminal: bool) -> None:
        self._on_terminal = on_terminal
        self.next_s = FIRST_S if on_terminal else MISSING_S

    def line(self, facts: Facts, waited_s: float) -> str:
        """Return the line that is due at *waited_s*, and choose when the next one is."""
        self.next_s = waited_s + EVERY_S if self._on_terminal else 2 * waited_s
        missing = f"; {facts.missing}" if facts.missing and waited_s >= MISSING_S else ""
        return f"{facts.how_far}, {duration(waited_s)}{missing}"


def nodes_facts(nodes: Sequence[NodeState], wanted: int) -> Facts:
    """Return how many of *wanted* nodes are ready, and which are not."""
    here = [node.report.hostname for node in nodes if node.state == "ready"]
    names = f" ({', '.join(here[:MOST_NAMED])}{', …' if len(here) > MOST_NAMED else ''})" if here else ""
    late = [
        f"{f'rank {node.rank} ' if node.rank >= 0 else ''}({node.report.hostname}) is {node.state}, last seen "
        f"{duration(node.last_seen_s)} ago"
        for node in nodes
        if node.state != "ready"
    ]
    known = {node.rank for node in nodes}
    unseen = [f"rank {rank}, never seen" for rank in range(wanted) if rank not in known]
    left = max(0, wanted - len(here) - len(late))
    return Facts(f"waiting for nodes: {len(here)} of {wanted}{names}", named("missing ", [*late, *unseen[:left]]))


def doing(stacks: WorkerStacks) -> str:
    """Return what a worker does that is not constructed yet: what it imports, waits for, or which line it runs."""
    if stacks.fault:
        return f"does not answer: {stacks.fault}"
    whole = stacks.stacks[0].frames if stacks.stacks else []  # of the main thread
    ours = max((at for at, frame in enumerate(whole) if frame.file.endswith(OURS)), default=-1)
    frames = whole[ours + 1 :]
    modules = [frame.file for frame in frames if frame.function == "<module>"]
    if modules:
        packages = [path.rpartition("-packages/")[2] for path in modules if "-packages/" in path]
        return f"imports {(packages or [os.path.basename(modules[-1])])[0].partition('/')[0].removesuffix('.py')}"
    if stacks.waits:
        return f"waits in {stacks.waits[0].what}"
    if not frames:
        return "starts"
    return f"is in {frames[-1].function}(), {os.path.basename(frames[-1].file)}:{frames[-1].line}"


def named(lead: str, texts: Sequence[str]) -> str:
    """Return *lead* with the first of *texts*, and how many more there are; "" for none."""
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return f"{lead}{', '.join(texts[:MOST_NAMED])}{more}" if texts else ""


class LastLine:
    """The last line of the terminal on stderr, as far as this process shows a wait there. Any thread.

    A terminal that takes no output (Ctrl-S) holds nobody up: the line is left out then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_shown = False

    @property
    def on_terminal(self) -> bool:
        return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str, prefix: str) -> None:
        """Show *text* in place of the last line, or print it with *prefix* where there is no terminal."""
        with self._lock:
            if not self.on_terminal:
                _write(f"{prefix}{printable(text)}\n")
                return
            columns = _columns()
            self._is_shown = True
            _write(f"\r\x1b[2K{printable(text, columns - 1)}")  # a line that the terminal wraps could not be rewritten

    def clear(self) -> None:
        """Remove the line that `show` has left in a terminal."""
        with self._lock:
            if self._is_shown:
                self._is_shown = False
                _write("\r\x1b[2K")


last_line = LastLine()


@contextlib.asynccontextmanager
async def showing(look: Look, prefix: str = "[rlinf-actors] ") -> AsyncIterator[None]:
    """Show a wait on stderr during an ``async with`` block. *prefix* goes before lines outside of terminals."""
    tasks = Tasks()
    if Settings.load().progress:
        tasks.start(show(look, prefix), "showing what is waited for")
    try:
        yield
    finally:
        await tasks.close()


async def show(look: Look, prefix: str = "[rlinf-actors] ") -> None:
    """Show a wait that begins now on stderr until this task is cancelled."""
    loop = asyncio.get_running_loop()
    began, lines, facts = loop.time(), Lines(last_line.on_terminal), None
    try:
        while True:
            await asyncio.sleep(max(0.0, began + lines.next_s - loop.time()))
            waited_s = loop.time() - began
            try:
                facts = await look(waited_s >= MISSING_S)
            except RlinfActorsError as error:
                facts = Facts(facts.how_far if facts is not None else "waiting", str(error))
            line = lines.line(facts or Facts(""), waited_s)
            if facts is not None:
                last_line.show(line, prefix)
            else:
                last_line.clear()
    finally:
        last_line.clear()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.flush()
        fd = sys.stderr.fileno()
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, text.encode(sys.stderr.encoding or "ascii", "backslashreplace"))
