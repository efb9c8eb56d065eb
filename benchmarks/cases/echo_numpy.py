"""Echo of a numpy array by one worker. Bytes of both directions count."""

from __future__ import annotations

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import steady

MIB = 1 << 20
RUNS = {1: 60, 64: 10, 256: 6}
"""Size in MiB to number of echoes; the first half warms up."""


def measure(runtime: Runtime) -> Figures:
    import numpy as np

    runtime.start()
    figures = {}
    try:
        group = runtime.spawn(1)
        for size, runs in RUNS.items():
            array = np.ones(size * MIB, np.uint8)
            back = group.call("echo", array)[0]
            if not np.array_equal(array, back):
                raise RuntimeError(f"the echo of {size} MiB differs from what was sent")
            del back
            taken = steady(lambda array=array: group.call("echo", array), runs)
            figures[f"echo_{size}"] = 2 * array.nbytes / taken / 1e9
    finally:
        runtime.stop()
    return figures


CASE = Case(
    "echo_numpy",
    "Echo of a numpy array, both ways (raw: memcpy of it)",
    (
        Figure("echo_1", "1 MiB", "GB/s", "higher", "memcpy_1", 6 / 60, 0.8 / 6),
        Figure("echo_64", "64 MiB", "GB/s", "higher", "memcpy_64", 12 / 20, 7.6 / 12),
        Figure("echo_256", "256 MiB", "GB/s", "higher", "memcpy_256", 12 / 20, 1.3 / 12),
    ),
    measure,
    driver_imports=("numpy",),
)
