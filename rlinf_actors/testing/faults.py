"""Injection of faults: lost or late messages, processes that do not start, nodes that lose power.

In this process, for as long as a block lasts::

    with faults.inject("transport.send", faults.delay(0.2), where=lambda peer: peer.startswith("driver:")) as late:
        ...
    assert late.hits

In the processes of a cluster, by the environment that they inherit::

    LocalCluster(2, env=faults.environment(faults.fault("spawn.fork", faults.refuse(), where="actors:1")))

docs/how-to/test-with-faults.md lists the points and the actions possible at each.

`kill_all` ends a node of a LocalCluster as a loss of power does: all its processes at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlinf_actors import procfs
from rlinf_actors.net import fault_injection
from rlinf_actors.net.fault_injection import Fault, Rule, check
from rlinf_actors.settings import FAULTS


@dataclass(frozen=True)
class Action:
    """Effect of a fault; made by `drop`, `delay`, `duplicate`, `cut` and `refuse`."""

    name: str
    seconds: float = 0.0


def drop() -> Action:
    """Return the action that loses the message.

    No network does that on a living connection, so a caller that waits needs a timeout.
    """
    return Action("drop")


def delay(seconds: float) -> Action:
    """Return the action that delays a message by *seconds*, and later messages with it. At spawn points it delays the
    process.
    """
    return Action("delay", seconds)


def duplicate() -> Action:
    """Return the action that delivers the message twice."""
    return Action("duplicate")


def cut(seconds: float = 0.0) -> Action:
    """Return the action that loses all messages to and from a peer for *seconds*; 0 means until the rule ends."""
    return Action("cut", seconds)


def refuse() -> Action:
    """Return the action that refuses a request or a start at once. A connection is refused as by a closed port."""
    return Action("refuse")


def fault(point: str, action: Action, where: str = "*", **more: Any) -> Fault:
    """Return one fault, for `environment`.

    Args:
        point: name of the fault point, e.g. "transport.send"; see POINTS.
        action: its effect, e.g. ``delay(0.2)``.
        where: pattern (as in fnmatch) of the names to which the fault applies.
        more: chance, times, skip, seed, exists: see Fault.

    Raises:
        ConfigError: there is no such point, or the action is not possible there.
    """
    return check(Fault(point, action.name, action.seconds, where, **more))


def environment(*faults: Fault) -> dict[str, str]:
    """Return the environment variable, with its value, that injects *faults* into every process that is started
    with it.
    """
    return {FAULTS: msgspec.json.encode(faults).decode()}


@contextlib.contextmanager
def inject(point: str, action: Action, where: str | Callable[[str], bool] = "*", **more: Any) -> Iterator[Rule]:
    """Inject faults into this process until the block ends; delayed messages still arrive then.

    Args:
        point, action, more: the same as in `fault`.
        where: a pattern, or a function of the name that returns True if the fault applies; it runs on any thread.

    Yields:
        The rule; its `hits` counts the faults injected.

    Raises:
        ConfigError: there is no such point, or the action is not possible there.
    """
    pattern, decide = (where, None) if isinstance(where, str) else ("*", where)
    rule = Rule(fault(point, action, pattern, **more), decide)
    fault_injection.add(rule)
    try:
        yield rule
    finally:
        fault_injection.remove(rule)


def templates(run_dir: str) -> list[int]:
    """Return the process ids of a node's running templates.

    They are read from the records that templates leave for a later agentd (agentd.templates.Record).
    """
    found = []
    for path in Path(run_dir, "t").glob("*.json"):
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:  # it has just ended
            continue
        stat = procfs.stat(record["pid"])
        if stat is not None and stat.started == record["started"]:
            found.append(record["pid"])
    return found


def keepers(run_dir: str) -> list[int]:
    """Return the process ids of a node's running keepers, which have the node's keeper socket on their
    command lines.
    """
    wanted, found = os.fsencode(f"{run_dir}/keeper"), []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL processes and all their descendants. They are stopped first, so that none of them forks meanwhile."""
    stopped: list[int] = []
    while fresh := [found for pid in pids for found in procfs.subtree(pid) if found not in stopped]:
        for found in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, signal.SIGSTOP)
        stopped += fresh
    pidfds = []
    for found in stopped:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(procfs.pidfd_of(found))
            os.kill(found, signal.SIGKILL)
    for pidfd in pidfds:
        procfs.has_ended(pidfd, None)
        os.close(pidfd)
