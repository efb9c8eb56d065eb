"""A channel or queue from one worker to another: small items one at a time and pipelined, arrays of 1 MiB."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.model import Case, Figure, Figures, Runtime

MIB = 1 << 20
BIG = 1 << 14
"""Bytes from which an item is an array."""
SETTINGS = {"single": (100, 500, 1), "pipelined": (100, 5000, 500), "arrays": (MIB, 200, 16)}
"""Bytes of an item, least number of items, number of items in flight."""
SECONDS = 3.0
"""Seconds that a run takes, after a short one that warms up."""
ROOM = 2
"""Most items that wait in the queue, in multiples of the number in flight."""


def rate(run: Callable[[int, int, int], float], size: int, count: int, window: int) -> float:
    """Return the items per second of *run* (items of *size* bytes, their number, *window* in flight) over SECONDS."""
    first = run(size, count, window)
    return run(size, max(count, int(first * SECONDS)), window)


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        group = runtime.spawn(2)
        return {name: rate(group.queue, *setting) for name, setting in SETTINGS.items()}
    finally:
        runtime.stop()


CASE = Case(
    "queues",
    "Channel or queue, worker to worker (raw: ZeroMQ push to pull)",
    (
        Figure(
            "single",
            "100 B, one by one (raw: each acknowledged)",
            "/s",
            "higher",
            reach_limit=0.21,
            reach_ray=730 / 5000,
        ),
        Figure("pipelined", "100 B, pipelined", "/s", "higher", reach_prototype=0.8, reach_ray=730 / 40_000),
        Figure("arrays", "1 MiB arrays, pipelined", "/s", "higher", reach_prototype=1, reach_ray=182 / 5000),
    ),
    measure,
    driver_imports=("numpy",),
)
