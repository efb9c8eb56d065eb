"""One-way transfers of torch CPU tensors between two workers, timed by a clock that both read."""

from __future__ import annotations

from benchmarks.model import Case, Figure, Figures, Group, Runtime
from benchmarks.timing import later_half

MIB = 1 << 20
RUNS = {1: 60, 64: 10, 256: 6}
"""Size in MiB to number of transfers; the first half warms up."""


def figures_of(group: Group) -> Figures:
    figures = {}
    for name, kept in (("tensor", True), ("object", False)):
        for size, runs in RUNS.items():
            figures[f"{name}_{size}"] = size * MIB / later_half(group.transfer(kept, size * MIB, runs)) / 1e9
    return figures


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        return figures_of(runtime.spawn(2, torch=True))
    finally:
        runtime.stop()


def _rows(name: str, title: str) -> list[Figure]:
    reach = {1: (4 / 20, 0.3 / 4), 64: (14 / 20, 0.6 / 14), 256: (14 / 20, 0.5 / 14)}
    return [
        Figure(f"{name}_{size}", f"{title}, {size} MiB", "GB/s", "higher", f"shared_{size}", *reach[size])
        for size in RUNS
    ]


CASE = Case(
    "transfers",
    "Torch CPU tensor, worker to worker (raw: one copy into warm shared memory)",
    (
        *_rows("tensor", "send_tensor, recv_tensor"),
        *_rows("object", "send, recv"),
        *(Figure(f"memcpy_{size}", f"raw memcpy, {size} MiB", "GB/s", "higher") for size in RUNS),
        *(Figure(f"zmq_{size}", f"raw ZeroMQ over ipc, {size} MiB", "GB/s", "higher") for size in RUNS),
    ),
    measure,
    driver_imports=("torch",),
)
