"""Faults on command: what a program does when a message is lost or late, or when a process cannot be started.

In this process, for as long as a block lasts::

    with faults.inject("transport.send", faults.delay(0.2), where=lambda peer: peer.startswith("driver:")) as late:
        ...
    assert late.hits

In the processes of a cluster, by the environment that they inherit::

    LocalCluster(2, env=faults.environment(faults.fault("spawn.fork", faults.refuse(), where="actors:1")))

docs/reliability.md lists the points and what can happen at each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from rlinf_actors.net import faultpoints
from rlinf_actors.net.faultrules import POINTS, Fault, Rule, check
from rlinf_actors.settings import FAULTS

__all__ = ["POINTS", "Action", "Fault", "cut", "delay", "drop", "duplicate", "environment", "fault", "inject", "refuse"]


@dataclass(frozen=True)
class Action:
    """What happens when a fault strikes; made by `drop`, `delay`, `duplicate`, `cut` and `refuse`."""

    name: str
    seconds: float = 0.0


def drop() -> Action:
    """The message is lost. A network never does that to a living connection: whoever waits needs a timeout."""
    return Action("drop")


def delay(seconds: float) -> Action:
    """The message comes that much later, and what follows stays behind it. At spawn points the process stands still."""
    return Action("delay", seconds)


def duplicate() -> Action:
    """The message comes twice."""
    return Action("duplicate")


def cut(seconds: float = 0.0) -> Action:
    """All messages to and from that peer are lost, for *seconds*; 0: until the rule ends."""
    return Action("cut", seconds)


def refuse() -> Action:
    """A request or a start is refused at once; a connection is never made, as to a port that is closed."""
    return Action("refuse")


def fault(point: str, action: Action, where: str = "*", **more: Any) -> Fault:
    """One fault, for `environment`.

    Args:
        point: where, e.g. "transport.send"; see POINTS.
        action: what happens, e.g. ``delay(0.2)``.
        where: pattern (as in fnmatch) of what it strikes.
        more: chance, times, skip, seed, exists: see Fault.

    Raises:
        ConfigError: no such point, or the action is not possible there.
    """
    return check(Fault(point, action.name, action.seconds, where, **more))


def environment(*faults: Fault) -> dict[str, str]:
    """The variable that brings *faults* into every process that is started with it."""
    return {FAULTS: msgspec.json.encode(faults).decode()}


@contextlib.contextmanager
def inject(point: str, action: Action, where: str | Callable[[str], bool] = "*", **more: Any) -> Iterator[Rule]:
    """Faults in this process until the block ends; what is held back then still comes.

    Args:
        point, action, more: as `fault`'s.
        where: a pattern, or a function that is given the name and says whether to strike; it runs on any thread.

    Yields:
        The rule; its `hits` counts how often it struck.

    Raises:
        ConfigError: no such point, or the action is not possible there.
    """
    pattern, decide = (where, None) if isinstance(where, str) else ("*", where)
    rule = Rule(fault(point, action, pattern, **more), decide)
    faultpoints.add(rule)
    try:
        yield rule
    finally:
        faultpoints.remove(rule)
