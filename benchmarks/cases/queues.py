"""A channel or queue from one worker to another: small items one at a time and pipelined, arrays of 1 MiB."""

from __future__ import annotations

import statistics

from benchmarks.model import Case, Figure, Figures, Runtime

MIB = 1 << 20
SETTINGS = {"single": (100, 1000, 1), "pipelined": (100, 5000, 500), "arrays": (MIB, 400, 16)}
"""Bytes of an item, number of items, number of items in flight."""
ROUNDS = 3
"""Number of runs; the first warms up."""


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        group = runtime.spawn(2)
        return {
            name: statistics.median([group.queue(*setting) for _ in range(ROUNDS)][1:])
            for name, setting in SETTINGS.items()
        }
    finally:
        runtime.stop()


CASE = Case(
    "queues",
    "Channel or queue, worker to worker (raw: ZeroMQ push to pull)",
    (
        Figure("single", "100 B, one at a time (raw: each acknowledged)", "/s", "higher", reach_ray=730 / 5000),
        Figure("pipelined", "100 B, pipelined", "/s", "higher", reach_ray=730 / 40_000),
        Figure("arrays", "1 MiB arrays, pipelined", "/s", "higher", reach_ray=182 / 5000),
    ),
    measure,
    driver_imports=("numpy",),
)
