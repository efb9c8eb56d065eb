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


def _rows(name: str, title: str, limit: str, reach_limit: dict[int, float]) -> list[Figure]:
    reach_ray = {1: 0.3 / 4, 64: 0.6 / 14, 256: 0.5 / 14}
    return [
        Figure(
            f"{name}_{size}", f"{title}, {size} MiB", "GB/s", "higher", f"{limit}_{size}", reach_limit.get(size),
            reach_ray[size], 1 if name == "object" or size == 1 else None, 20 if limit == "shared" else None,
        )
        for size in RUNS
    ]  # fmt: skip


CASE = Case(
    "transfers",
    "Torch CPU tensor, worker to worker (raw: one copy into warm shared memory)",
    (
        *_rows("tensor", "send_tensor, recv_tensor (raw: memcpy)", "memcpy", {64: 0.7, 256: 0.7}),
        *_rows("object", "send, recv", "shared", {}),
        *(Figure(f"memcpy_{size}", f"raw memcpy, {size} MiB", "GB/s", "higher") for size in RUNS),
        *(Figure(f"zmq_{size}", f"raw ZeroMQ over ipc, {size} MiB", "GB/s", "higher") for size in RUNS),
    ),
    measure,
    driver_imports=("torch",),
)
