"""The decorators of worker methods `idempotent` and `concurrent`, exported as ``Worker.idempotent`` and
``Worker.concurrent``, and the functions by which group.class_facts reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlinf_actors.errors import UsageError

F = TypeVar("F")  # without a bound: a classmethod is not callable before it belongs to a class

_IDEMPOTENT = "__rlinf_actors_idempotent__"
_CONCURRENT = "__rlinf_actors_concurrent__"


def idempotent(method: F) -> F:
    """Decorate a worker method that may run more than once for one call, with the same outcome as if it ran once.

    ``group.with_retries(n)`` repeats calls of such methods after the death of a worker. Any other method runs at most
    once per call. A subclass that overrides an idempotent method has to decorate its own method again.

    Raises:
        UsageError: the decorated object is not a method.
    """
    setattr(_function(method, "idempotent"), _IDEMPOTENT, True)
    return method


def concurrent(threads: int = 1) -> Callable[[F], F]:
    """Return a decorator for a worker method that runs on threads of its own, in parallel with the worker's other
    methods.

    Such a method answers while the main thread is busy. It shares the worker's instance with the other methods, so
    state that both use needs a lock. A call waits while all threads of the method are busy.

    Args:
        threads: number of calls of this method that may run at a time in one worker, 1 or more.

    Raises:
        UsageError: *threads* is not a whole number of 1 or more, or the decorated object is not a method.
    """
    if callable(threads):
        raise UsageError("concurrent is a decorator with an argument: write @Worker.concurrent()")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads is {threads!r}; @Worker.concurrent(threads=...) takes a whole number, 1 or more")

    def decorate(method: F) -> F:
        setattr(_function(method, "concurrent"), _CONCURRENT, threads)
        return method

    return decorate


DECORATORS = (idempotent, concurrent)


def is_idempotent(method: object) -> bool:
    """True if *method* is decorated with `idempotent`.

    Decorators above `idempotent` do not hide this if they use functools.wraps.
    """
    return bool(getattr(method, _IDEMPOTENT, False))


def threads_of(method: object) -> int:
    """Return the number of threads that `concurrent` gives *method*; 0 if *method* does not have that decorator."""
    return int(getattr(method, _CONCURRENT, 0))


def _function(method: object, mark: str) -> Any:
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    if not callable(function) or isinstance(function, type):
        raise UsageError(f"@Worker.{mark} marks methods, and {method!r} is none: put it above a def")
    return function
