"""Broadcast of an array of 16 MB from one worker to four others on one node. Ends when all have it."""

from __future__ import annotations

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import later_half

SIZE = 16_000_000
RECEIVERS = 4
RUNS = 30


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        return {"spread": later_half(runtime.spawn(1 + RECEIVERS).spread(SIZE, RUNS))}
    finally:
        runtime.stop()


CASE = Case(
    "broadcast",
    "Broadcast of 16 MB, 1 to 4, one node (raw: one copy into shared memory that four map)",
    (Figure("spread", "until the last has it", "s", "lower", reach_limit=4),),
    measure,
    driver_imports=("numpy",),
)
