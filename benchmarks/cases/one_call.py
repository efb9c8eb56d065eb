"""One call at a time of an empty method of one worker."""

from __future__ import annotations

import asyncio

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import new_uvloop, p50, p50_async


def measure(runtime: Runtime) -> Figures:
    runtime.start()
    try:
        group = runtime.spawn(1)
        figures = {
            "wait": p50(lambda: group.call("noop")) * 1e6,
            "await": asyncio.run(p50_async(lambda: group.call_async("noop"))) * 1e6,
        }
        loop = new_uvloop()
        if loop is not None:
            try:
                figures["await_uvloop"] = loop.run_until_complete(p50_async(lambda: group.call_async("noop"))) * 1e6
            finally:
                loop.close()
    finally:
        runtime.stop()
    return figures


CASE = Case(
    "one_call",
    "One call, p50 (raw: ZeroMQ ping-pong)",
    (
        Figure("await", "await", "us", "lower", "ping_pong", 0.9, 560 / 130, reference=80),
        Figure("await_uvloop", "await, the driver's loop is uvloop", "us", "lower", "ping_pong", 0.9),
        Figure("wait", "wait() from a plain script", "us", "lower", "ping_pong", 0.6, 560 / 160),
    ),
    measure,
)
