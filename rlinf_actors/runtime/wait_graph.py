"""Cycles in what the workers of a job wait for: deadlocks, and cycles that may end. Pure."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlinf_actors.wire.stack_values import Wait


class Step(NamedTuple):
    worker: str
    waits_for: str
    wait: Wait


class WaitCycle(NamedTuple):
    """Workers of which each waits for the next, and the last for the first.

    `deadlock` is True if none of them can go on: each wait blocks its worker and has no time limit.
    """

    deadlock: bool
    steps: list[Step]


def cycles(waits: Mapping[str, Sequence[Wait]]) -> list[WaitCycle]:
    """Return the cycles of waits, one of each set of workers that wait for one another. Deadlocks come first.

    *waits* has the waits of each worker, by its name.
    """
    found: list[WaitCycle] = []
    named: set[str] = set()
    for deadlock in (True, False):
        graph = {name: _targets(some, deadlock) for name, some in waits.items() if name not in named}
        for ring in _rings(graph):
            steps = [Step(name, to, graph[name][to]) for name, to in zip(ring, [*ring[1:], ring[0]], strict=True)]
            found.append(WaitCycle(deadlock, steps))
            named.update(ring)
    return found


def _targets(waits: Iterable[Wait], deadlock: bool) -> dict[str, Wait]:
    """Return the workers that these waits of one worker are for; if *deadlock*, those that nothing but they can end."""
    counted = [wait for wait in waits if not deadlock or (wait.blocks and not wait.limit_s)]
    return {name: wait for wait in reversed(counted) for name in wait.on}


def _rings(graph: Mapping[str, Mapping[str, Wait]]) -> Iterator[list[str]]:
    """Yield cycles of *graph* that have no node in common."""
    left = dict(graph)
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
        except graphlib.CycleError as error:
            ring: list[str] = error.args[1][:0:-1]  # from each node to the one that it waits for; the first came twice
            yield ring
            for name in ring:
                del left[name]
        else:
            return
