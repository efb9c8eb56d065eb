"""Memory of an idle runtime and of an idle worker: proportional set size, shared pages divided by their users.

The driver does not count. The case finds all other processes below the runner, which inherits every orphan.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.processes import descendants, pss_mb

WORKERS = 8
SETTLE_S = 2.0
"""Seconds to wait, because a runtime may start processes after it is up (Ray starts workers ahead)."""


def daemons() -> list[int]:
    """Return the other processes of this session."""
    return [pid for pid in descendants(os.getppid()) if pid != os.getpid()]


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        time.sleep(SETTLE_S)
        found = daemons()
        figures = {"daemons": sum(map(pss_mb, found)), "processes": float(len(found))}
        for name, torch in (("worker", False), ("worker_torch", True)):
            if torch:  # as a training script has it loaded; a runtime may take that as a hint
                importlib.import_module("torch")
            group = runtime.spawn(WORKERS, torch)
            pids = [int(str(pid)) for pid in group.call("pid")]
            figures[name] = statistics.mean(map(pss_mb, pids))
            group.release()
    finally:
        runtime.stop()
    return figures


CASE = Case(
    "idle_memory",
    "Memory when idle (PSS)",
    (
        Figure(
            "daemons",
            "before any group: agentd with the head, keeper, template (raw: one interpreter with pyzmq, asyncio)",
            "MB",
            reach_ray=6.6,
        ),
        Figure("processes", "their number", ""),
        Figure("worker", "a worker (raw: a fork of an interpreter with pyzmq)", "MB"),
        Figure("worker_torch", "a worker with torch (raw: a fork of a process with torch)", "MB", reach_ray=6.2),
    ),
    measure,
)
