"""CPU time, memory, threads and descriptors of a process of this machine, as psutil reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """The CPU time, memory, threads and descriptors that a process uses."""

    cpu_s: float  # CPU time so far of all its threads, in user and system mode
    rss_bytes: int  # resident memory, shared memory included
    threads: int
    descriptors: int | None  # open descriptors; None if this user may not see them


def figures_of(pid: int) -> Figures | None:
    """Return the resources that the process *pid* uses, or None if the process has ended, if this user may not see it,
    or if psutil (of the extra [cli]) is not installed.
    """
    try:
        import psutil  # 40 ms, and few commands show figures
    except ModuleNotFoundError:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            cpu_s, rss, threads = times.user + times.system, process.memory_info().rss, process.num_threads()
    except psutil.Error:
        return None
    try:
        descriptors: int | None = process.num_fds()
    except psutil.Error:
        descriptors = None
    return Figures(round(cpu_s, 2), rss, threads, descriptors)
