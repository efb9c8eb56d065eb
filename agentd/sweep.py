"""Kill what the workers of a dead template left: they, and all that carries their marks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable

from rlinf_actors import procfs

PATIENCE_S = 3.0
"""One that is in an uninterruptible call is not waited for longer."""


class Sweep:
    """Looks, kills, waits for their ends, and looks again until nothing is found.

    Args:
        loop: waits for the ends.
        ids: of the workers.
        pids: of the workers, as far as known; nobody else may reap them.
        done: called once, with the wait statuses of those that were children of this process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ids: Iterable[str],
        pids: Iterable[int],
        done: Callable[[dict[int, int]], None],
    ) -> None:
        self._loop = loop
        self._ids = list(ids)
        self._pids = list(pids)
        self._done = done
        self._pidfds: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._timer = loop.call_later(PATIENCE_S, self._finish)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._kill(pid)
        self._look()

    def _look(self) -> None:
        for pid in procfs.marked(self._ids):
            self._kill(pid)
        if not self._pidfds:
            self._timer.cancel()
            self._loop.call_soon(self._finish)

    def _kill(self, pid: int) -> None:
        if pid in self._pidfds:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._pidfds[pid] = pidfd
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._loop.add_reader(pidfd, self._on_end, pid)

    def _on_end(self, pid: int) -> None:
        self._forget(pid)
        with contextlib.suppress(ChildProcessError):  # not ours: somebody else's child
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._statuses[pid] = status
        if not self._pidfds:
            self._look()  # what it forked while we looked

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    def _finish(self) -> None:
        for pid in list(self._pidfds):
            self._forget(pid)
        self._done(self._statuses)
