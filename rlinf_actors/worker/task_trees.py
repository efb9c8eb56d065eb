"""asyncio tasks as trees: beneath each task those that it awaits, so that a hang reads as a chain. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from rlinf_actors.runtime.waits import Taken

SHOWN_NAMES = 3
"""Most names of tasks that are shown elsewhere."""
Lines: TypeAlias = tuple[tuple[int, int | None], ...]


class Placed(NamedTuple):
    """Tasks with equal stacks that one task awaits, or none.

    Attributes:
        first: one of them.
        number: how many there are.
        depth: number of tasks above them.
        awaits: what each awaits, for people.
    """

    first: Taken
    number: int
    depth: int
    awaits: str


def lines_of(one: Taken) -> Lines:
    """Return where each frame of a thread or task is."""
    return tuple((id(frame.f_code), frame.f_lineno) for frame in one.frames)


def placed(tasks: Sequence[Taken]) -> list[Placed]:
    """Return the tasks in order: each is followed by those that it awaits. A task that several await is beneath one of
    them, and named by the others.
    """
    at = {id(one.task): number for number, one in enumerate(tasks)}
    awaited = [list(dict.fromkeys(at[id(task)] for task in one.awaits.tasks if id(task) in at)) for one in tasks]
    order, beneath, above = _ordered(awaited)
    texts = [_text(number, awaited[number], above, tasks) for number in range(len(tasks))]
    named = {other for number, some in enumerate(awaited) for other in some if above.get(other) != number}
    shapes: dict[tuple[Lines, str, tuple[int, ...], int], int] = {}
    shape = [0] * len(tasks)
    for number in reversed(order):  # those that a task awaits come first
        inner = tuple(sorted(shape[other] for other in beneath[number]))
        key = lines_of(tasks[number]), texts[number], inner, number if number in named else -1
        shape[number] = shapes.setdefault(key, len(shapes))

    def alike(numbers: Iterable[int], depth: int) -> list[tuple[list[int], int]]:
        found: dict[int, list[int]] = {}
        for number in numbers:
            found.setdefault(shape[number], []).append(number)
        return [(some, depth) for some in reversed(found.values())]

    result = []
    waiting = alike((number for number in order if number not in above), 0)
    while waiting:
        some, depth = waiting.pop()
        result.append(Placed(tasks[some[0]], len(some), depth, texts[some[0]]))
        waiting += alike(itertools.chain.from_iterable(beneath[number] for number in some), depth + 1)
    return result


def _ordered(awaited: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]], dict[int, int]]:
    """Return the tasks so that each follows the one above it, the tasks beneath each, and the task above each."""
    order: list[int] = []
    beneath: list[list[int]] = [[] for _ in awaited]
    above: dict[int, int] = {}
    seen: set[int] = set()
    inner = set(itertools.chain.from_iterable(awaited))
    outer = [number for number in range(len(awaited)) if number not in inner]
    for first in (*outer, *range(len(awaited))):  # a ring of tasks that await one another has no outer one
        waiting = [] if first in seen else [first]
        seen.add(first)
        while waiting:
            number = waiting.pop()
            order.append(number)
            beneath[number] = [other for other in awaited[number] if other not in seen]
            seen.update(beneath[number])
            above.update(dict.fromkeys(beneath[number], number))
            waiting += reversed(beneath[number])
    return order, beneath, above


def _text(number: int, awaited: Sequence[int], above: dict[int, int], tasks: Sequence[Taken]) -> str:
    """Return what a task awaits. Names of tasks are in it only if they are not beneath the task."""
    how = tasks[number].awaits.how
    elsewhere = [other for other in awaited if above.get(other) != number]
    if not elsewhere:
        return how
    outer = {number}
    while number in above:
        number = above[number]
        outer.add(number)
    ring = next((tasks[other].name for other in elsewhere if other in outer), None)
    if ring is not None:
        return f"{how}: {ring} above, which waits for this one"
    names = ", ".join(tasks[other].name for other in elsewhere[:SHOWN_NAMES])
    more = f" and {len(elsewhere) - SHOWN_NAMES} more" if len(elsewhere) > SHOWN_NAMES else ""
    return f"{how}: {names}{more}, shown elsewhere"
