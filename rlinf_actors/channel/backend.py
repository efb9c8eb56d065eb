"""The seam between a Channel and what is behind it: a host process, or a queue in this one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol

from rlinf_actors.channel.taking import Delivery, Taking
from rlinf_actors.runtime.asyncwork import AsyncWork

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # what `Channel` alone, without the type of its items, means
else:
    from typing import TypeVar

    T = TypeVar("T")


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

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Taking[Any]:
        """Under way; ends when an item is here."""

    def batch(self, key: Hashable, target: float, timeout: float | None) -> Taking[list[Any]]:
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
