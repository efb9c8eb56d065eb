"""The transfers of `transfers` over TCP between two hosts: two network namespaces joined by a cable. Needs root."""

from __future__ import annotations

from benchmarks.cases.transfers import RUNS, figures_of
from benchmarks.hosts import TwoHosts
from benchmarks.model import Case, Figure, Figures, Runtime


def measure(runtime: Runtime) -> Figures:
    with TwoHosts() as hosts:
        try:
            runtime.start_apart(hosts)
            return figures_of(runtime.spawn(2, torch=True))
        finally:
            runtime.stop()


def _rows(name: str, title: str) -> list[Figure]:
    reach = {256: 4 / 5.5}
    return [
        Figure(f"{name}_{size}", f"{title}, {size} MiB", "GB/s", "higher", f"frames_{size}", reach.get(size))
        for size in RUNS
    ]


CASE = Case(
    "transfers_tcp",
    "Torch CPU tensor, between two hosts, TCP (raw: ZeroMQ in 1 MiB frames)",
    (
        *_rows("tensor", "send_tensor, recv_tensor"),
        *_rows("object", "send, recv"),
        *(Figure(f"message_{size}", f"raw ZeroMQ in one message, {size} MiB", "GB/s", "higher") for size in RUNS),
        *(Figure(f"socket_{size}", f"raw socket, {size} MiB", "GB/s", "higher") for size in RUNS),
    ),
    measure,
)
