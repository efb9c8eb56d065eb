"""Remove what dead workers leave: kill the workers of a template that has ended, with every process that they started.
Loop thread only.

The processes of a worker are recognized by pid, session, cgroup, worker mark (an environment variable) or brand (a
resource limit); see rlinf_actors.procfs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from agentd.users import User, as_user
from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.cgroups.worker_cgroup import leftovers, workers_of
from rlinf_actors.exhaustion import AGAIN_S, explain
from rlinf_actors.net.daemon import SLICE_S
from rlinf_actors.wire.template_protocol import ROBOT_GONE_S

PATIENCE_S = 3.0  # seconds after which a sweep gives up: a process in an uninterruptible system call may never end
_MOST_NAMES = 200_000  # entries of a directory of sockets that are looked at: a user may fill that of its workers
EXEC_S = 0.002
"""Seconds until the next search if a process is in execve(), where its mark cannot be read: no event ends that."""

log = logging.getLogger(__name__)


def remove_sockets(run_dir: str, ended: Callable[[str], bool], user: User | None = None) -> None:
    """Remove the sockets of ended workers, and of their children, from the run directory of *user*.

    *ended* tells by a worker's id whether the worker has ended.
    """
    with as_user(user), contextlib.suppress(*([OSError] if user is not None else [])):  # the user can change it
        with os.scandir(f"{run_dir}/w") as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
        for name in names:
            if ended(name.partition("_")[0]):
                Path(run_dir, "w", name).unlink(missing_ok=True)


def clear_cgroups(loop: asyncio.AbstractEventLoop, roots: Roots, done: Callable[[], object] = lambda: None) -> bool:
    """Find the cgroups below *roots* whose template has ended but in which processes are left. Return False if there
    are none; *done* is then never called.

    Otherwise return True at once. The processes get ROBOT_GONE_S seconds to make robots safe; then they are killed and
    *done* is called.
    """
    left = [cgroup for cgroup in leftovers(roots) if not cgroup.remove()]

    def remove(*_: object) -> None:
        for cgroup in left:
            cgroup.remove()
        done()

    if left:
        ids = [cgroup.worker for cgroup in left]
        loop.call_later(ROBOT_GONE_S, lambda: Sweep(loop, ids, {}, remove))
    return bool(left)


class Sweep:
    """Kills all processes of some workers. It searches for processes, kills them, waits for their ends, and searches
    again until none is left. A search takes about SLICE_S of each turn of the loop: a user may have any number of
    processes.

    Args:
        ids: ids of the workers.
        pids: known processes of the workers, with their starts in clock ticks since boot. Start 0 stands for an ended
            process whose pid may still name a session.
        done: called once, at the end, with the wait statuses of processes that were children of agentd, and True if a
            process could not be killed.
        reapers: pids of the processes that inherit orphans of the workers; agentd by default.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ids: Iterable[str],
        pids: Mapping[int, int],
        done: Callable[[dict[int, int], bool], None],
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
        self._searching = self._found = False  # _found: True if the present search has killed a process
        self._left: Iterator[int] | None = None  # processes that the present search has not looked at
        self._timer = loop.call_later(PATIENCE_S, self._finish)
        self._search()

    def _search(self) -> None:
        if not self._searching:
            self._searching, self._found, self._left = True, False, None
            self._go_on()

    def _go_on(self) -> None:
        if self._over:
            return
        until = time.perf_counter() + SLICE_S
        try:
            if self._left is None:
                self._left = itertools.chain(self._pids, procfs.pids())  # the known ones at once
            for pid in self._left:
                self._look_at(pid)
                if time.perf_counter() > until:
                    self._loop.call_soon(self._go_on)
                    return
            self._searching = False
            self._searched()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._searching = False
            log.warning("the search for what workers left is repeated in %g s: %s", AGAIN_S, explain(error))
            self._loop.call_later(AGAIN_S, self._search)

    def _look_at(self, pid: int) -> None:
        stat = procfs.stat(pid)
        if stat is None:
            return
        if stat.ended:
            if (pid in self._killed or self._named(stat)) and stat.parent == os.getpid():
                self._reap(pid)  # its parent lived when it died, and has ended since
        elif self._ours(stat):
            self._kill(stat)

    def _searched(self) -> None:
        if self._pidfds:
            return  # their ends begin another search
        if self._found:
            self._search()  # for what they forked before they ended
        elif any(self._missed(pid) for reaper in self._reapers for pid in procfs.children(reaper)):
            self._loop.call_later(EXEC_S, self._search)
        else:
            self._loop.call_soon(self._finish)

    def _missed(self, pid: int) -> bool:
        """Return True if the search may have missed the process *pid*, a child of a process that inherits orphans. The
        search misses a process that was in execve() or appeared after the search had begun.
        """
        if procfs.in_exec(pid):
            return True
        stat = procfs.stat(pid)
        return stat is not None and not stat.ended and (self._ours(stat) or procfs.in_exec(pid))

    def _ours(self, stat: procfs.Stat) -> bool:
        return (
            self._named(stat)
            or procfs.mark_of(stat.pid) in self._ids
            or procfs.branded(stat.pid, self._ids) is not None
        )

    def _named(self, stat: procfs.Stat) -> bool:
        if self._pids.get(stat.pid) == stat.started or not self._ids.isdisjoint(workers_of(stat.pid)):
            return True
        if stat.session not in self._pids or stat.session == stat.pid:
            return False
        leader = procfs.stat(stat.session)  # while its session has members, no other process gets its pid
        return leader is None or leader.started == self._pids[stat.session]

    def _kill(self, found: procfs.Stat) -> None:
        """Kill the process that the search has *found*, unless it has ended and another process has its pid now."""
        pid = found.pid
        if pid in self._pidfds:
            return
        try:
            pidfd = procfs.pidfd_of(pid)
        except ProcessLookupError:
            return
        now = procfs.stat(pid)
        if now is None or now.started != found.started:
            os.close(pidfd)
            return
        self._pidfds[pid] = pidfd
        self._killed.add(pid)
        self._found = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._loop.add_reader(pidfd, self._on_end, pid)

    def _on_end(self, pid: int) -> None:
        self._forget(pid)
        self._reap(pid)
        if not self._pidfds:
            self._search()  # for what it forked meanwhile

    def _reap(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):  # another process's child
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
        left = list(self._pidfds)
        for pid in left:
            self._forget(pid)
        self._done(self._statuses, bool(left))
