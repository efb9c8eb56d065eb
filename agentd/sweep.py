"""Kill what the workers of a dead template left: they, and all that carries their marks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cgroups.worker_cgroup import leftovers, workers_of
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.wire.template_protocol import ROBOT_END_S

PATIENCE_S = 3.0
"""One that is in an uninterruptible call is not waited for longer."""
EXEC_S = 0.002
"""When to look again at an orphan that is just executing a program: nothing tells that it has."""

log = logging.getLogger(__name__)


def clear_cgroups(loop: asyncio.AbstractEventLoop, roots: Roots, done: Callable[[], object] = lambda: None) -> bool:
    """End what lives in the cgroups of templates that are gone, when their robots had the time to be made safe.

    Does not wait for it; *done* is called after the ends of what lived. Returns whether there was something.
    """
    left = [cgroup for cgroup in leftovers(roots) if not cgroup.remove()]

    def remove(_: dict[int, int]) -> None:
        for cgroup in left:
            cgroup.remove()
        done()

    if left:
        ids = [cgroup.worker for cgroup in left]
        loop.call_later(ROBOT_END_S, lambda: Sweep(loop, ids, {}, remove))
    return bool(left)


class Sweep:
    """Looks, kills, waits for their ends, and looks again until nothing is found.

    Args:
        loop: waits for the ends.
        ids: of the workers.
        pids: of processes of theirs, as far as known, and when each began (clock ticks since boot), so that none is
            mistaken for another that has its pid now; 0 for one that is gone, and only names a session.
        done: called once, with the wait statuses of those that were children of this process.
        reapers: pids of the processes that orphans of the workers may become children of.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ids: Iterable[str],
        pids: Mapping[int, int],
        done: Callable[[dict[int, int]], None],
        reapers: tuple[int, ...] = (),
    ) -> None:
        self._loop = loop
        self._ids = set(ids)
        self._pids = dict(pids)
        self._done = done
        self._reapers = reapers or (os.getpid(),)
        self._pidfds: dict[int, int] = {}
        self._killed: set[int] = set()
        self._statuses: dict[int, int] = {}
        self._over = False
        self._timer = loop.call_later(PATIENCE_S, self._finish)
        self._look()

    def _look(self) -> None:
        try:
            self._search()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if not self._over:  # else it has taken too long already
                log.warning("what workers have left is looked for again in %g s: %s", AGAIN_S, explain(error))
                self._loop.call_later(AGAIN_S, self._look)

    def _search(self) -> None:
        for pid in procfs.pids():
            stat = procfs.stat(pid)
            if stat is None:
                continue
            if stat.state in "ZX":
                if (pid in self._killed or self._named(stat)) and stat.parent == os.getpid():
                    self._reap(pid)  # when it died, its parent still lived
            elif self._ours(stat):
                self._kill(pid)
        if self._pidfds or self._over:
            return
        if any(self._missed(pid) for reaper in self._reapers for pid in procfs.children(reaper)):
            self._loop.call_later(EXEC_S, self._look)
        else:
            self._loop.call_soon(self._finish)

    def _missed(self, pid: int) -> bool:
        """True if a child of a reaper may be one that the look has missed.

        What one of them forked after the list was made is a reaper's child when that one has ended; what was between
        two programs had no mark, and has one now, or will.
        """
        if procfs.in_exec(pid):
            return True
        stat = procfs.stat(pid)
        return stat is not None and stat.state not in "ZX" and (self._ours(stat) or procfs.in_exec(pid))

    def _ours(self, stat: procfs.Stat) -> bool:
        return (
            self._named(stat)
            or procfs.mark_of(stat.pid) in self._ids
            or procfs.branded(stat.pid, self._ids) is not None
        )

    def _named(self, stat: procfs.Stat) -> bool:
        """As far as can be said without its memory, which who has ended has not any more."""
        return self._known(stat) or not self._ids.isdisjoint(workers_of(stat.pid))

    def _known(self, stat: procfs.Stat) -> bool:
        if self._pids.get(stat.pid) == stat.started:
            return True
        if stat.session not in self._pids or stat.session == stat.pid:
            return False
        leader = procfs.stat(stat.session)  # as long as somebody is in its session, nobody else gets its pid
        return leader is None or leader.started == self._pids[stat.session]

    def _kill(self, pid: int) -> None:
        if pid in self._pidfds:
            return
        try:
            pidfd = procfs.pidfd_of(pid)
        except ProcessLookupError:
            return
        self._pidfds[pid] = pidfd
        self._killed.add(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._loop.add_reader(pidfd, self._on_end, pid)

    def _on_end(self, pid: int) -> None:
        self._forget(pid)
        self._reap(pid)
        if not self._pidfds:
            self._look()  # what it forked while we looked

    def _reap(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):  # somebody else's child
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._statuses[pid] = status

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        self._timer.cancel()
        for pid in list(self._pidfds):
            self._forget(pid)
        self._done(self._statuses)
