"""Limits of the detection of ends: children by their pidfds, and children that the kernel ends with their parent."""

from __future__ import annotations

import os
import select
import signal
import statistics
import threading

from benchmarks.cases.deaths import OWNED, WORKERS
from benchmarks.model import Figures
from benchmarks.processes import die_with_parent
from benchmarks.timing import clock


def worker() -> Figures:
    """Kill a waiting child, and wait until its pidfd is readable."""
    taken = [_seconds_to_end(1) for _ in range(WORKERS)]
    return {"told": statistics.median(taken), "told_worst": max(taken)}


def driver() -> Figures:
    """Kill a child that has children, and wait until they have ended too."""
    return {"gone": _seconds_to_end(1 + OWNED)}


def _seconds_to_end(processes: int) -> float:
    """Return the seconds from the kill of a process until it and its children have ended."""
    heard, tell = os.pipe()
    first = os.fork()
    if not first:
        for _ in range(processes - 1):
            if not os.fork():
                die_with_parent()
                break
        os.write(tell, f"{os.getpid()}\n".encode())
        threading.Event().wait()
    os.close(tell)
    said = b""
    while said.count(b"\n") < processes:
        said += os.read(heard, 4096)
    os.close(heard)
    waiting = pidfds = [os.pidfd_open(int(pid)) for pid in said.split()]
    kill = clock()
    os.kill(first, signal.SIGKILL)
    while waiting:
        ended = select.select(waiting, [], [])[0]
        waiting = [fd for fd in waiting if fd not in ended]
    taken = clock() - kill
    for fd in pidfds:
        os.close(fd)
    os.waitpid(first, 0)
    return taken
