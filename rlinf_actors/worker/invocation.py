"""One call in a worker: its arguments, its deadline or stream window, and its one answer.

The server makes an Invocation on the I/O thread. An executor runs it on a thread of user code, which also sends the
answer. An error of user code is the answer of the call. If user code forks, the child process ends when it returns from
the method (`forks.end_child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from rlinf_actors import counters, forks
from rlinf_actors.errors import SerializationError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.loop import call_soon
from rlinf_actors.runtime import task_chains
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import NO_PARTS, AuthenticatedParts
from rlinf_actors.worker.standstill import Unwound

log = logging.getLogger(__name__)

T = TypeVar("T")
Reply = Callable[["Invocation", frames.AnyFrame, Sequence[Buffer]], None]

_NOT_A_GENERATOR = "{}() does not stream: it is not a generator"
_TO_STREAM = (
    "To stream its items make {}() itself a generator: write 'yield from ...' in place of 'return ...', in a decorator "
    "of it too; or return a list"
)


class CallExpiredError(Exception):
    """Raised if the caller's deadline has passed before the call begins. Only this module raises and catches it."""


class CallRefusedError(Exception):
    """Raised if the called method does not exist or is private. Only this module raises and catches it."""


def _end_if_forked(here: int, what: str, error: BaseException | None = None) -> None:
    """End this process if user code has forked it since `forks.generation` was *here*.

    *what* names the user's code, and *error* is the exception that it raised; both are for the message on stderr.
    """
    if forks.generation != here:
        forks.end_child(what, error)


@types.coroutine
def own_steps(coroutine: Coroutine[Any, Any, T], what: str) -> Generator[Any, Any, T]:
    """Await *coroutine*, which is code of the user, and return its result.

    If the coroutine forks the process, end the forked process before it can run the event loop. *what* names the
    coroutine in messages.
    """
    here = forks.generation
    advance: Callable[[Any], Any] = coroutine.send
    given: Any = None
    while True:
        _end_if_forked(here, what)  # another task has forked in this turn of the loop
        try:
            wanted = advance(given)
        except StopIteration as end:
            _end_if_forked(here, what)
            returned: T = end.value
            return returned
        except BaseException as error:
            _end_if_forked(here, what, error)
            raise
        finally:
            given = None  # else an exception lives on in the traceback of this frame
        _end_if_forked(here, what)
        try:
            given = yield wanted
            advance = coroutine.send
        except BaseException as error:  # noqa: BLE001 - passed on to the coroutine, such as a cancellation
            advance, given = coroutine.throw, error


task_chains.ADVANCES[own_steps.__code__] = "coroutine"


class Invocation(msgspec.Struct, eq=False):
    """One call that a peer made to this worker, or one stream if *window* is not 0. An executor runs it.

    The I/O thread sets `cancelled` when the caller gives up. An executor does not start a cancelled call. An executor
    that can interrupt a running call sets `stop`, and `cancel` then calls `stop`.
    """

    peer: bytes
    id: int
    method: str
    parts: AuthenticatedParts
    _reply: Reply
    _copy: payload.Copy
    deadline: float  # CLOCK_MONOTONIC, in seconds; 0 for none
    window: int
    cancelled: bool = False
    began: float = 0.0  # CLOCK_MONOTONIC, in seconds
    stop: Callable[[], object] | None = None
    _credited: int = 0  # written by the I/O thread alone
    _wake: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Stop the call, because its caller no longer waits for the answer. I/O thread only."""
        self.cancelled = True
        if self.stop is not None:
            self.stop()

    def credit(self, n: int) -> None:
        """Let the stream send *n* more items. I/O thread only."""
        self._credited += n
        wake = self._wake  # the stream may end meanwhile, on its thread
        if wake is not None:
            wake()

    def _bind(self, instance: Any) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """Return the called method of *instance*, the positional arguments and the keyword arguments.

        Raises:
            CallExpiredError: the caller's deadline has passed.
            CallRefusedError: the method does not exist or is private.
            BaseException: the error of unpickling the arguments.
        """
        if self.deadline and time.monotonic() > self.deadline:
            raise CallExpiredError(f"{self.method}() was not started: the caller's time was over before its turn came")
        if self.method.startswith("_") and self.method != "_close":
            raise CallRefusedError(f"{self.method}() is private and cannot be called from outside")
        method = getattr(instance, self.method, None)
        if not callable(method):
            raise CallRefusedError(f"{type(instance).__name__} has no method {self.method}()")
        if self.parts is NO_PARTS:
            return method, (), {}
        args, kwargs = payload.decode_call(self.parts)
        self.parts = NO_PARTS
        return method, args, kwargs

    def succeed(self, value: Any, seconds: float) -> None:
        """Send *value* to the caller as the result of the call. If *value* cannot be pickled, send the error instead.

        *seconds* is the time that the method ran; the caller gets it too.
        """
        counters.call_done(self.method, seconds)
        if value is None:
            self._reply(self, frames.Ok(self.id, seconds), ())
            return
        try:
            parts = payload.encode(value, f"the result of {self.method}()", copy=self._copy)
        except SerializationError as error:
            if hasattr(value, "__next__") or hasattr(value, "__anext__"):
                error = SerializationError(f"{error}. {_TO_STREAM.format(self.method)}", path=error.path)
            self.fail(error)
            return
        except Unwound:
            raise
        except BaseException as error:  # noqa: BLE001 - raised by the user's code in pickle; this thread has more calls to answer
            self.fail(error)
            return
        self._reply(self, frames.Ok(self.id, seconds), parts)

    def fail(self, error: BaseException) -> None:
        counters.call_failed(self.method)
        if self.window and self.cancelled and not isinstance(error, asyncio.CancelledError):
            log.warning("%s() raised after its caller had left the stream", self.method, exc_info=error)
        if isinstance(error, CallExpiredError):
            self._reply(self, frames.Raised(self.id, "expired", "TimeoutError", str(error)), ())
        elif isinstance(error, CallRefusedError):
            self._reply(self, frames.Raised(self.id, "usage", "UsageError", str(error)), ())
        else:
            self._reply(self, *failure.encode(self.id, error))

    def run(self, instance: Any) -> None:
        """Call the method on this thread, and send its result, items or exception to the caller.

        The method is a plain function, or a plain generator whose items are streamed.
        """
        if self.cancelled:
            return
        self.began = start = time.perf_counter()
        here = forks.generation
        try:
            method, args, kwargs = self._bind(instance)
            start = time.perf_counter()
            value = method(*args, **kwargs)
            if self.window:
                self._stream_here(value, here)
                value = None
        except Unwound:  # the lease of a robot worker is over: this thread begins nothing more
            raise
        except BaseException as error:  # noqa: BLE001 - the caller gets every error; the worker lives on
            _end_if_forked(here, f"{self.method}()", error)
            self.fail(error)
            return
        if forks.generation != here:
            forks.end_child(f"{self.method}()", None)
        self.succeed(value, time.perf_counter() - start)

    def _stream_here(self, items: Any, here: int) -> None:
        """Send the items of a plain generator to the caller, and close it. This thread waits for credit."""
        if not isinstance(items, Generator):
            raise CallRefusedError(_NOT_A_GENERATOR.format(self.method))
        room: queue.SimpleQueue[None] = queue.SimpleQueue()  # has no lock that a stopped thread could keep
        sent = 0
        # one entry is enough: a stream that never waits would pile them up. Only the I/O thread puts entries
        self._wake = self.stop = lambda: room.put(None) if room.empty() else None
        try:
            for item in items:
                _end_if_forked(here, f"{self.method}()")
                while sent >= self.window + self._credited and not self.cancelled:
                    room.get()
                if self.cancelled:
                    return
                self._send_item(item)
                sent += 1
        finally:
            self._wake = None
            items.close()

    def _send_item(self, item: Any) -> None:
        parts = payload.encode(item, f"an item of {self.method}()", copy=self._copy)
        self._reply(self, frames.Item(self.id), parts)

    async def run_async(self, instance: Any) -> None:
        """Call the method, of any kind, on this event loop, and send its result, items or exception to the caller."""
        await own_steps(self._run_async(instance), f"{self.method}()")

    async def _run_async(self, instance: Any) -> None:
        here = forks.generation
        self.began = start = time.perf_counter()
        try:
            method, args, kwargs = self._bind(instance)
            value = method(*args, **kwargs)
            if self.window:
                await self._stream(value)
                self.succeed(None, time.perf_counter() - start)
                return
            if hasattr(value, "__await__"):
                value = await value
        except Unwound:
            raise
        except BaseException as error:
            _end_if_forked(here, f"{self.method}()", error)
            self.fail(error)
            if isinstance(error, asyncio.CancelledError) and self.cancelled:
                return
            if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
                raise
            return
        self.succeed(value, time.perf_counter() - start)

    async def _stream(self, items: Any) -> None:
        if isinstance(items, Generator):
            items = _between_turns(items)
        if not hasattr(items, "__aiter__"):
            raise CallRefusedError(_NOT_A_GENERATOR.format(self.method))
        loop, room, sent = asyncio.get_running_loop(), asyncio.Event(), 0
        self._wake = lambda: call_soon(loop, room.set)
        try:
            async for item in items:
                while sent >= self.window + self._credited:
                    room.clear()
                    if sent >= self.window + self._credited:  # else credit came between the check and the clear
                        await room.wait()
                sent += 1
                self._send_item(item)
        finally:
            self._wake = None
            await items.aclose()


class TracedInvocation(Invocation, eq=False):
    """An Invocation that records when its method runs, with an arrow from the call."""

    def run(self, instance: Any) -> None:
        with self._traced():
            super().run(instance)

    async def run_async(self, instance: Any) -> None:
        with self._traced():
            await super().run_async(instance)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        active = recorder.active
        if active is None or self.cancelled:
            yield
            return
        span = active.begin(f"{self.method}()", flows.CALL)
        active.flow_in(span, flows.of_request(self.peer, self.id))
        try:
            yield
        finally:
            active.end(span)


async def _between_turns(items: Generator[T, Any, Any]) -> AsyncIterator[T]:
    """Yield the items of a plain generator, with a turn of the event loop before each."""
    try:
        for item in items:
            await asyncio.sleep(0)
            yield item
    finally:
        items.close()
