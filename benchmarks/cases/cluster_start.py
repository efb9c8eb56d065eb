"""Start and stop of a cluster of one node."""

from __future__ import annotations

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import timed


def measure(runtime: Runtime) -> Figures:
    return {"start": timed(runtime.start), "stop": timed(runtime.stop)}


CASE = Case(
    "cluster_start",
    "A one-node cluster",
    (
        Figure("start", "start (raw: an interpreter with pyzmq answers over ipc)", "s", reach_ray=6),
        Figure("stop", "stop", "s"),
    ),
    measure,
)
