"""AsyncWork: what ``async_op=True`` gives."""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from rlinf_actors import forks, scarce
from rlinf_actors.errors import UsageError
from rlinf_actors.runtime.work import Promise, Work

if TYPE_CHECKING:
    from rlinf_actors.net.loop import IoThread

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
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
            scarce.start(threading.Thread(target=self._run, name="rlinf-actors-then", daemon=True))
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

        scarce.start(threading.Thread(target=run, name=f"rlinf-actors {what}", daemon=True))
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
