"""Tracer: record spans of a job's timeline from user code. Public API, under RLinf's names."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from rlinf_actors.tracing import recorder

F = TypeVar("F", bound=Callable[..., Any])


class Tracer:
    """Record spans of this process for the trace of the job, which ``cluster.tracer: {enable: true}`` switches on.

    All methods may be called on any thread, in drivers and workers. Without tracing they do nothing. An event takes
    less than a microsecond, and nothing is sent: the driver collects the events at the end of the job.
    """

    @classmethod
    def trace_begin(cls, name: str, cat: str = "default", args: Mapping[str, Any] | None = None) -> None:
        """Record the start of a span. `trace_end` with the same name and category, on the same thread, ends it.

        Args:
            name: name of the span; a job should have hundreds of names, not thousands.
            cat: category, for the filter of the viewer.
            args: values to show, as far as JSON has them; more than 240 bytes are cut.
        """
        active = recorder.active
        if active is not None:
            active.begin(name, cat, args)

    @classmethod
    def trace_end(cls, name: str, cat: str = "default") -> None:
        """Record the end of the last span with this name and category that has begun on this thread."""
        active = recorder.active
        if active is not None:
            active.end_last(name, cat)

    @classmethod
    @contextmanager
    def trace_span(cls, name: str, cat: str = "default", args: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Record the ``with`` block as a span. The arguments are those of `trace_begin`."""
        active = recorder.active
        if active is None:
            yield
            return
        span = active.begin(name, cat, args)
        try:
            yield
        finally:
            active.end(span)

    @overload
    @classmethod
    def trace_func(cls, func_or_cat: F) -> F: ...

    @overload
    @classmethod
    def trace_func(cls, func_or_cat: str | None = None, cat: str = "default") -> Callable[[F], F]: ...

    @classmethod
    def trace_func(cls, func_or_cat: Any = None, cat: str = "default") -> Any:
        """Decorate a function or coroutine function, so that each call of it is a span with its name.

        Write ``@Tracer.trace_func``, ``@Tracer.trace_func()`` or ``@Tracer.trace_func(cat="actor")``.
        """
        category = func_or_cat if isinstance(func_or_cat, str) else cat

        def decorate(function: F) -> F:
            name = function.__name__
            if asyncio.iscoroutinefunction(function) or inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def traced_async(*args: Any, **kwargs: Any) -> Any:
                    with cls.trace_span(name, category):
                        return await function(*args, **kwargs)

                return traced_async  # type: ignore[return-value]

            @functools.wraps(function)
            def traced(*args: Any, **kwargs: Any) -> Any:
                with cls.trace_span(name, category):
                    return function(*args, **kwargs)

            return traced  # type: ignore[return-value]

        return decorate(func_or_cat) if callable(func_or_cat) else decorate
