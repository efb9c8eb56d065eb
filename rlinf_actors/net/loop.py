"""Event loops: a loop on a thread of its own, owners of tasks, and the policy for unexpected exceptions of our own
code.

Every task of the project belongs to a `Tasks`, a task group, or the code that runs a user's coroutines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from rlinf_actors import exhaustion, forks
from rlinf_actors.errors import InternalError, UsageError
from rlinf_actors.procfs import open_standard_descriptors

T = TypeVar("T")

log = logging.getLogger(__name__)

SHUT_DOWN = "the Cluster of this process was shut down: make a new one by Cluster(...)"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's if uvloop is installed, else asyncio's."""
    open_standard_descriptors()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


MAX_TEXT = 10_000
"""Most characters of the text of an InternalError: it travels in frames, whose texts have bounds."""
BUG = "bug"
"""Key in a loop's exception context that marks the exception as a bug of rlinf-actors. asyncio logs the key."""


def handling_failed(
    loop: asyncio.AbstractEventLoop, what: str, error: Exception, fail: Callable[[InternalError], object] | None
) -> None:
    """Handle an unexpected exception of our own code: log it, then end the process or fail one operation.

    A daemon (agentd, head) ends: its loop's exception handler does that (`net.daemon`). A driver or worker goes on
    after *fail* has failed the call, message or channel operation that was being handled.

    Args:
        loop: the loop. Its exception handler logs the exception, and ends the process if it is a daemon.
        what: the activity that failed, for people.
        error: the exception that escaped a task or the handler of a message.
        fail: fails the operation with the error that it is given; None if there is no operation to fail.
    """
    loop.call_exception_handler(
        {"message": f"internal error: {what} failed", "exception": error, BUG: "of rlinf-actors"}
    )
    if fail is None:
        return
    text = f"{what} failed, which is a bug of rlinf-actors: {type(error).__name__}: {error}"
    failure = InternalError(text[:MAX_TEXT])
    failure.__cause__ = error
    try:
        fail(failure)
    except Exception as second:  # noqa: BLE001 - no caller is left
        loop.call_exception_handler({"message": f"internal error: failing {what} failed too", "exception": second})


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Run *function* with *args* on *loop* soon. Any thread.

    The loop is not woken from its own thread. Such a wake-up costs a system call; and 300 of them in one turn fill the
    pipe of asyncio's loop, so that the loop never hears of a signal that arrives then.

    Raises:
        RuntimeError: the loop is closed.
    """
    if asyncio._get_running_loop() is loop:
        loop.call_soon(function, *args)
    else:
        loop.call_soon_threadsafe(function, *args)


def call_threadsafe(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Run *function* with *args* on *loop* soon. If the loop is closed, do nothing. Any thread."""
    try:
        call_soon(loop, function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


class Tasks:
    """The asyncio tasks of one object: reports their unexpected exceptions, and cancels them when it is closed. Loop
    thread.

    *loop* runs the tasks; None for the running loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._running: set[asyncio.Task[Any]] = set()

    def start(
        self,
        work: Coroutine[Any, Any, T],
        name: str,
        *,
        expected: type[Exception] | tuple[type[Exception], ...] = (),
        failed: Callable[[InternalError], object] | None = None,
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task, and return the task. `handling_failed` handles exceptions that are not *expected*.

        Args:
            work: the coroutine.
            name: the task's activity, for people.
            expected: exceptions that the code that awaits the task handles.
            failed: called after an unexpected exception, to fail the operations that depend on the task.
        """
        task = (self._loop or asyncio.get_running_loop()).create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(functools.partial(self._ended, expected, failed))
        return task

    def cancel(self) -> None:
        for task in list(self._running):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks that were started by this object, and wait until they have ended."""
        self.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _ended(
        self,
        expected: type[Exception] | tuple[type[Exception], ...],
        failed: Callable[[InternalError], object] | None,
        task: asyncio.Task[Any],
    ) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, expected):
            handling_failed(task.get_loop(), task.get_name(), error, failed)


TURN_S = 0.01
"""Seconds for which `Turns` handles items before the loop handles other events."""


class Turns(Generic[T]):
    """Handles many items on a loop, as many as TURN_S allows in each turn, so that heartbeats and messages of others
    are handled in between. Loop thread.

    *handle* is called with each item, in the order of `add`. The first items are handled before `add` returns.
    """

    def __init__(self, handle: Callable[[T], object]) -> None:
        self._handle = handle
        self._due: deque[T] = deque()
        self._running = False

    def add(self, items: Iterable[T]) -> None:
        self._due.extend(items)
        if not self._running:
            self._running = True
            self._run()

    def _run(self) -> None:
        end = time.monotonic() + TURN_S
        try:
            while self._due:
                self._handle(self._due.popleft())
                if time.monotonic() >= end:
                    break
        finally:  # if an item raises, the others are still handled
            self._running = bool(self._due)
            if self._running:
                asyncio.get_running_loop().call_soon(self._run)


class IoThread:
    """A thread with an event loop for the connections of a driver or worker, so that the user's
    code cannot delay them.
    """

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self.made_in = forks.generation
        self._submitting = threading.RLock()
        self._stopped = False
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        self._thread = exhaustion.OwnThread(target=self._run, name=name, daemon=True)
        try:
            exhaustion.start(self._thread)
        except RuntimeError:
            self.loop.close()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the I/O thread and return its future. Any thread.

        Raises:
            UsageError: the Cluster's shutdown has stopped the thread; or this process is a fork, where the thread does
                not exist.
        """
        try:
            self.check_usable()
        except UsageError:
            coroutine.close()
            raise
        with self._submitting:  # a coroutine that is submitted before `stop` starts before the loop ends
            if not self._stopped:
                future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
                self._under_way.add(future)
                future.add_done_callback(self._under_way.discard)
                return future
        coroutine.close()
        raise UsageError(SHUT_DOWN)

    def under_way(self) -> list[concurrent.futures.Future[Any]]:
        """Return the futures of all submitted coroutines that have not ended. Any thread."""
        return list(self._under_way)

    def start(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run a coroutine on the I/O thread, without returning a future. Any thread. Its exception is logged.

        *name* is the coroutine's activity, for the log.

        Raises:
            UsageError: the Cluster's shutdown has stopped the thread; or this process is a fork, where the thread does
                not exist.
        """

        async def owned() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - it goes to the process's policy
                handling_failed(self.loop, name, error, None)

        self.submit(owned())

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run *function* with *args* on the I/O thread soon. After `stop`, do nothing. Any thread."""
        call_threadsafe(self.loop, function, *args)

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run *function* on the I/O thread after *seconds*. After `stop`, do nothing. Any thread."""
        self.call(self.loop.call_later, seconds, function)

    def check_usable(self) -> None:
        forks.check(self.made_in)

    def inside(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the I/O thread and its loop, and wait for their end. Must not be called on the I/O thread itself.
        Idempotent.
        """
        if self.loop.is_closed():
            return
        with self._submitting:
            first, self._stopped = not self._stopped, True
            if first:
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        finish(self.loop)


def finish(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks of a stopped loop and wait until they have ended, so that the loop can be closed."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
