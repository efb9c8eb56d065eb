"""Time from the launch of eight workers until all have answered the first call.

Cold: the first group of a new cluster. Warm: the next group. From nothing: with the start of the cluster.
"""

from __future__ import annotations

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import clock, timed

WORKERS = 8


def answered(runtime: Runtime, torch: bool) -> float:
    """Return the seconds until eight new workers have answered. Ends the workers."""
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
