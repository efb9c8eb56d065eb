"""Items of a channel, requests for them, and what the queue decides about these. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple, Union

MAX_DELIVERIES = 3
"""How often a take is given an item, unless the channel's creator says otherwise."""
ERROR_CHARS = 2000
"""Most that is kept of how the processing of an item failed."""


class Ticket(NamedTuple):
    """One request: `owner` is the process that made it, `peer` the link it came by, `id` its number there."""

    owner: str
    peer: bytes
    id: int


class Item:
    """Something that was put.

    Attributes:
        again: a consumer may have seen it before.
        failed: how many deliveries ended without an acknowledgement, though a consumer may have seen the item.
        story: the taker of the last of these ("" of a get), and how that delivery ended; for people.
    """

    __slots__ = ("again", "failed", "nbytes", "seq", "story", "value", "weight")

    def __init__(self, value: Any, nbytes: int = 0, weight: float = 0) -> None:
        self.value = value
        self.nbytes = nbytes
        self.weight = weight
        self.seq = 0
        self.again = False
        self.failed = 0
        self.story = ("", "")


class Accepted(NamedTuple):
    """The put is in."""

    ticket: Ticket


class Deliver(NamedTuple):
    """These items, in order; they come back unless the ticket is acknowledged. No items: nothing to acknowledge.

    `kind` is "take" or "drain" for answers to these, else "".
    """

    ticket: Ticket
    items: tuple[Item, ...]
    kind: str = ""


class Refused(NamedTuple):
    """`why`: full, empty, closed, cancelled or undeliverable: *item* was given up instead of being delivered."""

    ticket: Ticket
    why: str
    item: Item | None = None


Command = Union[Accepted, Deliver, Refused]
