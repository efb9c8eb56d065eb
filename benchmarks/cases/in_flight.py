"""Many calls in flight to one worker: start a thousand calls, then wait for all."""

from __future__ import annotations

import asyncio
import statistics

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import clock, timed

WINDOW = 1000
ROUNDS = 12
WARM_UP = 2


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        group = runtime.spawn(1)
        group.call("noop")

        async def awaited() -> list[float]:
            taken = []
            for _ in range(ROUNDS):
                start = clock()
                await group.burst_async("noop", WINDOW)
                taken.append(clock() - start)
            return taken

        waited = [timed(lambda: group.burst("noop", WINDOW)) for _ in range(ROUNDS)]
        figures = {"wait": waited, "await": asyncio.run(awaited())}
    finally:
        runtime.stop()
    return {name: WINDOW / statistics.median(taken[WARM_UP:]) for name, taken in figures.items()}


CASE = Case(
    "in_flight",
    "Calls in flight to one worker (raw: ZeroMQ, a chunk per loop iteration)",
    (
        Figure("await", "await", "/s", "higher", "pipeline", 0.35, 7.5 / 100, 0.8, 550_000),
        Figure("wait", "wait() from a plain script", "/s", "higher", "pipeline", 0.35, 7.5 / 100),
    ),
    measure,
)
