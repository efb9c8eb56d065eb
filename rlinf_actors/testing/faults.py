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
    """What a fault does to a message, a connection, a request or the start of a process. Made by `drop`, `delay`,
    `duplicate`, `cut` or `refuse`; used by `inject` and `fault`.
    """

    name: str
    seconds: float = 0.0


def drop() -> Action:
    """Return the action that loses the message. Its sender gets no error.

    No real network loses a message on a connection that stays open, so the library does not expect the loss. A caller
    that waits for the answer needs a timeout.
    """
    return Action("drop")


def delay(seconds: float) -> Action:
    """Return the action that delays a message, and with it the later messages of the same connection.

    At points where processes are started (``spawn.*``) it delays the start.

    Args:
        seconds: length of the delay.
    """
    return Action("delay", seconds)


def duplicate() -> Action:
    """Return the action that delivers the message twice."""
    return Action("duplicate")


def cut(seconds: float = 0.0) -> Action:
    """Return the action that loses all messages to and from a peer, as a cut network does.

    Args:
        seconds: time until messages pass again; 0 if they are to be lost for as long as the fault is injected.
    """
    return Action("cut", seconds)


def refuse() -> Action:
    """Return the action that makes a request, the start of a process, or a connection fail. A connection fails as at a
    closed port.
    """
    return Action("refuse")


def fault(point: str, action: Action, where: str = "*", **more: Any) -> Fault:
    """Return a fault that is to be injected into the processes of a cluster. Pass it to `environment`.

    Args:
        point: name of the fault point, e.g. "transport.send"; see net.fault_injection.POINTS.
        action: effect of the fault, e.g. ``delay(0.2)``.
        where: fnmatch pattern of the endpoints, peers, kinds of messages or workers that the fault affects.
        more: further attributes of net.fault_injection.Fault: chance, times, skip, seed, exists.

    Raises:
        ConfigError: there is no such point, or the point does not allow the action.
    """
    return check(Fault(point, action.name, action.seconds, where, **more))


def environment(*faults: Fault) -> dict[str, str]:
    """Return the environment variable that injects *faults* into every process that inherits the variable.

    Args:
        faults: faults that `fault` has made.
    """
    return {FAULTS: msgspec.json.encode(faults).decode()}


@contextlib.contextmanager
def inject(point: str, action: Action, where: str | Callable[[str], bool] = "*", **more: Any) -> Iterator[Rule]:
    """Inject a fault into this process until the ``with`` block ends. A message that the fault is still delaying at the
    end of the block arrives at its delayed time.

    Args:
        point: name of the fault point, e.g. "transport.send"; see net.fault_injection.POINTS.
        action: effect of the fault, e.g. ``delay(0.2)``.
        where: fnmatch pattern of the endpoints, peers, kinds of messages or workers that the fault affects; or a
            function that takes such a name and returns True if the fault affects it. The function runs on any thread.
        more: further attributes of net.fault_injection.Fault: chance, times, skip, seed, exists.

    Yields:
        The rule, which counts the affected messages and processes in `hits`.

    Raises:
        ConfigError: there is no such point, or the point does not allow the action.
    """
    pattern, decide = (where, None) if isinstance(where, str) else ("*", where)
    rule = Rule(fault(point, action, pattern, **more), decide)
    fault_injection.add(rule)
    try:
        yield rule
    finally:
        fault_injection.remove(rule)


def templates(run_dir: str) -> list[int]:
    """Return the pids of the running templates of the node with this run directory. They are read from the records that
    templates write in the run directory for a later agentd.
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
    """Return the pids of the running keepers of the node with this run directory. A keeper is
    recognized by its command line, which has the path of its socket in the run directory.
    """
    wanted, found = os.fsencode(f"{run_dir}/keeper"), []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def kill_all(pids: Sequence[int]) -> None:
    """Kill processes and all their descendants by SIGKILL. Before that, stop them all by SIGSTOP, so that none of them
    can fork meanwhile. Return when all have ended.
    """
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
