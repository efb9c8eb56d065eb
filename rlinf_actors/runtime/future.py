"""Work: something under way, with one outcome and two ways to wait for it.

House rules: the outcome is set once, on any thread; callbacks run on the thread that sets it, or
at once if it is there; nothing here is bound to an event loop, so that a test suite that makes a
loop per test, and a script without one, use the same object. Cancelling a task that awaits a
Work leaves the Work alone.

AsyncWork: what ``async_op=True`` gives.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from rlinf_actors import exhaustion, forks
from rlinf_actors.errors import CallTimeoutError, SerializationError, UsageError
from rlinf_actors.wire.limits import waiting

if TYPE_CHECKING:
    from rlinf_actors.net.loop import IoThread

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


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

THEN_THREADS = 8
"""How many functions given to `AsyncWork.then` may run at a time."""


class _Threads:
    """Runs functions on up to THEN_THREADS threads, which end when there is nothing to do."""

    def __init__(self) -> None:
        self.note_fork()
        forks.watch(self)

    def note_fork(self) -> None:
        """Begin with no threads, and nothing to do: what is due in the parent runs there."""
        self._lock = threading.Lock()
        self._due: collections.deque[Callable[[], None]] = collections.deque()
        self._running = 0

    def submit(self, function: Callable[[], None]) -> None:
        """Run it soon. Any thread."""
        with self._lock:
            self._due.append(function)
            if self._running == THEN_THREADS:
                return
            self._running += 1
        try:
            exhaustion.start(threading.Thread(target=self._run, name="rlinf-actors-then", daemon=True))
        except RuntimeError:
            with self._lock:
                self._running -= 1
                if self._running or function not in self._due:
                    return  # a thread that is there takes it
                self._due.remove(function)
            raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._running -= 1
                    return
                function = self._due.popleft()
            function()


_threads = _Threads()


class AsyncWork(Promise[T]):
    """An operation under way.

    ``work.wait(timeout=None)`` blocks, ``await work`` and ``await work.async_wait()`` do not; each gives
    the operation's result or raises its error, any number of times, in any thread and any event loop.
    ``work.done()`` tells whether it has ended. An error that nobody waited for is logged when
    the work is dropped; it does not change the exit code of a script.

    Attributes:
        options: what the operation was given as its options.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.options: Any = None
        self._seen = False

    @classmethod
    def of(cls, io: IoThread, coroutine: Coroutine[Any, Any, T], what: str) -> AsyncWork[T]:
        """Run a coroutine on the I/O thread's loop, and return a work that ends as it does. Any thread.

        The work keeps the outcome alone: dropping it, or cancelling who awaits it, leaves the coroutine running.

        Args:
            io: the I/O thread.
            coroutine: what to run.
            what: the operation, for messages.

        Raises:
            UsageError: the I/O thread has been stopped, or this process is a fork.
        """
        return cls.of_future(io.submit(coroutine), what)

    @classmethod
    def of_future(cls, future: concurrent.futures.Future[T], what: str) -> AsyncWork[T]:
        """Return a work that ends as what was submitted to the I/O thread does. Any thread."""
        work: AsyncWork[T] = AsyncWork(what)

        def ended(future: concurrent.futures.Future[T]) -> None:
            try:
                work.resolve(future.result())
            except concurrent.futures.CancelledError:
                work.reject(UsageError(f"{what} was not done: the Cluster of this process was shut down"))
            except BaseException as error:  # noqa: BLE001 - whatever it is, it reaches the waiter
                work.reject(error)

        future.add_done_callback(ended)
        return work

    @classmethod
    def on_thread(cls, function: Callable[[], T], what: str) -> AsyncWork[T]:
        """Run a function that blocks on a thread of its own, and return a work that ends as it does. Any thread."""
        work: AsyncWork[T] = AsyncWork(what)

        def run() -> None:
            try:
                value = function()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it reaches the waiter
                work.reject(error)
            else:
                work.resolve(value)

        exhaustion.start(threading.Thread(target=run, name=f"rlinf-actors {what}", daemon=True))
        return work

    @classmethod
    def made_of(cls, source: Work[S], make: Callable[[S], T], what: str) -> AsyncWork[T]:
        """Return a work that ends with *source*, and whose value is made of that one's.

        ``make(value)`` runs once, in the first thread that takes the outcome: what unpickles, or is the user's code,
        does not run on the I/O thread. An error of *source*, or of *make*, is the error of the work.
        """
        return _Made(source, make, what)

    @overload
    def then(self, fn: Callable[P, AsyncWork[R]], *args: P.args, **kwargs: P.kwargs) -> AsyncWork[R]: ...
    @overload
    def then(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> AsyncWork[R]: ...
    def then(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """Call ``fn(*args, **kwargs)`` once this has ended well, on a thread of the runtime's own.

        This work's result is not passed to *fn*. Functions given to the same work run side by side, in any
        order; at most 8 functions of a process run at a time, so one that needs another work returns that,
        and does not wait for it. Nothing has to hold the work that is returned: *fn* is called all the same.

        Returns:
            A new work, whose result is what *fn* returns; an AsyncWork that it returns is waited for, without
            a thread. An error of this work, or of *fn*, is the error of that one (logged if nobody waits for
            it), and *fn* is not called after one.
        """
        return _Then(self, fn, args, kwargs)

    def _want(self) -> None:
        """Somebody depends on the outcome, for good."""

    def _outcome(self) -> T:
        self._seen = True
        return super()._outcome()

    def __del__(self) -> None:
        error = self.__dict__.get("_error")
        if error is not None and not self._seen:
            log.error("%s failed, and nobody waited for it: %s: %s", self._what, type(error).__name__, error)


def _nothing() -> None:
    pass


_NOTHING: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = (_nothing, (), {})
_OVER: AsyncWork[Any] = AsyncWork("what is over")


class _Made(AsyncWork[T]):
    """See `AsyncWork.made_of`."""

    def __init__(self, source: Work[S], make: Callable[[S], T], what: str) -> None:
        super().__init__(what)
        self._source: Work[Any] = source
        self._make: Callable[[Any], T] = make
        self._making = threading.RLock()  # *make* may ask for the outcome of another work of this thread
        source._on_done(self._finish)

    def _before_blocking(self) -> None:
        self._source._before_blocking()

    def _outcome(self) -> T:
        with self._making:
            if not self._settled:
                try:
                    value = self._make(self._source._outcome())
                except BaseException as error:  # noqa: BLE001 - raised below, and each time it is asked for
                    self.reject(error)
                else:
                    self.resolve(value)
                self._source = _OVER  # its value may be large, and the work may be kept for long
        return super()._outcome()


class _Then(AsyncWork[Any]):
    """A function that follows a work."""

    _under_way: set[_Then] = set()  # a chain that nobody holds goes on
    _guard = forks.free_in_children(threading.Lock())

    def __init__(
        self, before: AsyncWork[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(f"{getattr(fn, '__name__', 'a function')}() after {before._what}")
        self._before: AsyncWork[Any] = before
        before._want()
        self._call = (fn, args, kwargs)
        with self._guard:
            self._under_way.add(self)
        before._on_done(self._start)

    def _start(self) -> None:
        self._submit(self._run)

    def _run(self) -> None:
        fn, args, kwargs = self._call
        self._call = _NOTHING  # what it holds may be large, and the work may be kept for long
        try:
            self._before.wait()
            value = fn(*args, **kwargs)
            if value is self:
                raise UsageError(f"{self._what} returned the very work that waits for it")
        except BaseException as error:  # noqa: BLE001 - whatever it is, it reaches the waiter
            self._end(None, error)
            return
        if isinstance(value, AsyncWork):
            self._before = value
            value._want()
            value._on_done(self._follow)
        else:
            self._end(value, None)

    def _follow(self) -> None:
        self._submit(self._take_over)

    def _submit(self, function: Callable[[], None]) -> None:
        try:
            _threads.submit(function)
        except RuntimeError as error:  # there can be no more threads: who waits for this is told
            self._end(None, error)

    def _take_over(self) -> None:
        try:
            value = self._before.wait()
        except BaseException as error:  # noqa: BLE001 - as above
            self._end(None, error)
            return
        self._end(value, None)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._guard:
            self._under_way.discard(self)
        self._before = _OVER  # as for the call
        if error is None:
            self.resolve(value)
        else:
            self.reject(error)
