"""Processes of a session: find them in /proc, measure their memory, and end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

_CPUCLOCK_SCHED = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROCESSORS = sorted(os.sched_getaffinity(0))
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make every orphan below this process its child, so that `sweep` finds it also after setsid."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


@contextlib.contextmanager
def stays_on(number: int) -> Iterator[None]:
    """Run this thread, and the processes that it starts in the block, on one of its processors."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_PROCESSORS[number % len(_PROCESSORS)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def descendants(pid: int) -> dict[int, str]:
    """Return the names of all live processes below *pid*, by pid."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:  # it ended while we looked
            continue
        state, parent = rest.split()[:2]
        children.setdefault(int(parent), []).append(int(entry))
        if state != "Z":
            names[int(entry)] = name
    found, todo = {}, list(children.get(pid, ()))
    while todo:
        child = todo.pop()
        if child in names:
            found[child] = names[child]
        todo.extend(children.get(child, ()))
    return found


def sweep() -> list[str]:
    """Kill and reap everything below this process, which must be a subreaper.

    Returns:
        Names of the processes that were still running.
    """
    left: dict[int, str] = {}
    with contextlib.suppress(ChildProcessError):  # raised by waitpid when nothing is left
        while True:
            for pid, name in descendants(os.getpid()).items():
                left[pid] = name
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    return sorted(left.values())


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process in MB (10^6 bytes), 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024 / 1e6
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB (10^6 bytes)."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process since its start."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # the id that clock_getcpuclockid(3) returns


def descriptors(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
