"""Clocks and medians."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

clock = time.perf_counter


def timed(action: Callable[[], object]) -> float:
    """Run *action* and return the seconds that it took."""
    start = clock()
    action()
    return clock() - start


def p50(action: Callable[[], object], count: int = 1000, warm_up: int = 200) -> float:
    """Return the median seconds of *count* runs of *action*, after *warm_up* runs that do not count."""
    for _ in range(warm_up):
        action()
    return statistics.median(timed(action) for _ in range(count))


async def p50_async(action: Callable[[], Awaitable[object]], count: int = 1000, warm_up: int = 200) -> float:
    """Do the same as `p50` for a coroutine function."""
    for _ in range(warm_up):
        await action()
    taken = []
    for _ in range(count):
        start = clock()
        await action()
        taken.append(clock() - start)
    return statistics.median(taken)


def later_half(taken: Sequence[float]) -> float:
    """Return the median of the second half, when buffers and pages are warm."""
    return statistics.median(taken[len(taken) // 2 :])


def steady(action: Callable[[], object], count: int) -> float:
    """Run *action* *count* times and return the median seconds of the second half."""
    return later_half([timed(action) for _ in range(count)])


def new_uvloop() -> asyncio.AbstractEventLoop | None:
    """Return a new event loop of uvloop, None without uvloop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop()


def calibrate() -> float:
    """Return the seconds of a fixed piece of pure Python, which are higher if other load disturbs a repetition."""

    def work() -> int:
        total = 0
        for i in range(1_000_000):
            total += i & 3
        return total

    return timed(work)
