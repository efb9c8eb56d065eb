"""Clocks and medians."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

clock = time.perf_counter


def timed(action: Callable[[], object]) -> float:
    """Seconds that *action* takes."""
    start = clock()
    action()
    return clock() - start


def p50(action: Callable[[], object], count: int = 1000, warm_up: int = 200) -> float:
    """Median of the seconds that *action* takes."""
    for _ in range(warm_up):
        action()
    return statistics.median(timed(action) for _ in range(count))


async def p50_async(action: Callable[[], Awaitable[object]], count: int = 1000, warm_up: int = 200) -> float:
    """The same for a coroutine function."""
    for _ in range(warm_up):
        await action()
    taken = []
    for _ in range(count):
        start = clock()
        await action()
        taken.append(clock() - start)
    return statistics.median(taken)


def later_half(taken: Sequence[float]) -> float:
    """Median of the second half: buffers and pages are warm by then."""
    return statistics.median(taken[len(taken) // 2 :])


def steady(action: Callable[[], object], count: int) -> float:
    """The same of *count* runs."""
    return later_half([timed(action) for _ in range(count)])


def new_uvloop() -> asyncio.AbstractEventLoop | None:
    """A loop of uvloop's, None where there is none."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop()


def calibrate() -> float:
    """Seconds of a fixed piece of pure Python: tells a disturbed repetition from a good one."""

    def work() -> int:
        total = 0
        for i in range(1_000_000):
            total += i & 3
        return total

    return timed(work)
