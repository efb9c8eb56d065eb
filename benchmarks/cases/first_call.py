"""Eight workers, from launch to the first call answered by all.

Cold is the first group of a fresh cluster, warm the next one; from nothing counts the cluster's start too.
"""

from __future__ import annotations

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import clock, timed

WORKERS = 8


def answered(runtime: Runtime, torch: bool) -> float:
    """Seconds until eight new workers have answered; they are gone when this returns."""
    start = clock()
    group = runtime.spawn(WORKERS, torch)
    pids = group.call("pid")
    taken = clock() - start
    if len(set(pids)) != WORKERS:
        raise RuntimeError(f"{WORKERS} workers were to have a process each; their pids are {pids}")
    group.release()
    return taken


def measure(runtime: Runtime, torch: bool = False) -> Figures:
    start = timed(runtime.start)
    try:
        cold = answered(runtime, torch)
        warm = answered(runtime, torch)
    finally:
        runtime.stop()
    return {"from_nothing": start + cold, "cold": cold, "warm": warm}


CASE = Case(
    "first_call",
    "8 workers, first call answered",
    (
        Figure("from_nothing", "from nothing: cluster and workers", "s"),
        Figure("cold", "first group (raw: a new interpreter with pyzmq forks 8)", "s", reach_ray=3),
        Figure("warm", "next group (raw: fork 8 from here)", "s", reach_limit=33, reach_ray=12),
    ),
    measure,
)
