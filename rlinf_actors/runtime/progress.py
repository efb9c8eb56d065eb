"""A line on stderr about a wait of more than 2 s: how far it is, and after 30 s what is missing.

`Lines` decides when a line is due and what it says, and is pure, as are the functions that make Facts. The shells are
`showing`, a task beside the wait; `showing_blocked`, a thread beside it; and `WaitLine`, for a selector. In a terminal
or notebook the line is rewritten each second, and removed at the end. Elsewhere a line is printed after 30 s, and then
after twice as long each. RLINF_ACTORS_PROGRESS=0 switches all off.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from rlinf_actors import exhaustion
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.last_line import last_line
from rlinf_actors.model.readable import duration
from rlinf_actors.net.loop import Tasks
from rlinf_actors.settings import Settings
from rlinf_actors.wire.stack_values import WorkerStacks
from rlinf_actors.wire.values import NodeState

FIRST_S = 2.0
"""Seconds after which a terminal or notebook shows a wait."""
EVERY_S = 1.0
"""Seconds between two lines there."""
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

    def __init__(self, is_rewritten: bool) -> None:
        self._is_rewritten = is_rewritten
        self.next_s = FIRST_S if is_rewritten else MISSING_S

    def line(self, facts: Facts, waited_s: float) -> str:
        """Return the line that is due at *waited_s*, and choose when the next one is."""
        self.next_s = waited_s + EVERY_S if self._is_rewritten else 2 * waited_s
        missing = f"; {facts.missing}" if facts.missing and waited_s >= MISSING_S else ""
        return f"{facts.how_far}, {duration(waited_s)}{missing}"


def nodes_facts(nodes: Sequence[NodeState], wanted: int) -> Facts:
    """Return how many of *wanted* nodes are ready, and which are not. The ranks below *wanted* are waited for: a node
    that is away keeps its rank, so a ready node with another rank does not count.
    """
    known = {node.rank for node in nodes}
    free = [rank for rank in range(wanted) if rank not in known]
    new = [node for node in nodes if node.rank < 0 and node.state == "ready"]  # which get the free ranks
    here = [node for node in nodes if 0 <= node.rank < wanted and node.state == "ready"] + new[: len(free)]
    late = [node for node in nodes if node.rank < wanted and node.state != "ready"]
    spare = [node for node in nodes if node.rank >= wanted and node.state == "ready"] + new[len(free) :]
    unseen = [f"rank {rank} was never seen" for rank in free][: max(0, wanted - len(here) - len(late))]
    missing = named("not ready: ", [*map(seen, late), *unseen], "; ")
    if missing and spare:
        missing += named("; up with other ranks: ", [node.report.hostname for node in spare])
    names = [node.report.hostname for node in here]
    return Facts(f"waiting for nodes: {those_up(names, wanted)}", missing)


def seen(node: NodeState) -> str:
    """Return the state of a node, and when the head has heard from it."""
    rank = f"rank {node.rank} ({node.report.hostname})" if node.rank >= 0 else node.report.hostname
    return f"{rank} is {node.state}, last seen {duration(node.last_seen_s)} ago"


def those_up(names: Sequence[str], wanted: int) -> str:
    """Return how many of *wanted* nodes are up, and the first of their *names*."""
    first = f" ({', '.join(names[:MOST_NAMED])}{', …' if len(names) > MOST_NAMED else ''})" if names else ""
    return f"{len(names)} of {wanted}{first}"


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


def named(lead: str, texts: Sequence[str], between: str = ", ") -> str:
    """Return *lead* with the first of *texts*, and how many more there are; "" for none."""
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return f"{lead}{between.join(texts[:MOST_NAMED])}{more}" if texts else ""


class WaitLine:
    """The line about one wait, for a caller that looks at its clock by itself. A ``with`` block ends it.

    *prefix* goes before lines that cannot be rewritten.
    """

    def __init__(self, prefix: str = "") -> None:
        self._lines = Lines(last_line.is_rewritten)
        self._prefix = prefix
        self._enabled = Settings.load().progress

    def __enter__(self) -> WaitLine:
        last_line.begin(self)
        return self

    def __exit__(self, *_error: object) -> None:
        last_line.end(self)

    @property
    def next_s(self) -> float:
        """Seconds after the begin of the wait at which the next line is due; infinity if the lines are switched off."""
        return self._lines.next_s if self._enabled else math.inf

    def show(self, facts: Facts | None, waited_s: float) -> None:
        """Show the line that is due at *waited_s*; remove it if there is nothing to show now."""
        line = self._lines.line(facts or Facts(""), waited_s)
        if facts is not None:
            last_line.show(self, line, self._prefix)
        else:
            last_line.clear()


DRIVERS = "[rlinf-actors] "
"""What goes before the lines of a driver."""


@contextlib.asynccontextmanager
async def showing(look: Look, prefix: str = DRIVERS) -> AsyncIterator[None]:
    """Show a wait on stderr during an ``async with`` block. *prefix* goes before lines that cannot be rewritten."""
    tasks = Tasks()
    if Settings.load().progress:
        tasks.start(show(look, prefix), "showing what is waited for")
    try:
        yield
    finally:
        await tasks.close()


async def show(look: Look, prefix: str = DRIVERS) -> None:
    """Show a wait that begins now on stderr until this task is cancelled."""
    loop = asyncio.get_running_loop()
    began, facts = loop.time(), None
    with WaitLine(prefix) as line:
        while line.next_s < math.inf:
            await asyncio.sleep(max(0.0, began + line.next_s - loop.time()))
            waited_s = loop.time() - began
            try:
                facts = await look(waited_s >= MISSING_S)
            except RlinfActorsError as error:
                facts = Facts(facts.how_far if facts is not None else "waiting", str(error))
            line.show(facts, waited_s)


@contextlib.contextmanager
def showing_blocked(look: Callable[[], Facts], prefix: str = "") -> Iterator[None]:
    """Show a wait on stderr during a ``with`` block in which this thread blocks. *look* is called on another thread."""
    ended = threading.Event()

    def run() -> None:
        began = time.monotonic()
        with WaitLine(prefix) as line:
            while line.next_s < math.inf and not ended.wait(max(0.0, began + line.next_s - time.monotonic())):
                line.show(look(), time.monotonic() - began)

    thread = threading.Thread(target=run, name="rlinf-actors-progress", daemon=True)
    exhaustion.start(thread)
    try:
        yield
    finally:
        ended.set()
        thread.join()
