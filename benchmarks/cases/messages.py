"""Round trips of messages between two workers: a small object, and numpy arrays."""

from __future__ import annotations

import statistics

from benchmarks.model import Case, Figure, Figures, Runtime

MIB = 1 << 20
SMALL = 1000
RUNS = {1: 60, 64: 10, 256: 6}
"""Size in MiB to number of round trips; the first half warms up."""


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        group = runtime.spawn(2)
        figures = {"round_trip": statistics.median(group.exchange(0, SMALL)[SMALL // 4 :]) * 1e6}
        for size, runs in RUNS.items():
            taken = statistics.median(group.exchange(size * MIB, runs)[runs // 2 :])
            figures[f"exchange_{size}"] = 2 * size * MIB / taken / 1e9
    finally:
        runtime.stop()
    return figures


CASE = Case(
    "messages",
    "Messages between two workers, there and back (raw: ZeroMQ ping-pong, memcpy)",
    (
        Figure("round_trip", "a small object", "us", "lower", "ping_pong", 1.3, reference=80),
        Figure("exchange_1", "numpy, 1 MiB", "GB/s", "higher", "memcpy_1"),
        Figure("exchange_64", "numpy, 64 MiB", "GB/s", "higher", "memcpy_64"),
        Figure("exchange_256", "numpy, 256 MiB", "GB/s", "higher", "memcpy_256"),
    ),
    measure,
    driver_imports=("numpy",),
)
