"""Work: something under way, with one outcome and two ways to wait for it.

House rules: the outcome is set once, on any thread; callbacks run on the thread that sets it, or
at once if it is there; nothing here is bound to an event loop, so that a test suite that makes a
loop per test, and a script without one, use the same object. Cancelling a task that awaits a
Work leaves the Work alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from rlinf_actors import forks
from rlinf_actors.errors import CallTimeoutError, SerializationError
from rlinf_actors.wire.bounds import waiting

log = logging.getLogger(__name__)

T = TypeVar("T")

log = logging.getLogger(__name__)


def call_all(callbacks: Iterable[Callable[..., object]], *args: object) -> None:
    """Call each of them. One that raises is an internal error: it is logged, and the others are called all the same."""
    for callback in callbacks:
        try:
            callback(*args)
        except Exception:
            log.exception("internal error: %r failed", callback)


class Work(Generic[T]):
    """A one-shot outcome. Subclasses give it: `_outcome` returns the value or raises."""

    _what = "this"
    _finished = False
    _callbacks: tuple[Callable[[], object], ...] = ()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made_in = forks.generation()

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"it is the {type(self).__name__} of {self._what}, not its result: send the result, which await work or "
            "work.wait() gives"
        )

    def done(self) -> bool:
        """Whether the outcome is there. Never blocks."""
        return self._finished

    def wait(self, timeout: float | None = None) -> T:
        """Block until the outcome is there; return it or raise it.

        Args:
            timeout: seconds, None for no limit.

        Raises:
            CallTimeoutError: the time was up; the work goes on and can be waited for again.
            UsageError: this process was forked after the work began: only the parent will know the outcome.
            ValueError: *timeout* is no number.
        """
        timeout = waiting(timeout)
        if not self._finished:
            forks.check(self._made_in)
            self._before_blocking()
            loop = asyncio._get_running_loop()
            if loop is not None and loop.get_debug():
                log.warning("waiting for %s blocks a running event loop: await it, or use async_op=True", self._what)
            gate = threading.Lock()
            gate.acquire()
            release = gate.release
            self._on_done(release)
            if not gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
                self._forget(release)
                assert timeout is not None
                raise self._late(timeout)
        return self._outcome()

    async def async_wait(self) -> T:
        """As ``await``."""
        return await self

    def __await__(self) -> Generator[Any, None, T]:
        if not self._finished:
            forks.check(self._made_in)
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            def notify() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:
                    if not loop.is_closed():  # a closed loop has nobody left who waits
                        raise

            self._on_done(notify)
            try:
                yield from future
            finally:
                self._forget(notify)
        return self._outcome()

    async def _until_done(self) -> None:
        """Wait until the outcome is there, and leave it to others to take: nothing is unpickled or raised here."""
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        self._on_done(lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()

    def _outcome(self) -> T:
        raise NotImplementedError

    def _late(self, timeout: float) -> CallTimeoutError:
        """Return the error of a wait whose time is up; says what the work waits for, where that can be known."""
        return CallTimeoutError(f"{self._what} was not done within {timeout:g} s; it goes on")

    def _before_blocking(self) -> None:
        """Raise where blocking can never end."""

    def _on_done(self, callback: Callable[[], object]) -> None:
        """Call *callback* once the outcome is there; at once if it is."""
        with self._lock:
            if not self._finished:
                self._callbacks = (*self._callbacks, callback)
                return
        callback()

    def _forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._callbacks = tuple(known for known in self._callbacks if known is not callback)

    def _finish(self) -> bool:
        """Announce the outcome; False if it had been announced before."""
        with self._lock:
            if self._finished:
                return False
            self._finished = True
            callbacks, self._callbacks = self._callbacks, ()
        call_all(callbacks)
        return True


class Promise(Work[T]):
    """A Work whose owner sets the outcome.

    Args:
        what: what it stands for, for messages of timeouts.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._settled = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def resolve(self, value: T) -> bool:
        """Set the value; False if there is an outcome already. Any thread."""
        return self._set(value, None)

    def reject(self, error: BaseException) -> bool:
        """Set the error; False if there is an outcome already. Any thread."""
        return self._set(None, error)

    @property
    def error(self) -> BaseException | None:
        """The error, if that is the outcome."""
        return self._error

    def _set(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._settled:  # apart from _finished: of two threads that set it, one must not mix with the other
                return False
            self._settled = True
            self._value, self._error = value, error
            self._finished = True
            callbacks, self._callbacks = self._callbacks, ()
        call_all(callbacks)
        return True

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error.with_traceback(None)  # raised again and again, it would keep every caller's frames
        return self._value  # type: ignore[return-value]
