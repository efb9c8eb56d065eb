"""What templates that are not taken over leave: found while they still live, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentd.sweep import Sweep
from rlinf_actors import procfs
from rlinf_actors.wire import spawn

TEMPLATE_END_S = spawn.ROBOT_END_S + 1.0
"""How long a template that is told to end may take: it gives robot workers ROBOT_END_S, and kills others at once."""
KILLED_S = 1.0
"""How long the end of one that was killed is waited for: one in an uninterruptible call may never end."""


@dataclass
class Remains:
    """Workers whose templates were ended.

    Attributes:
        lost: ids of workers, and why they ended.
        processes: what ran below their templates, by the worker's id, "" where that cannot be told: pids, and when each
            began (clock ticks since boot). Of one that hides its mark nothing else tells later whose it was.
    """

    lost: dict[str, str] = field(default_factory=dict)
    processes: dict[str, dict[int, int]] = field(default_factory=dict)

    def of(self, ids: Iterable[str]) -> dict[int, int]:
        """The processes of these workers."""
        return {pid: started for id in ids for pid, started in self.processes.get(id, {}).items()}


async def end_template(pid: int, pidfd: int, why: str, asked: bool, remains: Remains) -> None:
    """End a template that cannot be taken over, and add its workers to *remains*; takes some seconds at most.

    Args:
        pid: its.
        pidfd: of it.
        why: becomes the reason of its workers' ends.
        asked: whether it has the time to end its workers itself.
        remains: of all.
    """
    for id, processes in below(pid).items():
        remains.processes.setdefault(id, {}).update(processes)
        if id:
            remains.lost[id] = why
    if asked:
        _signal(pidfd, signal.SIGTERM)
    if not asked or not await _ended(pidfd, TEMPLATE_END_S):
        _signal(pidfd, signal.SIGKILL)
        await _ended(pidfd, KILLED_S)


def below(template: int) -> dict[str, dict[int, int]]:
    """What runs below a template, as Remains.processes: whose it is tells its mark, its parent, or its session."""
    stats = [stat for pid in procfs.subtree(template)[1:] if (stat := procfs.stat(pid)) is not None]
    owners: dict[int, str] = {}
    for stat in stats:  # parents come first
        owners[stat.pid] = procfs.mark_of(stat.pid) or owners.get(stat.parent, "")  # what is branded is found later
    found: dict[str, dict[int, int]] = {}
    for stat in stats:
        owner = owners[stat.pid] or owners.get(stat.session, "")
        found.setdefault(owner, {})[stat.pid] = stat.started
    return found


async def sweep(ids: Iterable[str], processes: dict[int, int]) -> None:
    """Kill whatever carries the marks of these workers, and these processes."""
    ids = list(ids)
    if not ids and not processes:
        return
    done = asyncio.Event()
    Sweep(asyncio.get_running_loop(), ids, processes, lambda _: done.set())
    await done.wait()


async def sweep_robots(ids: Iterable[str], processes: dict[int, int]) -> None:
    """The same for what may be robot workers, which have the time that making a robot safe may take."""
    ids = list(ids)
    if not ids and not processes:
        return
    begun = {pid: stat.started for pid in procfs.marked(ids) if (stat := procfs.stat(pid)) is not None}
    with contextlib.ExitStack() as stack:
        pidfds = [procfs.open_pidfd(pid, started) for pid, started in {**processes, **begun}.items()]
        pidfds = [pidfd for pidfd in pidfds if pidfd >= 0]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        await asyncio.gather(*(_ended(pidfd, spawn.ROBOT_END_S) for pidfd in pidfds))
    await sweep(ids, processes)


def _signal(pidfd: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def _ended(pidfd: int, patience_s: float) -> bool:
    """Wait for a process's end; whether it came."""
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    loop.add_reader(pidfd, end.set)
    try:
        await asyncio.wait_for(end.wait(), patience_s)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True
