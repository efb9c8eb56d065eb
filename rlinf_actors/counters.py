"""What this process counts about its work: calls by method, and what it has sent by path. Any thread.

Counting takes no lock, because a thread of a robot worker may be stopped while it counts. Each thread counts in its own
table, which no other thread writes; a reader adds the tables up, and puts those of threads that have ended together.
So no count ever falls.

Names of methods are bounded: further ones count under "". Paths are those of messaging.routes.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

from rlinf_actors import forks

BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the durations of calls that are counted together, in seconds."""
MOST_NAMES = 64
"""Most methods that have a count of their own."""
MOST_TABLES = 64
"""Number of tables above which a new thread puts those of ended threads together."""
READ_S = 1.0
"""Seconds to wait for a thread that does so."""
NAME_CHARS = 200
"""Most characters of a method's name that are kept."""

DONE, FAILED, SECONDS, FIRST_BUCKET = 0, 1, 2, 3
"""Where the counts of a method are in its list. The buckets of BOUNDS_S follow, and one for longer calls."""
_NONE = (0, 0, 0.0, *(0,) * (len(BOUNDS_S) + 1))


Table = tuple[dict[str, list[float]], dict[str, list[float]]]
"""The counts of one thread: calls by method, and (number, bytes) of what was sent, by path."""


class _Alive:
    """Lives as long as its thread."""


class _Mine(threading.local):
    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = {}
        self.sent: defaultdict[str, list[float]] = defaultdict(partial(list, (0, 0)))
        self.alive = _Alive()
        _tables.append((weakref.ref(self.alive), (self.calls, self.sent)))
        if len(_tables) > MOST_TABLES and _adding.acquire(blocking=False):
            try:
                _add_ended()
            finally:
                _adding.release()


_tables: list[tuple[weakref.ref[_Alive], Table]] = []
_ended: Table = {}, {}  # the sums of threads that have ended
_adding = forks.free_in_children(threading.Lock())  # for `_add_ended`, and to read while it does not run
mine = _Mine()


def call_done(method: str, seconds: float) -> None:
    """Count a call of *method* that has returned after *seconds*."""
    counts = mine.calls.get(method)
    if counts is None:
        counts = _counts_of(method)
    counts[DONE] += 1
    counts[SECONDS] += seconds
    counts[FIRST_BUCKET + bisect_left(BOUNDS_S, seconds)] += 1


def call_failed(method: str) -> None:
    """Count a call of *method* that has raised, or that was refused."""
    counts = mine.calls.get(method)
    if counts is None:
        counts = _counts_of(method)
    counts[FAILED] += 1


def sent(path: str, size: int) -> None:
    """Count a message, or a large part of one, of *size* bytes that leaves by *path* (messaging.routes)."""
    counts = mine.sent[path]
    counts[0] += 1
    counts[1] += size


def calls() -> dict[str, list[float]]:
    """Return the counts of calls by method, as lists (DONE, FAILED, SECONDS, FIRST_BUCKET). Waits READ_S at most."""
    return _sums(table[0] for table in _all())


def sent_by_path() -> dict[str, list[float]]:
    """Return the number of messages or parts, and of bytes, that were sent, by path. Waits READ_S at most."""
    return _sums(table[1] for table in _all())


def _all() -> list[Table]:
    taken = _adding.acquire(timeout=READ_S)
    try:
        if taken:
            _add_ended()
        return [_ended, *(table for _, table in list(_tables))]
    finally:
        if taken:
            _adding.release()


def _add_ended() -> None:
    for entry in [entry for entry in list(_tables) if entry[0]() is None]:
        for into, table in zip(_ended, entry[1], strict=True):
            into.update(_sums([into, table]))
        _tables.remove(entry)


def _counts_of(method: str) -> list[float]:
    name = method[:NAME_CHARS] if len(mine.calls) < MOST_NAMES - 1 else ""
    return mine.calls.setdefault(name, list(_NONE))


def _sums(tables: Iterable[dict[str, list[float]]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for table in tables:
        for name, counts in list(table.items()):
            name = name if name in found or len(found) < MOST_NAMES - 1 else ""
            found[name] = [a + b for a, b in zip(found.get(name) or (0,) * len(counts), counts, strict=True)]
    return found
