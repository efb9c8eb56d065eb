"""Execution times by tag, which RLinf's metrics are made of: `Worker.timer` and `Worker.worker_timer`."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlinf_actors.hardware.profiler_windows import profiling_range
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.tracing import recorder

F = TypeVar("F", bound=Callable[..., Any])


class ExecutionTimes:
    """Seconds by tag. Times under one tag add up until they are popped. Any thread.

    Attributes:
        seconds: the times; the same dict until the end.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds
        self._lock = threading.Lock()

    def add(self, tag: str, seconds: float) -> None:
        """Add *seconds* to the time under *tag*."""
        with self._lock:
            self.seconds[tag] = self.seconds.get(tag, 0.0) + seconds

    def pop(self, tag: str) -> float:
        """Remove the time under *tag*, and return it in seconds.

        Raises:
            ValueError: no time was recorded under *tag*; the text lists the tags that have one.
        """
        with self._lock:
            if tag not in self.seconds:
                known = ", ".join(sorted(self.seconds)) or "none"
                raise ValueError(f"no time was recorded under {tag!r}; recorded tags: {known}")
            return self.seconds.pop(tag)

    def pop_all(self, tags: Iterable[str] | None = None) -> dict[str, float]:
        """Remove all times, or those under *tags*, and return them: seconds by tag."""
        with self._lock:
            found = {
                tag: self.seconds[tag] for tag in list(self.seconds if tags is None else tags) if tag in self.seconds
            }
            for tag in found:
                del self.seconds[tag]
            return found

    @contextmanager
    def measure(self, tag: str, category: str | None = None) -> Iterator[None]:
        """Add the time that the ``with`` block takes to *tag*.

        If *category* is given and this process is traced, the block is a span of that category in the trace.
        """
        active = recorder.active if category is not None else None
        span = active.begin(tag, category or "") if active is not None else 0
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(tag, time.perf_counter() - start)
            if active is not None:
                active.end(span)


@contextmanager
def _timing(worker: Any, tag: str, trace: bool) -> Iterator[None]:
    """Time a method of *worker*, and show it in the trace, and in the profile of a GPU profiler that records."""
    category = getattr(worker, "_group_name", "worker") if trace else None
    kind = getattr(worker, "_accelerator_type", AcceleratorType.NO_ACCEL)
    with worker._timers.measure(tag, category), profiling_range(kind, tag):
        yield


def timed(tag: str | None = None, trace: bool = True) -> Callable[[F], F]:
    """Return a decorator for a method of a worker, which records the method's time under *tag*, by default its name.

    The method may be a plain method, a coroutine, or a generator of either kind. ``trace=False`` leaves the method out
    of a trace.
    """

    def decorate(function: F) -> F:
        name = tag or function.__name__
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
                with _timing(self, name, trace):
                    return await function(self, *args, **kwargs)

            return run_async  # type: ignore[return-value]
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def run_stream(self: Any, *args: Any, **kwargs: Any) -> Any:
                with _timing(self, name, trace):
                    async for item in function(self, *args, **kwargs):
                        yield item

            return run_stream  # type: ignore[return-value]
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def run_generator(self: Any, *args: Any, **kwargs: Any) -> Any:
                with _timing(self, name, trace):
                    return (yield from function(self, *args, **kwargs))

            return run_generator  # type: ignore[return-value]

        @functools.wraps(function)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _timing(self, name, trace):
                return function(self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
