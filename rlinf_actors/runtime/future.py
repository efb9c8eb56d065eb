"""Future: the result of an operation that may still be running. Subclasses here: Promise and AsyncWork.

The results of group calls, the readiness of a group, and pending gets and receives are all Futures. A Future has one
outcome, which is a value or an error and is set once, on any thread. A Future belongs to no event loop: plain scripts,
several threads and several loops may wait for the same Future. Cancelling a task that awaits a Future does not change
the Future.

Callbacks run on the thread that sets the outcome: most often the I/O thread, or a thread that waits and reads the
sockets meanwhile (`net.reading`). They must be short and must not run user code. Unpickling and user code run in
`_outcome`, on the thread that takes the outcome.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
import traceback
import weakref
from _thread import RLock  # that of threading is a Python function around it
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from rlinf_actors import exhaustion, forks
from rlinf_actors.errors import CallTimeoutError, SerializationError, UsageError
from rlinf_actors.last_line import last_line
from rlinf_actors.net import reading
from rlinf_actors.net.idle_select import IdleSelect
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.net.loop_reader import LoopReader
from rlinf_actors.runtime.outcome_frames import leave_out_outcome
from rlinf_actors.runtime.then_threads import then_threads
from rlinf_actors.runtime.timeout_facts import await_explain, explain, job_text
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire.protocol import waiting

if TYPE_CHECKING:
    from rlinf_actors.net.loop import IoThread
    from rlinf_actors.runtime.peer import Peer

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def call_all(callbacks: Iterable[Callable[..., object]], *args: object) -> None:
    """Call each callback with *args*. If a callback raises, log an internal error and go on with the next callback."""
    for callback in callbacks:
        try:
            callback(*args)
        except Exception:
            log.exception("internal error: %r failed", callback)


class Future(Generic[T]):
    """The result of an operation that may still be running; base of what group calls, receives and gets return.

    A Future ends once, with a value or an error. Any number of threads and tasks may wait for it.

    A subclass ends the Future by `_finish`. If the subclass sets ``_lazy = True``, `_make_result` converts the value
    into the result, once, on the first thread that waits for the result.

    Args:
        what: name of the operation, for errors and log lines.
    """

    # defaults of the class: a process may make 100,000 futures a second, and few of them set all of these
    _finished = False
    _value: Any = None
    _error: BaseException | None = None
    _callbacks: tuple[Callable[[], object], ...] = ()
    _lazy = False
    _by_loop = False  # the I/O thread's loop alone handles what ends it: a thread that waits need not read the sockets
    _trace: TracebackType | None = None  # of the conversion that raised `_error`
    _seen = False  # the outcome was taken: the error of an AsyncWork need not be logged

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._made_in = forks.generation
        if self._lazy:
            self._converting = RLock()  # `_make_result` may take the outcome of another future of this thread

    # --- waiting ---

    def done(self) -> bool:
        """Return True if the operation has ended, with a result or an error. Never blocks."""
        return self._finished

    def wait(self, timeout: float | None = None) -> T:
        """Block until the operation has ended; then return its result or raise its error.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            CallTimeoutError: *timeout* has passed. The operation goes on and can be waited for again.
            UsageError: this process was forked after the operation began; only the parent process gets the outcome.
            ValueError: *timeout* is not a number.
        """
        if timeout is not None:
            timeout = waiting(timeout)
        if not self._finished:
            forks.check(self._made_in)
            self._check_blocking()
            loop = asyncio._get_running_loop()
            if loop is not None and loop.get_debug():
                log.warning("waiting for %s blocks a running event loop: await it, or use async_op=True", self._what)
            tracing = recorder.active
            span = tracing.begin(f"wait for {self._what}", flows.WAIT) if tracing is not None and tracing.waits else 0
            done = self._block_until_done(timeout)
            if tracing is not None and span:
                tracing.end(span)
            if last_line.shown:
                last_line.clear()  # else what the caller prints next would stand behind it
            if not done:
                assert timeout is not None
                raise self._timeout_error(timeout)
        try:
            return self._outcome()
        except BaseException as error:
            explain(self, error)
            del self
            leave_out_outcome(error)
            raise error

    def _block_until_done(self, timeout: float | None) -> bool:
        """Block until the operation has ended, and read the sockets meanwhile. Return False if the time is over."""
        since = time.monotonic()  # noqa: F841 - runtime.waits reads it in this frame
        active = reading.active
        if active is not None and not self._by_loop:
            holder = object()
            try:
                if active.take(holder):
                    self._on_done(active.ring)
                    done = active.wait(self.done, timeout)
                    self._leave(active, holder)
                    if done or reading.active is active:
                        return done
            except BaseException:  # a signal handler, too, may raise, and anywhere
                self._leave(active, holder)
                raise
        gate = threading.Lock()  # another thread reads, or the I/O thread
        gate.acquire()
        opened = gate.release
        try:
            self._on_done(opened)
            return gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            if not self._finished:
                self._forget(opened)

    def _leave(self, active: reading.Reading, holder: object) -> None:
        """Give back the turn if *holder* has it."""
        if not self._finished and active.holds(holder):
            self._forget(active.ring)  # first: the next thread that has the turn may ask for the same
        active.leave(holder)

    async def async_wait(self) -> T:
        """Wait for the result without blocking the event loop. The same as ``await`` on this object."""
        try:
            return await self
        finally:
            del self

    def __await__(self) -> Generator[Any, None, T]:
        if not self._finished:
            forks.check(self._made_in)
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()
            since = time.monotonic()  # noqa: F841 - runtime.waits reads it in this frame

            def wake() -> None:
                if not woken.done():
                    woken.set_result(None)

            idle = None if self._by_loop else IdleSelect.of(loop) or LoopReader.of(loop)

            def notify() -> None:
                if idle is not None and asyncio._get_running_loop() is loop:  # which has read the result itself
                    wake()
                else:
                    call_threadsafe(loop, wake)

            self._on_done(notify)
            if idle is not None:
                idle.awaited += 1
            try:
                yield from woken
            finally:
                if last_line.shown:
                    last_line.clear()
                if idle is not None:
                    idle.awaited -= 1
                if not self._finished:  # cancelled
                    self._forget(notify)
        try:
            return self._outcome()
        except BaseException as error:
            yield from await_explain(self, error)
            del self
            leave_out_outcome(error)
            raise error

    def _outcome(self) -> T:
        """Return the result or raise the error of an operation that has ended. Must not be called earlier."""
        self._seen = True
        if self._lazy:
            with self._converting:
                if self._lazy and self._error is None:
                    try:
                        self._value = self._make_result(self._value)
                    except BaseException as error:  # noqa: BLE001 - raised below, and each time it is asked for
                        traceback.clear_frames(error.__traceback__)  # their locals hold the memory of the message
                        self._value, self._error, self._trace = None, error, error.__traceback__
                    self._lazy = False
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # raised again and again, it would keep every caller's frames
        value: T = self._value
        return value

    def _make_result(self, value: Any) -> T:
        """Return the result made of *value*. Each subclass with ``_lazy = True`` implements this.

        If this raises, the operation has failed with that error.
        """
        raise NotImplementedError

    def _timeout_error(self, timeout: float) -> CallTimeoutError:
        return CallTimeoutError(f"{self._what} was not done within {timeout:g} s; it goes on{job_text(timeout)}")

    def _ranks(self) -> tuple[Sequence[Peer], Sequence[Peer]]:
        """Return the ranks that have not answered, and those that have. Any thread; no lock."""
        return (), ()

    def _waited_for(self) -> tuple[str, Sequence[str]]:
        """Return the operation, and the workers that must act for it to end, as far as known. Any thread; no lock."""
        return self._what, ()

    def _check_blocking(self) -> None:
        """Raise UsageError if the operation itself needs this thread, so that a wait on this thread would never end."""

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"it is the {type(self).__name__} of {self._what}, not its result: send the result, which await work or "
            "work.wait() gives"
        )

    # --- the owner's side ---

    def _finish(self, value: Any = None, error: BaseException | None = None) -> bool:
        with self._lock:
            if self._finished:
                return False
            self._value, self._error, self._finished = value, error, True
            callbacks, self._callbacks = self._callbacks, ()
        call_all(callbacks)
        return True

    def _on_done(self, callback: Callable[[], object]) -> None:
        """Call *callback* when the operation ends; at once if it has already ended."""
        with self._lock:
            if not self._finished:
                self._callbacks = (*self._callbacks, callback)
                return
        callback()

    def _forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._callbacks = (*[known for known in self._callbacks if known is not callback],)


def finish_all(futures: Sequence[Future[Any]], values: Iterable[Any]) -> None:
    """End several operations, each with its value, and then call their callbacks: a thread is woken when all are done.

    An operation that has ended already is not changed.
    """
    callbacks: list[Callable[[], object]] = []
    for future, value in zip(futures, values, strict=False):
        with future._lock:
            if not future._finished:
                future._value, future._finished = value, True
                callbacks += future._callbacks
                future._callbacks = ()
    call_all(callbacks)


class Promise(Future[T]):
    """A Future that any code may end: by `resolve` with a value, or by `reject` with an error."""

    def resolve(self, value: T) -> bool:
        """End the operation with *value*. Return False, and change nothing, if it had already ended. Any thread."""
        return self._finish(value)

    def reject(self, error: BaseException) -> bool:
        """End the operation with *error*. Return False, and change nothing, if it had already ended. Any thread."""
        return self._finish(None, error)

    @property
    def error(self) -> BaseException | None:
        """The error with which the operation ended; None if it has not ended, or has ended with a value."""
        return self._error


class AsyncWork(Promise[T]):
    """A running operation, as methods return it for ``async_op=True``.

    ``work.wait(timeout=None)`` blocks; ``await work`` and ``await work.async_wait()`` do not block. Each returns the
    operation's result or raises its error, any number of times, on any thread and in any event loop. Cancelling a task
    that awaits the work does not cancel the operation. If the operation fails and no code waits for it, the error is
    logged when the work is garbage-collected; the exit code of the script does not change.

    Attributes:
        options: the options that were given to the operation, None if there are none.
    """

    options: Any = None
    _next: weakref.ref[AsyncWork[Any]] | None = None

    @classmethod
    def of(cls, io: IoThread, coroutine: Coroutine[Any, Any, T], what: str) -> AsyncWork[T]:
        """Start *coroutine* on the I/O thread, and return an AsyncWork that ends with its result. Any thread.

        If the caller drops the returned work, the coroutine goes on. *what* names the operation in errors.

        Raises:
            UsageError: the I/O thread was stopped, or this process is a fork.
        """
        return cls.of_future(io.submit(coroutine), what)

    @classmethod
    def of_future(cls, future: concurrent.futures.Future[T], what: str) -> AsyncWork[T]:
        """Return an AsyncWork that ends when *future* ends, with the same value or error. Any thread.

        *future* must come from the I/O thread. If it is cancelled, the error says that the Cluster was shut down.
        *what* names the operation in errors.
        """
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
        """Run *function*, which may block, on a new thread, and return an AsyncWork that ends with its result."""
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
    def made_of(cls, source: Future[S], make: Callable[[S], T], what: str) -> AsyncWork[T]:
        """Return an AsyncWork that ends when *source* ends; its result is ``make(result of source)``.

        *make* runs once, on the first thread that waits for the result, so it may unpickle and call user code. If
        *source* or *make* fails, the work fails with the same error. *what* names the operation in errors.
        """
        return _Mapped(source, make, what)

    @overload
    def then(self, fn: Callable[P, AsyncWork[R]], *args: P.args, **kwargs: P.kwargs) -> AsyncWork[R]: ...
    @overload
    def then(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> AsyncWork[R]: ...
    def then(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncWork[Any]:
        """Call ``fn(*args, **kwargs)`` on a thread of the runtime after this work has succeeded.

        This work's result is not passed to *fn*. Functions given to the same work run in parallel, in any order. At
        most 8 such functions run at a time in a process. A function that needs another AsyncWork should return that
        work instead of waiting for it. *fn* is called even if the returned work is dropped.

        Args:
            fn: the function. If it returns an AsyncWork, the work that `then` returns ends with the same outcome.
            *args: positional arguments of *fn*.
            **kwargs: keyword arguments of *fn*.

        Returns:
            An AsyncWork with the result of *fn*. If this work fails, *fn* is not called, and the returned work fails
            with the same error. The error is logged if no code waits for it.
        """
        then = ChainedWork(self, functools.partial(fn, *args, **kwargs), getattr(fn, "__name__", "a function"))
        self._next = weakref.ref(then)  # which itself keeps this work
        return then

    def get_next_work(self) -> AsyncWork[Any] | None:
        """Return what the last `then` on this work returned; None without one, or if it has ended and was dropped."""
        return None if self._next is None else self._next()

    def get_last_work(self) -> AsyncWork[Any]:
        """Return the end of the chain that `then` has made of this work; this work itself without `then`."""
        last: AsyncWork[Any] = self
        while (following := last.get_next_work()) is not None:
            last = following
        return last

    def _want(self) -> None:
        """Called by `then`, which needs the outcome of this work even if no code waits for the work.

        Does nothing here. A pending receive overrides it.
        """

    def __del__(self) -> None:
        error = self._error
        if error is not None and not self._seen:
            log.error("%s failed, and nobody waited for it: %s: %s", self._what, type(error).__name__, error)


class _Mapped(AsyncWork[T]):
    _lazy = True

    def __init__(self, source: Future[S], make: Callable[[S], T], what: str) -> None:
        super().__init__(what)
        self._source: Future[Any] | None = source
        self._make = make
        source._on_done(self._finish)

    def _make_result(self, value: Any) -> T:
        source, self._source = self._source, None  # its value may be large, and the work may be kept for long
        assert source is not None
        return self._make(source._outcome())

    def _check_blocking(self) -> None:
        source = self._source
        if source is not None:
            source._check_blocking()


class ChainedWork(AsyncWork[Any]):
    """What `AsyncWork.then` returns: the work that ends when the function has returned."""

    _unfinished: set[ChainedWork] = set()  # keeps a chain alive that the user has dropped
    _guard = forks.free_in_children(threading.Lock())

    def __init__(self, before: AsyncWork[Any], call: Callable[[], Any], name: str) -> None:
        super().__init__(f"{name}() after {before._what}")
        self._call: Callable[[], Any] | None = call
        with self._guard:
            self._unfinished.add(self)
        self._follow(before)

    def _follow(self, work: AsyncWork[Any]) -> None:
        self._before: AsyncWork[Any] | None = work
        work._want()
        work._on_done(self._submit)

    def _submit(self) -> None:
        try:
            then_threads.submit(self._run)
        except RuntimeError as error:  # no more threads can be started
            self._end(None, error)

    def _run(self) -> None:
        """Call the function that `then` was given, and end this work with what the function returns or raises.

        If the preceding work has failed, the function is not called, and this work fails with the same error. If the
        function returns an AsyncWork, this work ends when the returned work does, with the same outcome.
        """
        call, self._call = self._call, None  # its arguments may be large, and the work may be kept for long
        try:
            assert self._before is not None
            value = self._before.wait()
            if call is not None:
                value = call()
            if value is self:
                raise UsageError(f"{self._what} returned the very work that waits for it")
        except BaseException as error:  # noqa: BLE001 - whatever it is, it reaches the waiter
            self._end(None, error)
            return
        if call is not None and isinstance(value, AsyncWork):
            self._follow(value)
        else:
            self._end(value, None)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._guard:
            self._unfinished.discard(self)
        self._before = None  # its value may be large too
        self._finish(value, error)
