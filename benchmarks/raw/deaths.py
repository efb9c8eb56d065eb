"""Limits of noticing ends: children of this process, by their pidfds, and children that the kernel ends with it."""

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
    """A child that waits is killed, and its pidfd says so."""
    taken = [_seconds_to_end(1) for _ in range(WORKERS)]
    return {"told": statistics.median(taken), "told_worst": max(taken)}


def driver() -> Figures:
    """A child with children of its own is killed, and they end with it."""
    return {"gone": _seconds_to_end(1 + OWNED)}


def _seconds_to_end(processes: int) -> float:
    """From the kill of the first of so many until all have ended; the others are its children."""
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
