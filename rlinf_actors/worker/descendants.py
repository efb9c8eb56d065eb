"""Stop the processes that a robot worker has started, so that none of them moves the robot after the stop command.

They are stopped (SIGSTOP) before on_lease_lost and killed after it: until then they keep their ends of connections and
pipes open, and cannot leave the tree in which the next look finds what they had just started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from rlinf_actors import procfs
from rlinf_actors.worker.ending import kill

STOP_S = 0.1
"""How long to wait until all stand still, in seconds: one in an uninterruptible call stops when that is over."""
_LOOK_S = 0.0005


class Descendants:
    """The processes below one worker, also those that have become daemons.

    Args:
        worker: its id, by which all that it starts is marked.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._kept: dict[int, int] = {}  # pids, with when they began
        self._stopped: dict[int, int] = {}

    def keep(self, pid: int) -> bool:
        """Let this process, and what it starts, run while on_lease_lost does. Return False if there is none."""
        found = procfs.stat(pid)
        if found is None or found.state in "ZX":
            return False
        self._kept[pid] = found.started
        return True

    def stop(self) -> bool:
        """Stop all that need not run on. Return False if one did not stand still within STOP_S."""
        deadline = time.monotonic() + STOP_S
        while True:
            found = [one for one in self._others() if self._stopped.get(one.pid) != one.started]
            for one in found:
                self._stopped[one.pid] = one.started
                _signal(one.pid, signal.SIGSTOP)
            moving = [pid for pid, started in self._stopped.items() if _runs(pid, started)]
            if not found and not moving:
                return True
            if time.monotonic() >= deadline:
                return False
            if moving:  # running on another core, until its next interrupt
                time.sleep(_LOOK_S)

    def kill(self) -> None:
        """Kill what was stopped or kept: the end of the worker would continue a process group of its own."""
        for pid, started in {**self._kept, **self._stopped}.items():
            found = procfs.stat(pid)
            if found is not None and found.started == started:
                kill(pid)

    def _others(self) -> Iterator[procfs.Stat]:
        """Every living process below the worker that is not kept."""
        ours, seen = os.getpid(), set[int]()
        waiting = procfs.children(ours)
        # orphans become children of the template; if that has died, of whoever is the worker's parent now
        waiting += [pid for pid in procfs.children(os.getppid()) if pid != ours and self._is_ours(pid)]
        while waiting:
            pid = waiting.pop()
            found = procfs.stat(pid)
            if pid in seen or pid == ours or found is None or self._kept.get(pid) == found.started:
                continue
            seen.add(pid)
            waiting += procfs.children(pid)
            if found.state not in "ZX":
                yield found

    def _is_ours(self, pid: int) -> bool:
        found = procfs.stat(pid)
        if found is None or found.session == os.getpid():
            return found is not None
        return procfs.branded(pid, [self._worker]) is not None or procfs.mark_of(pid) == self._worker


def _runs(pid: int, started: int) -> bool:
    found = procfs.stat(pid)
    return found is not None and found.started == started and found.state not in "TtZX"


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # gone, or another user's (sudo): nothing here can stop that
