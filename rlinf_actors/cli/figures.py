"""Figures of processes on this machine, by psutil: for people, and for no decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """What a process uses.

    Attributes:
        cpu_s: seconds of CPU time so far, in user and system mode, of all its threads.
        rss_bytes: memory of its own and shared memory that it has touched.
        threads: how many it has.
        descriptors: how many are open; None if this user may not see that.
    """

    cpu_s: float
    rss_bytes: int
    threads: int
    descriptors: int | None


def figures_of(pid: int) -> Figures | None:
    """Return the figures of a process, None if it has ended or this user may not see them."""
    import psutil  # 40 ms, and few commands show figures

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
