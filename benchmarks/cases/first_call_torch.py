"""Time from the launch of eight workers that use torch until all have answered the first call.

The driver imports torch before the clock starts, as a training script does. A runtime may use that as a hint.
"""

from __future__ import annotations

from benchmarks.cases import first_call
from benchmarks.model import Case, Figure, Figures, Runtime


def measure(runtime: Runtime) -> Figures:
    return first_call.measure(runtime, torch=True)


CASE = Case(
    "first_call_torch",
    "8 workers with torch, first call answered",
    (
        Figure("from_nothing", "from nothing: cluster and workers", "s"),
        Figure("cold", "first group (raw: import torch once, fork 8)", "s", reach_limit=1.15, reach_ray=4.6),
        Figure("warm", "next group (raw: fork 8 of a process with torch)", "s", reach_limit=8, reach_ray=30),
    ),
    measure,
    driver_imports=("torch",),
)
