"""KeyQueue: the items and the waiting requests of one key. `channel.queue` decides what happens to them."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from rlinf_actors.channel.queue_commands import QueuedItem, Ticket


class Getter(msgspec.Struct):
    """A get, batch or take that waits for items.

    Attributes:
        target: most weight of a batch; None for a request for one item.
        taker: name of the consumer for a take; None for a get or a batch.
        held: items that the batch has collected so far.
        total: weight of these items.
    """

    target: float | None
    taker: str | None = None
    held: list[QueuedItem] = msgspec.field(default_factory=list)
    total: float = 0


class KeyQueue(msgspec.Struct):
    """The FIFO of one key.

    Attributes:
        items: waiting items.
        parked: items whose put waits for room.
        getters: requests that wait for items.
        dead: undeliverable items, the oldest first.
        count: number of items that were accepted and are neither acknowledged nor undeliverable.
        out: number of deliveries that are not acknowledged.
    """

    items: collections.deque[QueuedItem] = msgspec.field(default_factory=collections.deque)
    parked: collections.OrderedDict[Ticket, QueuedItem] = msgspec.field(default_factory=collections.OrderedDict)
    getters: collections.OrderedDict[Ticket, Getter] = msgspec.field(default_factory=collections.OrderedDict)
    dead: list[QueuedItem] = msgspec.field(default_factory=list)
    count: int = 0
    out: int = 0

    @property
    def unused(self) -> bool:
        """True if the key has no items and no requests, so that nothing of it need be kept."""
        return not (self.items or self.parked or self.getters or self.out or self.dead)

    def give_back(self, items: Iterable[QueuedItem]) -> None:
        """Put items back in front of every item that entered the queue after them."""
        back = list(items)
        if not back:
            return
        first = next(iter(self.getters.values()), None)
        if first is not None and first.held:  # a batch that holds later items must start again, to keep the order
            back += first.held
            first.held, first.total = [], 0
        back.sort(key=lambda item: item.seq)
        before = []
        while self.items and self.items[0].seq < back[-1].seq:
            before.append(self.items.popleft())  # items that returned earlier
        self.items.extendleft(sorted([*before, *back], key=lambda item: -item.seq))


NO_QUEUE = KeyQueue()
GET = Getter(None)
"""Stands for every waiting get: a get holds no items."""
