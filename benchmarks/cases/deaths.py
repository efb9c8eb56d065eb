"""Time from kill -9 of a worker to the caller's exception, and from kill -9 of a driver to its workers' end."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from benchmarks.backends import BACKENDS
from benchmarks.model import Case, Figure, Figures, Group, Runtime
from benchmarks.processes import descendants
from benchmarks.timing import clock

WORKERS = 25
"""Number of workers that are killed, one after the other."""
OWNED = 4
"""Number of workers of the killed driver."""
PATIENCE_S = 10.0
"""Seconds after which a process that still runs counts as left behind."""


def worker(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        taken, children = [], []
        for number in range(WORKERS):
            group = runtime.spawn(1)
            (child,) = group.call("start_child")
            children.append(os.pidfd_open(int(child)))  # type: ignore[call-overload]
            (pid,) = group.call("pid")
            taken.append(_told(group, int(pid), f"in-call-{number}"))  # type: ignore[call-overload]
        return {
            "told": statistics.median(taken),
            "told_worst": max(taken),
            "grandchildren": len(_left(children)),
        }
    finally:
        runtime.stop()


def _told(group: Group, pid: int, name: str) -> float:
    """Kill a worker that runs a call. Return the seconds until the caller has the exception."""
    at: list[float] = []
    fifo = Path(tempfile.gettempdir(), name)
    os.mkfifo(fifo)

    def call() -> None:
        try:
            group.call("wait_in_call", str(fifo))
        except Exception as error:
            at.append(clock())
            if type(error).__name__ not in ("WorkerDiedError", "ActorDiedError"):
                raise

    caller = threading.Thread(target=call)
    caller.start()
    fifo.read_bytes()  # returns when the worker runs the call
    kill = clock()
    os.kill(pid, signal.SIGKILL)
    caller.join()
    fifo.unlink()
    return at[0] - kill


def driver(runtime: Runtime) -> Figures:
    (backend,) = [name for name, module in BACKENDS.items() if module == type(runtime).__module__]
    command = [sys.executable, "-m", "benchmarks.victim", backend, str(OWNED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        grandchildren = set(json.loads(victim.stdout.readline()))
        started = {pid: os.pidfd_open(pid) for pid in descendants(victim.pid)}
        kill = clock()
        victim.kill()
        victim.wait()
        owned = [fd for pid, fd in started.items() if pid not in grandchildren]
        left = len(_left(owned))
        gone = clock() - kill
        orphans = len(_left([started[pid] for pid in grandchildren]))
    return {"gone": gone, "left": left, "grandchildren": orphans}


def _left(pidfds: Sequence[int]) -> list[int]:
    """Return the descriptors of processes that do not end within PATIENCE_S. Close all descriptors."""
    waiting, deadline = list(pidfds), clock() + PATIENCE_S
    while waiting and (ended := select.select(waiting, [], [], max(0.0, deadline - clock()))[0]):
        waiting = [fd for fd in waiting if fd not in ended]
    for fd in pidfds:
        os.close(fd)
    return waiting


WORKER = Case(
    "worker_death",
    f"kill -9 of a worker in a call, {WORKERS} times (raw: a child's end, by its pidfd)",
    (
        Figure("told", "the caller has the exception, p50", "s", reach_ray=1.5),
        Figure("told_worst", "the slowest of them", "s"),
        Figure("grandchildren", "setsid grandchildren left", ""),
    ),
    worker,
)
DRIVER = Case(
    "driver_death",
    f"kill -9 of a driver with {OWNED} workers (raw: {OWNED} children with PR_SET_PDEATHSIG)",
    (
        Figure("gone", "all that it started is gone", "s"),
        Figure("left", f"processes left after {PATIENCE_S:g} s", ""),
        Figure("grandchildren", "setsid grandchildren left", ""),
    ),
    driver,
)
