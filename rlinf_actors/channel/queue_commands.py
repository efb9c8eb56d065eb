"""Values of a channel's queue: the tickets of requests, items, and commands. Nothing here does I/O."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Union

import msgspec

MAX_DELIVERIES = 3
"""Default number of failed deliveries after which an item becomes undeliverable."""
ERROR_CHARS = 2000
"""Most characters that are kept of the reason why an item was not processed."""


class Ticket(NamedTuple):
    """Identifies a request and its answer: the process that made it, the link on which it arrived, its number there."""

    owner: str
    peer: bytes
    id: int


def tickets_of(owner: str, peer: bytes, ids: Iterable[int]) -> list[Ticket]:
    """Return the tickets of several requests that came by one link. Faster than a call of Ticket for each."""
    fields = zip(itertools.repeat(owner), itertools.repeat(peer), ids, strict=False)
    return list(map(tuple.__new__, itertools.repeat(Ticket), fields))


class QueuedItem(msgspec.Struct, eq=False):
    """An item in the queue.

    Attributes:
        value: the item; in a channel's host the sequence of its parts.
        nbytes: bytes of the item that count for the limit in bytes.
        weight: weight of the item in a batch.
        origin: identity of the producer's link.
        seq: position in the order in which the queue accepted its items.
        again: True if a consumer may have received the item before.
        failed: number of failed deliveries: the consumer may have received the item, and did not acknowledge it.
        last_failure: (consumer, reason) of the last failed delivery; the consumer is "" if it used get().
    """

    value: Any
    nbytes: int = 0
    weight: float = 0
    origin: bytes = b""
    seq: int = 0
    again: bool = False
    failed: int = 0
    last_failure: tuple[str, str] = ("", "")


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


class DeliverEach(NamedTuple):
    """Command: send one item to each of several gets: `items[n]` for the get `tickets[n]`. Like many DeliverItems."""

    tickets: Sequence[Ticket]
    items: Sequence[QueuedItem]


class RefuseRequest(NamedTuple):
    """Command: refuse a request.

    `why` is "full", "empty", "closed", "cancelled" or "undeliverable". In the last case *item* is the item that became
    undeliverable; else it is None.
    """

    ticket: Ticket
    why: str
    item: QueuedItem | None = None


Command = Union[AcceptPut, DeliverItems, RefuseRequest]
"""A command about one request."""
AnyCommand = Union[Command, AcceptPuts, DeliverEach]


def one_by_one(commands: Iterable[AnyCommand]) -> Iterator[Command | AcceptPuts]:
    """Return the commands with a DeliverItems for each delivery of a DeliverEach."""
    for command in commands:
        if isinstance(command, DeliverEach):
            for ticket, item in zip(command.tickets, command.items, strict=True):
                yield DeliverItems(ticket, (item,))
        else:
            yield command
