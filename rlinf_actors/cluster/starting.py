"""One start of a Cluster at a time in a process, whichever threads and event loops ask for one.

House rules: who holds the turn gives it back, however its start ends; a blocking start runs in the
thread that asked for it, one for asyncio in a thread of its own, so that it also comes to its end
while the event loop that asked is blocked by somebody who waits for the same turn.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, Generic, TypeVar

from rlinf_actors import scarce
from rlinf_actors.errors import UsageError
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.work import Promise

T = TypeVar("T")

Watch = Callable[["concurrent.futures.Future[Any]"], None]
"""Told of the future that a start waits for, which may then be cancelled."""


class Turns:
    """Who may start a Cluster now. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: Promise[None] | None = None
        self._thread = 0
        self._pid = 0

    def take(self, thread: int = 0) -> Promise[None] | None:
        """Take the turn, if it is free.

        Args:
            thread: of the start; 0 if it has none yet.

        Returns:
            None: it is the caller's. Else what ends with the start ahead; try again then.

        Raises:
            UsageError: the start ahead is one of this very thread, which would wait for itself.
        """
        with self._lock:
            if self._ended is not None and self._pid == os.getpid():  # a fork's copy of a start never ends
                if thread and thread == self._thread:
                    raise UsageError("a Cluster is being started by this thread: it cannot start another meanwhile")
                return self._ended
            self._ended, self._thread, self._pid = Promise("the start of another Cluster"), thread, os.getpid()
            return None

    def belongs_to(self, thread: int) -> None:
        """The turn's holder starts in that thread."""
        self._thread = thread

    def give_back(self) -> None:
        """The start ended; whoever waits tries again."""
        with self._lock:
            ended, self._ended, self._thread = self._ended, None, 0
        if ended is not None:
            ended.resolve(None)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn; blocks until it is free."""
        while (ahead := self.take(threading.get_ident())) is not None:
            ahead.wait()
        try:
            yield
        finally:
            self.give_back()


class Opening(Generic[T]):
    """A start in a thread of its own. Its maker has taken the turn; the thread gives it back.

    Attributes:
        ended: resolved when the thread has done its work, however it went.
        result: what *start* returned.
        error: what it raised.
    """

    def __init__(self, turns: Turns, start: Callable[[Watch], T]) -> None:
        self.ended: Promise[None] = Promise("the start of a Cluster")
        self.result: T | None = None
        self.error: BaseException | None = None
        self._turns = turns
        self._start = start
        self._lock = threading.Lock()
        self._cancelled = False
        self._future: concurrent.futures.Future[Any] | None = None
        try:
            # a daemon: a start that nobody waits for any more must not hold up the interpreter's end
            scarce.start(threading.Thread(target=self._run, name="rlinf-actors-start", daemon=True))
        except BaseException:
            turns.give_back()
            raise

    def cancel(self) -> None:
        """End the start early. Any thread; the thread still undoes what it has done."""
        with self._lock:
            self._cancelled = True
        if self._future is not None:
            self._future.cancel()

    def _watch(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._future = future
        if self._cancelled:
            future.cancel()

    def _run(self) -> None:
        try:
            self._turns.belongs_to(threading.get_ident())
            self.result = self._start(self._watch)
        except BaseException as error:  # noqa: BLE001  # it is raised where the start is awaited
            self.error = error
        finally:
            self._turns.give_back()
            self.ended.resolve(None)


class Connecting(Generic[T]):
    """What ``Cluster.connect()`` returns: ``await`` it, or ``async with``.

    Args:
        turns: of this process.
        start: makes the cluster or finds the running one; blocks, and is run in a thread.
        undo: ends a cluster that was started for an awaiter that is gone; blocks.
        close: ends the cluster at the end of the block.
    """

    def __init__(
        self,
        turns: Turns,
        start: Callable[[Watch], T],
        undo: Callable[[T], None],
        close: Callable[[T], Awaitable[None]],
    ) -> None:
        self._turns = turns
        self._start = start
        self._undo = undo
        self._close = close
        self._made: T | None = None

    async def _connect(self) -> T:
        while (ahead := self._turns.take()) is not None:
            await ahead
        opening = Opening(self._turns, self._start)
        try:
            await opening.ended
        except BaseException as error:
            opening.cancel()
            if isinstance(error, asyncio.CancelledError):  # anything else: the loop itself ends, nothing can be awaited
                await _to_the_end(self._undone(opening))
            raise
        if opening.error is not None:
            raise opening.error
        self._made = opening.result
        return opening.result  # type: ignore[return-value]

    async def _undone(self, opening: Opening[T]) -> None:
        await opening.ended
        if opening.result is not None:  # the start was over before it could be cancelled
            await asyncio.to_thread(self._undo, opening.result)

    def __await__(self) -> Generator[Any, None, T]:
        return self._connect().__await__()

    async def __aenter__(self) -> T:
        return await self._connect()

    async def __aexit__(self, *_error: object) -> None:
        if self._made is not None:
            await self._close(self._made)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await *work* however often that is cancelled: the caller is ending already and raises it."""
    task = Tasks().start(work, "undoing a start", expected=Exception)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    task.result()
