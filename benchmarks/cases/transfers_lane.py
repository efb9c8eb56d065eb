"""The transfers of `transfers` through a lane: a gloo process group of the two workers. With GPUs NCCL is used."""

from __future__ import annotations

from benchmarks.cases.transfers import RUNS, measure
from benchmarks.model import Case, Figure

CASE = Case(
    "transfers_lane",
    "Torch CPU tensor, worker to worker, by a lane (raw: gloo's send and recv)",
    (
        *(
            Figure(f"tensor_{size}", f"send_tensor, recv_tensor, {size} MiB", "GB/s", "higher", f"gloo_{size}")
            for size in RUNS
        ),
        *(Figure(f"object_{size}", f"send, recv, {size} MiB", "GB/s", "higher", f"gloo_{size}") for size in RUNS),
    ),
    measure,
    driver_imports=("torch",),
    environment={"RLINF_ACTORS_PATHS": "cpu=lane", "GLOO_SOCKET_IFNAME": "lo"},
    without=("ray",),
)
