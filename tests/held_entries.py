"""Counts the entries of all containers that an object holds, so that a test sees which of them grow."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

OURS = ("rlinf_actors", "agentd")
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)


def growing(root: object, run_job: Callable[[int], object], jobs: int) -> dict[str, tuple[int, int]]:
    """Run three times *jobs* jobs, by calls of *run_job* with their numbers. Return the containers below *root*, and of
    our modules, that have more entries in the last third than in the second: both numbers, by path.

    The first third fills what has a bound, so the bounds must be low. The numbers are the largest ones after any job,
    since some containers drop old entries only now and then.
    """
    peaks: list[collections.Counter[str]] = []
    for part in range(3):
        peak: collections.Counter[str] = collections.Counter()
        for n in range(part * jobs, (part + 1) * jobs):
            run_job(n)
            peak |= held_entries(root)  # the larger of each
        peaks.append(peak | module_entries(OURS))
    _, once, twice = peaks
    return {path: (once[path], count) for path, count in twice.items() if count > once[path]}


def held_entries(root: object) -> collections.Counter[str]:
    """Return the number of entries of each container below *root*, by the path of attributes that leads to it.

    Containers that are entries of one container count together: `Head._groups[].workers`. Objects of other packages are
    not looked into, but for functions that hold objects of ours.
    """
    found: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    waiting: collections.deque[tuple[str, Any]] = collections.deque([(type(root).__name__, root)])
    while waiting:  # breadth first: each object has its shortest path
        path, owner = waiting.popleft()
        if id(owner) not in seen:
            seen.add(id(owner))
            if isinstance(owner, CONTAINERS):
                found[path] += len(owner)
            waiting.extend((path + name, value) for name, value in _parts(owner))
    return found


def module_entries(prefixes: tuple[str, ...]) -> collections.Counter[str]:
    """Return the number of entries of each container and cache of the imported modules whose names begin so."""
    found: collections.Counter[str] = collections.Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes):
            for attribute, value in vars(module).items():
                if isinstance(value, CONTAINERS) and not attribute.startswith("__"):
                    found[f"{name}.{attribute}"] = len(value)
                elif hasattr(value, "cache_info"):
                    found[f"{name}.{attribute}"] = value.cache_info().currsize
    return found


def _parts(owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, dict):
        for key, value in owner.items():
            yield "{key}", key
            yield "[]", value
    elif isinstance(owner, CONTAINERS):
        for value in owner:
            yield "[]", value
    elif isinstance(owner, functools.partial):
        yield from (("()", value) for value in (owner.func, *owner.args, *owner.keywords.values()))
    elif isinstance(owner, types.MethodType):
        yield "()", owner.__self__
    elif isinstance(owner, types.FunctionType):
        for cell in owner.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield "()", cell.cell_contents
    elif type(owner).__module__.startswith(OURS):
        names = [*getattr(owner, "__dict__", ()), *getattr(owner, "__struct_fields__", ())]
        names += [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in dict.fromkeys(names):
            if hasattr(owner, name):
                yield f".{name}", getattr(owner, name)
