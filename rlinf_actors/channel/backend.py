"""The seam between a Channel and what is behind it: a host process, or a queue in this one.

PendingGet: a get under way. PendingGet the item is its last step, and what is not taken goes back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol

from rlinf_actors.errors import ItemNotProcessedError
from rlinf_actors.runtime.future import AsyncWork

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # what `Channel` alone, without the type of its items, means
else:
    from typing import TypeVar

    T = TypeVar("T")


class PendingGet(AsyncWork[T]):
    """A get or get_batch under way.

    The item is yours, and acknowledged, when `wait` or ``await`` returns it; both may be used again and
    give the same object. Cancelling a task that awaits it cancels the get, as with asyncio.Queue; so does
    dropping the last reference. An item that was on its way is then first in its queue again.

    Attributes:
        redelivered: once it was taken: whether a process that died may have seen (one of) these before.

    Subclasses say where items come from, by `_decode`, `_acknowledge` and `_give_back`.

    Args:
        what: for messages.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.redelivered = False
        self._taking = threading.Lock()
        self._taken = False

    def _decode(self, arrived: Any) -> tuple[T, bool]:
        """The value, and whether it had been delivered to a process that died. On the thread that waits; what it
        raises gives the item back.
        """
        raise NotImplementedError

    def _acknowledge(self, arrived: Any) -> None:
        """The value is there. Once."""
        raise NotImplementedError

    def _give_back(self, later: bool) -> None:
        """Nobody will take it. Any thread; *later*: from a destructor, whose own thread may hold any lock."""
        raise NotImplementedError

    def _not_decoded(self, error: BaseException) -> None:
        """`_decode` raised. On its thread."""
        self._give_back(False)

    def cancel(self) -> bool:
        """Do not wait any more; False if the item was taken, or the get had failed. Any thread."""
        with self._taking:
            if self._taken or self._error is not None:
                return False
            error = concurrent.futures.CancelledError(f"{self._what} was cancelled")
            if not self.reject(error):
                if self._error is not None:
                    return False
                self._value, self._error = None, error
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
                self._not_decoded(error)
                raise
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


class Delivery(PendingGet[T]):
    """A take under way. Once it is awaited the item is out, until `release` or `fail`.

    Attributes:
        deliveries: which delivery of the item this is, 1 for the first; 0 while it is under way.
    """

    deliveries = 0

    @property
    def taken(self) -> bool:
        """True once the item has reached the user's code."""
        return self._taken

    def release(self) -> AsyncWork[None]:
        """The item was processed; ends when the channel has confirmed that. Any thread."""
        raise NotImplementedError

    def fail(self, how: str, later: bool = False) -> None:
        """The item was not processed, *how* for people: it is the head of its queue again. Any thread.

        Args:
            how: for people.
            later: from a destructor, whose own thread may hold any lock.
        """
        raise NotImplementedError


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
class Shown:
    """A waiting item for people. `value` is None with `whole` False where the item is too large to show."""

    value: Any
    nbytes: int
    weight: float
    again: bool
    whole: bool = True


@dataclass(frozen=True)
class UndeliverableItem(Generic[T]):
    """An item that was given up, since its deliveries had failed too often; see `Channel.undeliverable`.

    Attributes:
        item: as it was put; the exception instead if it cannot be read in this process.
        key: of its queue.
        deliveries: how many there were.
        consumer: who had the last one, "" if that was a get.
        reason: how that ended: the exception in the consumer's block, or the end of its process.
    """

    item: T
    key: Hashable
    deliveries: int
    consumer: str
    reason: str


View = tuple[bool, list[tuple[Any, int, list[Shown]]], dict[Any, int]]
"""A description of a channel: True if it is closed; for each key the number of waiting items and the first of them;
and the number of undeliverable items by key.
"""


class Backend(Protocol):
    """Nothing blocks. Any method from any thread but the I/O thread. Limits of time are in seconds, None for none."""

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        """Under way; ends when the item is in."""

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> PendingGet[Any]:
        """Under way; ends when an item is here."""

    def batch(self, key: Hashable, target: float, timeout: float | None) -> PendingGet[list[Any]]:
        """Under way; ends when the batch is complete."""

    def take(self, key: Hashable, timeout: float | None) -> Delivery[Any]:
        """Under way; ends when an item is here, which is out then."""

    def look(self, key: Hashable) -> AsyncWork[tuple[int, bool]]:
        """Number of waiting items, and whether a put would wait."""

    def show(self) -> AsyncWork[View]:
        """See View."""

    def undeliverable(self, key: Hashable, drain: bool) -> AsyncWork[list[UndeliverableItem[Any]]]:
        """The items of a key that were given up; *drain* takes them off the list."""

    def close(self) -> AsyncWork[None]:
        """No more puts."""
