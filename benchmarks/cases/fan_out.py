"""One call on every worker of a group: median time until all have answered."""

from __future__ import annotations

import asyncio

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import p50, p50_async

COUNT = 300
WARM_UP = 50


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    figures = {}
    try:
        for size in (8, 32):
            group = runtime.spawn(size)
            group.call("noop")
            figures[f"wait_{size}"] = p50(lambda group=group: group.call("noop"), COUNT, WARM_UP) * 1e6
            awaited = p50_async(lambda group=group: group.call_async("noop"), COUNT, WARM_UP)
            figures[f"await_{size}"] = asyncio.run(awaited) * 1e6
            group.release()
    finally:
        runtime.stop()
    return figures


CASE = Case(
    "fan_out",
    "Fan-out, p50 (raw: one ZeroMQ ping-pong)",
    (
        Figure("await_8", "to 8, await", "us", "lower", "ping_pong", None, 2.6 / 0.45, 1),
        Figure("wait_8", "to 8, wait()", "us", "lower", "ping_pong", reach_ray=2.6 / 0.45),
        Figure("await_32", "to 32, await", "us", "lower", "ping_pong", None, 13 / 1.5, 1),
        Figure("wait_32", "to 32, wait()", "us", "lower", "ping_pong", reach_ray=13 / 1.5),
        Figure("zmq_8", "raw ZeroMQ to 8 processes", "us"),
        Figure("zmq_32", "raw ZeroMQ to 32 processes", "us"),
    ),
    measure,
)
