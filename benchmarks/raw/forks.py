"""Limits of starting workers: forks that report when they run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.model import Figures
from benchmarks.processes import die_with_parent, pss_mb
from benchmarks.timing import timed

WORKERS = 8
RUNS = 5
_TEMPLATE = f"""
import msgspec, zmq
from benchmarks.raw.forks import forks
with forks({WORKERS}): pass
"""


@contextlib.contextmanager
def children(work: list[Callable[[], object]]) -> Iterator[list[int]]:
    """Fork a process for each function in *work*. Kill them at the end of the block."""
    pids: list[int] = []
    try:
        for action in work:
            pid = os.fork()
            if not pid:
                try:
                    die_with_parent()
                    action()
                finally:  # never back into the parent's code
                    os._exit(1)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


@contextlib.contextmanager
def forks(count: int, use: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Fork this process *count* times, and wait until each fork has called *use*."""
    reader, writer = os.pipe()

    def work() -> None:
        use()
        os.write(writer, b"u")
        signal.pause()

    try:
        with children([work] * count) as pids:
            up = 0
            while up < count:
                up += len(os.read(reader, count))
            yield pids
    finally:
        os.close(reader)
        os.close(writer)


def fork_s(use: Callable[[], object] = lambda: None) -> float:
    """Return the median seconds until eight forks have called *use*, without the time to kill them."""
    taken = []
    for _ in range(RUNS):
        with contextlib.ExitStack() as stack:
            taken.append(timed(lambda stack=stack: stack.enter_context(forks(WORKERS, use))))
    return statistics.median(taken)


def first_call() -> Figures:
    cold = timed(lambda: subprocess.run([sys.executable, "-c", _TEMPLATE], check=True))
    return {"cold": cold, "warm": fork_s()}


def first_call_torch() -> Figures:
    load = timed(lambda: __import__("torch"))
    gc.freeze()
    warm = fork_s(_use_torch)
    return {"cold": load + warm, "warm": warm}


def idle_memory() -> Figures:
    import zmq  # noqa: F401 - what a daemon loads

    figures = {"daemons": pss_mb(os.getpid()), "processes": 1.0}
    for name, use in (("worker", lambda: None), ("worker_torch", _use_torch)):
        if use is _use_torch:
            __import__("torch")
        gc.freeze()
        with forks(WORKERS, use) as pids:
            figures[name] = statistics.mean(map(pss_mb, pids))
    return figures


def _use_torch() -> None:
    import torch  # loaded before the fork

    torch.ones(1)
