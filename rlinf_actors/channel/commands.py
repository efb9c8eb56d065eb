"""Values of a channel's queue: the tickets of requests, items, and commands. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

MAX_DELIVERIES = 3
"""Default number of failed deliveries after which an item becomes undeliverable."""
ERROR_CHARS = 2000
"""Most characters that are kept of the reason why an item was not processed."""


class Ticket(NamedTuple):
    """Identifies a request and its answer: the process that made it, the link on which it arrived, its number there."""

    owner: str
    peer: bytes
    id: int


class QueuedItem:
    """An item in the queue.

    Attributes:
        seq: position in the order in which the queue accepted its items.
        again: True if a consumer may have received the item before.
        failed: number of failed deliveries: the consumer may have received the item, and did not acknowledge it.
        origin: identity of the producer's link.
        last_failure: (consumer, reason) of the last failed delivery; the consumer is "" if it used get().
    """

    __slots__ = ("again", "failed", "last_failure", "nbytes", "origin", "seq", "value", "weight")

    def __init__(self, value: Any, nbytes: int = 0, weight: float = 0, origin: bytes = b"") -> None:
        self.value, self.origin = value, origin
        self.nbytes = nbytes
        self.weight = weight
        self.seq = 0
        self.again = False
        self.failed = 0
        self.last_failure = ("", "")


class AcceptPut(NamedTuple):
    """Command: tell the producer that its item is in the queue."""

    ticket: Ticket


class AcceptPuts(NamedTuple):
    """Command: tell the producer at the other end of the link *peer* that the items of its puts *ids* are queued."""

    peer: bytes
    ids: Sequence[int]


class DeliverItems(NamedTuple):
    """Command: send these items, in order, to the consumer.

    The items return to the queue unless the consumer acknowledges the ticket. A delivery without items needs no
    acknowledgement. `kind` is "batch", "take" or "drain" for those requests, "" for a get.
    """

    ticket: Ticket
    items: tuple[QueuedItem, ...]
    kind: str = ""


class RefuseRequest(NamedTuple):
    """Command: refuse a request.

    `why` is "full", "empty", "closed", "cancelled" or "undeliverable". In the last case *item* is the item that became
    undeliverable; else it is None.
    """

    ticket: Ticket
    why: str
    item: QueuedItem | None = None


Command = Union[AcceptPut, DeliverItems, RefuseRequest]
