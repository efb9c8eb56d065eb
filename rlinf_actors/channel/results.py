"""The results of requests to a channel: pending gets and takes, the `Take` that users hold, and described items."""

from __future__ import annotations

import asyncio
import concurrent.futures
import traceback
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from rlinf_actors import forks
from rlinf_actors.errors import CallTimeoutError, ChannelClosedError, ItemNotProcessedError, UsageError
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.future import AsyncWork

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # what `Channel` alone, without the type of its items, means
else:
    from typing import TypeVar

    T = TypeVar("T")


class Withdrawable:
    """A put or get whose caller may lose interest in it before it is sent to the host, or afterwards."""

    had_s = 0.0  # its time limit, for the error
    _leaving = False
    _sent = False

    def expire(self) -> None:
        """End the request with CallTimeoutError, or let the host decide, if it was sent. Loop thread only."""
        raise NotImplementedError

    def leave(self) -> None:
        """Withdraw the request from its host as soon as it is sent; the host decides if it is too late for that.

        Loop thread only.
        """
        self._leaving = True
        if self._sent:
            self.expire()

    def _was_sent(self) -> None:
        self._sent = True  # first: `leave` may run at the same time on another thread, and one of the two must expire
        if self._leaving:
            self.expire()


class PendingGet(AsyncWork[T]):
    """A get or get_batch that was requested; its result is the item, or the list of items.

    ``wait`` and ``await`` return the item and acknowledge it to the queue. Both may be repeated and return the same
    object. Cancelling a task that awaits the get cancels the get, as with asyncio.Queue. Dropping the last reference to
    the get cancels it too. An item that was already on its way then returns to the head of its queue.

    Attributes:
        redelivered: valid once the item is received: True if a process that died may have received the item, or an
            item of the batch, before.

    Subclasses implement `_decode`, `_acknowledge` and `_give_back`.
    """

    redelivered = False
    limit_s = 0.0  # time limit of the get
    _lazy = True
    _by_loop = True
    _taken = False

    def _decode(self, arrived: Any) -> tuple[T, bool]:
        """Return the received value, and True if the item, or an item of the batch, was delivered before.

        Runs on the thread that waits. If it raises, the item returns to its queue.
        """
        raise NotImplementedError

    def _acknowledge(self, arrived: Any) -> None:
        """Tell the queue that user code has the value. Called at most once."""
        raise NotImplementedError

    def _give_back(self, later: bool) -> None:
        """Return the item to its queue. Any thread.

        *later* is True in a destructor, whose thread may hold any lock: then do not wait for a lock.
        """
        raise NotImplementedError

    def _decode_failed(self, error: BaseException) -> None:
        self._give_back(False)

    def cancel(self) -> bool:
        """Cancel the get. Return False if user code has the item already, or if the get has failed. Any thread."""
        with self._converting:
            if self._taken or self._error is not None:
                return False
            error = concurrent.futures.CancelledError(f"{self._what} was cancelled")
            if not self.reject(error):
                if self._error is not None:
                    return False
                self._value, self._error = None, error  # the item has arrived already; it is given back below
            self._seen = True
        self._give_back(False)
        return True

    def _make_result(self, value: Any) -> T:
        try:
            item, self.redelivered = self._decode(value)
        except BaseException as error:
            self._decode_failed(error)
            raise
        self._taken = True  # last, so that a failure or a cancellation before this point gives the item back
        try:
            self._acknowledge(value)
        except BaseException:  # a signal handler raised
            self._taken = False
            self._give_back(False)
            raise
        return item

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from super().__await__())
        except (asyncio.CancelledError, GeneratorExit):
            self.cancel()
            raise

    def __del__(self) -> None:
        if self._error is not None:
            super().__del__()
        elif not self._taken:
            self._give_back(True)


class PendingTake(PendingGet[T]):
    """A take that was requested. Once user code has the item, `release` or `fail` must follow.

    Attributes:
        deliveries: number of deliveries of the item, including this one; 0 before the item is received.
    """

    deliveries = 0

    def release(self) -> AsyncWork[None]:
        """Tell the channel that the item was processed. The returned work is done when the channel confirms it."""
        raise NotImplementedError

    def fail(self, how: str, later: bool = False) -> None:
        """Return an item that was not processed to the head of its queue. Any thread.

        Args:
            how: the reason, as text for people.
            later: True in a destructor, whose thread may hold any lock: then do not wait for a lock.
        """
        raise NotImplementedError


class Take(Generic[T]):
    """The result of `Channel.take`. Use it once, in ``async with`` or ``with``.

    The ``with`` statement waits for the item and gives it to the block. When the block ends, the item is released, and
    the channel confirms the release before the next statement runs. If the block raises any exception, or the process
    dies in the block, the item returns to the head of its queue.
    """

    def __init__(self, begin: Callable[[], PendingTake[T]], name: str) -> None:
        self._begin = begin
        self._name = name
        self._pending: PendingTake[T] | None = None
        self._over = False

    @property
    def deliveries(self) -> int:
        """Number of deliveries of the item, including this one: 1 the first time. Available inside the block.

        Raises:
            UsageError: the item is not received yet.
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
            pending.cancel()  # else an item that arrives stays out for as long as a caller keeps this Take
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        work = self._end(kind, error)
        if work is not None:
            work.wait()

    def __del__(self) -> None:
        if self._pending is not None and self._pending._taken and not self._over:
            self._pending.fail("its block was entered and never left: the Take was dropped", later=True)

    def _start(self) -> PendingTake[T]:
        if self._pending is not None:
            raise UsageError(f"this take() from channel {self._name!r} was used before: call take() for each item")
        self._made_in = forks.generation
        self._pending = self._begin()
        return self._pending

    def _end(self, kind: type[BaseException] | None, error: BaseException | None) -> AsyncWork[None] | None:
        """Release the item at the end of the block. Return the AsyncWork that is done when this is confirmed.

        If the block raised *error*, return the item to its queue instead, and return None.
        """
        assert self._pending is not None
        if kind is None:
            forks.check(self._made_in)  # a child forked in the block would wait for ever
        elif self._made_in != forks.generation:
            return None  # the item is the parent's
        self._over = True
        if kind is None:
            return self._pending.release()
        self._pending.fail("".join(traceback.format_exception_only(kind, error)).strip())
        return None


_LACKED = {"put": "no room", "get_batch": "too few items"}


def too_late(what: str, had_s: float, why: str) -> CallTimeoutError:
    """Return the error for the operation *what*, which had *had_s* seconds and was not done because of *why*."""
    return CallTimeoutError(f"{what} was not done within {had_s:g} s: {why}")


def refusal(name: str, kind: str, what: str, had_s: float) -> Exception:
    """Return the exception for a request that the queue refused.

    *kind* is the reason: "full", "empty", "closed" or "cancelled". *name* is the channel, *what* is the operation, and
    *had_s* is its time limit; they are for the error text.
    """
    if kind == "full":
        return asyncio.QueueFull(f"channel {name!r} is full")
    if kind == "empty":
        return asyncio.QueueEmpty(f"channel {name!r} is empty")
    if kind == "closed":
        return ChannelClosedError(f"channel {name!r} was closed")
    return too_late(what, had_s, f"the channel had {_LACKED.get(what.partition('(')[0], 'no item')} for it")


def not_processed(name: str, key: Any, deliveries: int, consumer: str, reason: str) -> ItemNotProcessedError:
    """Return the error for a take whose item became undeliverable, because too many deliveries had failed.

    *name* is the channel, and *deliveries* is the number of failed deliveries. *consumer* and *reason* describe the
    last of them.
    """
    who = consumer or "a consumer that used get()"
    return ItemNotProcessedError(
        f"an item of channel {name!r}, key {key!r}, was delivered {counted(deliveries, 'time')} and never released; "
        f"the last consumer was {who}: {reason}. The item is not delivered any more: read it by "
        f"channel.undeliverable({key!r}). The next take goes on with the next item",
        key=key,
        deliveries=deliveries,
        consumer=consumer,
        reason=reason,
    )


class ShownItem(msgspec.Struct, frozen=True):
    """A waiting item as `Channel.describe` shows it.

    Attributes:
        value: the item; None if it is too large to show.
        nbytes: size of the item in bytes.
        weight: weight of the item in `get_batch`.
        again: True if a consumer may have received the item before.
        whole: False if the item is too large to show.
    """

    value: Any
    nbytes: int
    weight: float
    again: bool
    whole: bool = True


@dataclass(frozen=True)
class UndeliverableItem(Generic[T]):
    """An item that is delivered no more because too many deliveries failed; see `Channel.undeliverable`.

    Attributes:
        item: the item as it was put, or an exception if it cannot be unpickled in this process.
        key: key under which it was put.
        deliveries: number of failed deliveries.
        consumer: name of the last consumer, "" if it used get().
        reason: how the last delivery ended: the exception in the consumer's block, or the end of its process.
    """

    item: T
    key: Hashable
    deliveries: int
    consumer: str
    reason: str


View = tuple[bool, list[tuple[Any, int, list[ShownItem]]], dict[Any, int]]
"""The state of a channel: True if closed; (key, number of waiting items, the first of them) for each key with items;
number of undeliverable items by key.
"""
