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

STOP_S, STOP_AGAIN_S = 0.08, 0.02
"""How long to wait until all stand still, in seconds, before the worker's threads do and after that.

0.1 s together, since the robot moves meanwhile. A process in an uninterruptible call stops when the call is over.
"""
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
        self._others_own: set[int] = set()  # of those, what belongs to another user (sudo): it does not stop

    def keep(self, pid: int) -> str:
        """Let this process, and what it starts, run while on_lease_lost does. Return why it may not, "" if so."""
        found = procfs.stat(pid)
        if found is None or found.state in "ZX":
            return "there is no such process"
        if not self._is_below(pid):  # it would be killed after on_lease_lost
            return "this worker did not start it"
        self._kept[pid] = found.started
        return ""

    def stop(self, within_s: float) -> bool:
        """Stop all that need not run on. Return False if one is another user's, or did not stand still in that time."""
        deadline = time.monotonic() + within_s
        while True:
            found = [one for one in self._others() if self._stopped.get(one.pid) != one.started]
            for one in found:
                self._stopped[one.pid] = one.started
                if not _stop(one.pid):
                    self._others_own.add(one.pid)
            moving = [pid for pid, started in self._stopped.items() if _runs(pid, started)]
            if not found and self._others_own.issuperset(moving):
                return not moving
            if time.monotonic() >= deadline:
                return False
            if moving:  # on another core, until its next interrupt; the kernel tells only its parent that it stopped
                time.sleep(_LOOK_S)

    def kill(self) -> bool:
        """Kill what was stopped or kept: the end of the worker would continue a process group of its own."""
        for pid, started in {**self._kept, **self._stopped}.items():
            found = procfs.stat(pid)
            if found is not None and found.started == started:
                procfs.kill(pid)
        return True

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

    def _is_below(self, pid: int) -> bool:
        ours = os.getpid()
        if pid != ours and self._is_ours(pid):
            return True
        found = procfs.stat(pid)
        while found is not None and found.parent not in (0, ours):
            found = procfs.stat(found.parent)
        return found is not None and found.parent == ours

    def _is_ours(self, pid: int) -> bool:
        found = procfs.stat(pid)
        if found is None or found.session == os.getpid():
            return found is not None
        return procfs.branded(pid, [self._worker]) is not None or procfs.mark_of(pid) == self._worker


def _runs(pid: int, started: int) -> bool:
    found = procfs.stat(pid)
    return found is not None and found.started == started and found.state not in "TtZX"


def _stop(pid: int) -> bool:
    """Send SIGSTOP. Return False if the process is another user's."""
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True
