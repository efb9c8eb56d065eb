"""The processes of a run's program: they are marked by a resource limit, so that every one of them can be found.

The head calls `end` if the run was killed, and the run itself in all other cases. A limit is inherited by children from
their fork on, and stays with processes that change their session, parent, title or environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import Popen

from rlinf_actors import procfs

PATIENCE_S = 3.0
"""Seconds that killed processes may take to end, because one may be in an uninterruptible system call."""


def start(run: str, command: Sequence[str], env: Mapping[str, str], set_up: Callable[[], None]) -> Popen[bytes]:
    """Start the program of the run with the id *run*. The kernel kills it when this process ends. This process has one
    thread; *set_up* runs in the child before the program.
    """
    parent = os.getpid()

    def prepare() -> None:
        set_up()
        procfs.brand(run)
        procfs.die_with_parent(signal.SIGKILL, parent)

    return Popen(command, env=env, preexec_fn=prepare)


def end(run: str) -> int:
    """Kill all processes of the program, wait for their ends, and return their number. Blocks, up to PATIENCE_S.

    Two searches in a row must find none: a process that has ended during the first may have forked during it.
    """
    deadline = time.monotonic() + PATIENCE_S
    number = empty = 0
    while empty < 2 and time.monotonic() < deadline:
        found = [pid for pid in procfs.pids() if _kill(pid, run, deadline)]
        number, empty = number + len(found), 0 if found else empty + 1
    return number


def _kill(pid: int, run: str, deadline: float) -> bool:
    """Kill the process *pid* and wait for its end if it is of the program. Return False if it is not, or has ended."""
    if procfs.branded(pid, [run]) is None:
        return False
    try:
        pidfd = procfs.pidfd_of(pid)
    except ProcessLookupError:
        return False
    try:
        if procfs.has_ended(pidfd) or procfs.branded(pid, [run]) is None:  # another process has its pid now
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        procfs.has_ended(pidfd, max(0.0, deadline - time.monotonic()))
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
