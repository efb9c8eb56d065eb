"""What a Channel is made of: a backend, the gets and takes under way in it, and the Take of the user.

There are three backends: `client.RemoteChannel` (the items are in a host process), `connecting.ConnectingChannel` (the
host is not found yet) and `local.LocalChannel` (the items are in this process).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import traceback
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol

from rlinf_actors import forks
from rlinf_actors.errors import CallTimeoutError, ChannelClosedError, ItemNotProcessedError, UsageError
from rlinf_actors.runtime.future import AsyncWork

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # what `Channel` alone, without the type of its items, means
else:
    from typing import TypeVar

    T = TypeVar("T")


class PendingGet(AsyncWork[T]):
    """A get or get_batch under way.

    ``wait`` and ``await`` return the item and acknowledge it; both may be used again and return the same object.
    Cancelling a task that awaits the get cancels the get, as with asyncio.Queue, and so does dropping the last
    reference to it. An item that was on its way then returns to the head of its queue.

    Attributes:
        redelivered: once the item was taken: True if a process that died may have seen it (or one of the batch) before.

    Subclasses implement `_decode`, `_acknowledge` and `_give_back`.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.redelivered = False
        self._taking = threading.Lock()
        self._taken = False

    def _decode(self, arrived: Any) -> tuple[T, bool]:
        """Return the value, and `redelivered`. Runs on the thread that waits; if it raises, the item goes back."""
        raise NotImplementedError

    def _acknowledge(self, arrived: Any) -> None:
        """Tell the queue that user code has the value. Called once."""
        raise NotImplementedError

    def _give_back(self, later: bool) -> None:
        """Return the item to its queue. Any thread; *later*: from a destructor, whose thread may hold any lock."""
        raise NotImplementedError

    def _decode_failed(self, error: BaseException) -> None:
        self._give_back(False)

    def cancel(self) -> bool:
        """Cancel the get; False if the item was taken, or the get has failed. Any thread."""
        with self._taking:
            if self._taken or self._error is not None:
                return False
            error = concurrent.futures.CancelledError(f"{self._what} was cancelled")
            if not self.reject(error):
                if self._error is not None:
                    return False
                self._value, self._error = None, error  # the item is here, and is given back below
            self._seen = True
        self._give_back(False)
        return True

    def _outcome(self) -> T:
        with self._taking:
            value = super()._outcome()
            if self._taken:
                return value
            made: T
            try:
                made, self.redelivered = self._decode(value)
            except BaseException as error:
                self._value, self._error = None, error
                self._decode_failed(error)
                raise
            # the item is taken last, so that a failure or a cancellation before this point gives it back
            self._value, self._taken = made, True
            self._acknowledge(value)
            return made

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from super().__await__())
        except (asyncio.CancelledError, GeneratorExit):
            self.cancel()
            raise

    def __del__(self) -> None:
        super().__del__()
        if not self._taken and self._error is None:
            self._give_back(True)


class PendingTake(PendingGet[T]):
    """A take under way. Once user code has the item, the item is out until `release` or `fail`.

    Attributes:
        deliveries: number of this delivery of the item, from 1; 0 while it is under way.
    """

    deliveries = 0

    @property
    def taken(self) -> bool:
        """True once user code has the item."""
        return self._taken

    def release(self) -> AsyncWork[None]:
        """Report that the item was processed; the work is done when the channel has confirmed it. Any thread."""
        raise NotImplementedError

    def fail(self, how: str, later: bool = False) -> None:
        """Return the item to the head of its queue, since it was not processed. Any thread.

        Args:
            how: the reason, for people.
            later: as in `_give_back`.
        """
        raise NotImplementedError


class Take(Generic[T]):
    """What `Channel.take` returns: use it once, by ``async with`` or ``with``.

    The block gets the item. When the block ends, the item is released, and the channel has confirmed that before the
    next statement runs. If the block raises any exception, or the process dies in the block, the item returns to the
    head of its queue.
    """

    def __init__(self, begin: Callable[[], PendingTake[T]], name: str) -> None:
        self._begin = begin
        self._name = name
        self._pending: PendingTake[T] | None = None
        self._over = False

    @property
    def deliveries(self) -> int:
        """The number of this delivery of the item, 1 for the first; known in the block.

        Raises:
            UsageError: the item is not here yet.
        """
        if self._pending is None or not self._pending.deliveries:
            raise UsageError("the number of deliveries is known in the block: `async with take as item: ...`")
        return self._pending.deliveries

    async def __aenter__(self) -> T:
        return await self._start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        work = self._end(kind, error)
        if work is not None:
            await work

    def __enter__(self) -> T:
        pending = self._start()
        try:
            return pending.wait()
        except BaseException:  # Ctrl-C too
            pending.cancel()  # this Take may be kept, and an item that came would be out as long
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        work = self._end(kind, error)
        if work is not None:
            work.wait()

    def __del__(self) -> None:
        if self._pending is not None and self._pending.taken and not self._over:
            self._pending.fail("its block was entered and never left: the Take was dropped", later=True)

    def _start(self) -> PendingTake[T]:
        if self._pending is not None:
            raise UsageError(f"this take() from channel {self._name!r} was used before: call take() for each item")
        self._made_in = forks.generation()
        self._pending = self._begin()
        return self._pending

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> AsyncWork[None] | None:
        """Return the release of the item, for the caller to wait for; None if the item was given back instead."""
        assert self._pending is not None
        if kind is None:
            forks.check(self._made_in)  # a child forked in the block would wait for ever
        elif self._made_in != forks.generation():
            return None  # the item is the parent's
        self._over = True
        if kind is None:
            return self._pending.release()
        self._pending.fail("".join(traceback.format_exception_only(kind, error)).strip())
        return None


def refusal(name: str, kind: str, what: str) -> Exception:
    """Return the exception for a request *what* that the queue of channel *name* refused."""
    if kind == "full":
        return asyncio.QueueFull(f"channel {name!r} is full")
    if kind == "empty":
        return asyncio.QueueEmpty(f"channel {name!r} is empty")
    if kind == "closed":
        return ChannelClosedError(f"channel {name!r} was closed")
    return CallTimeoutError(f"{what} was not done in its time")


def not_processed(name: str, key: Any, deliveries: int, consumer: str, reason: str) -> ItemNotProcessedError:
    """Return the error of a take that met an item whose deliveries had failed too often."""
    who = consumer or "a consumer that used get()"
    return ItemNotProcessedError(
        f"an item of channel {name!r}, key {key!r}, was delivered {deliveries} times and never released; the last "
        f"consumer was {who}: {reason}. The item is not delivered any more: read it by "
        f"channel.undeliverable({key!r}). The next take goes on with the next item",
        key=key,
        deliveries=deliveries,
        consumer=consumer,
        reason=reason,
    )


@dataclass(frozen=True)
class ShownItem:
    """A waiting item, for `Channel.describe`. `value` is None and `whole` False if the item is too large to show."""

    value: Any
    nbytes: int
    weight: float
    again: bool
    whole: bool = True


@dataclass(frozen=True)
class UndeliverableItem(Generic[T]):
    """An item that is not delivered any more, since its deliveries failed too often; see `Channel.undeliverable`.

    Attributes:
        item: the item as it was put; an exception instead if it cannot be unpickled in this process.
        key: of its queue.
        deliveries: number of its deliveries.
        consumer: name of the last consumer, "" if that used get().
        reason: how the last delivery ended: the exception in the consumer's block, or the end of its process.
    """

    item: T
    key: Hashable
    deliveries: int
    consumer: str
    reason: str


View = tuple[bool, list[tuple[Any, int, list[ShownItem]]], dict[Any, int]]
"""A description of a channel: True if it is closed; for each key the number of waiting items and the first of them; the
number of undeliverable items by key.
"""


class Backend(Protocol):
    """Operations of a channel; none blocks. Any thread but the I/O thread. A *timeout* is in seconds, None for none."""

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        """Put an item; done when the queue has accepted it."""

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> PendingGet[Any]:
        """Get the item at the head."""

    def batch(self, key: Hashable, target: float, timeout: float | None) -> PendingGet[list[Any]]:
        """Get a batch of items of *target* weight."""

    def take(self, key: Hashable, timeout: float | None) -> PendingTake[Any]:
        """Take the item at the head; it is out then."""

    def look(self, key: Hashable) -> AsyncWork[tuple[int, bool]]:
        """Return the number of waiting items, and True if a put would wait."""

    def show(self) -> AsyncWork[View]:
        """Describe the channel."""

    def undeliverable(self, key: Hashable, drain: bool) -> AsyncWork[list[UndeliverableItem[Any]]]:
        """Return the undeliverable items of a key; *drain* removes them from the list."""

    def close(self) -> AsyncWork[None]:
        """Refuse puts from now on."""
