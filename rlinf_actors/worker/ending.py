"""A template's own end: every process below it is killed first, robot workers after they had time for their robots."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence

from rlinf_actors import procfs
from rlinf_actors.wire import spawn
from rlinf_actors.worker.process import Worker

END_S = 5.0
"""How long it waits for the ends of those that it has killed: one in an uninterruptible call may never."""


def end_all(workers: Sequence[Worker], wakeup: socket.socket) -> None:
    """Kill every process below this one and wait until all are gone, END_S at most.

    Robot workers were told why, and have ROBOT_END_S to end by themselves.

    Args:
        workers: those that are not reaped.
        wakeup: readable when a child ended.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ)
        _wait_for_robots(workers, selector, wakeup)
        deadline = time.monotonic() + END_S
        for worker in workers:
            procfs.kill_group(worker.pid)
            worker.cgroup.kill()
        while True:
            for pid in procfs.subtree(os.getpid())[1:]:
                procfs.kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            with contextlib.suppress(BlockingIOError):
                wakeup.recv(4096)
    for worker in workers:
        if not worker.told:  # else its pipes were read to their ends then, and closed
            worker.out.finish()
            worker.err.finish()
        worker.cgroup.remove()


def _wait_for_robots(workers: Sequence[Worker], selector: selectors.BaseSelector, wakeup: socket.socket) -> None:
    robots = {worker.id: worker for worker in workers if worker.has_robots and not worker.told}
    for worker in workers:
        if worker.id not in robots:
            procfs.kill_group(worker.pid)
    deadline = time.monotonic() + spawn.ROBOT_END_S
    while True:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        robots = {id: one for id, one in robots.items() if os.waitid(os.P_PID, one.pid, flags) is None}
        if not robots or not selector.select(max(0.0, deadline - time.monotonic())):
            return
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(4096)
