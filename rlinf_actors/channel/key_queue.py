"""KeyQueue: the items and the waiting requests of one key. `channel.queue` decides what happens to them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Hashable, Iterable

import msgspec

from rlinf_actors.channel.key_encoding import key_of
from rlinf_actors.channel.queue_commands import QueuedItem, Ticket
from rlinf_actors.wire.figure_values import KEY_CHARS, MAX_WAITERS, KeyFigures


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
        nbytes: bytes of these items and of the undeliverable ones.
        out: number of deliveries that are not acknowledged.
    """

    items: collections.deque[QueuedItem] = msgspec.field(default_factory=collections.deque)
    parked: collections.OrderedDict[Ticket, QueuedItem] = msgspec.field(default_factory=collections.OrderedDict)
    getters: collections.OrderedDict[Ticket, Getter] = msgspec.field(default_factory=collections.OrderedDict)
    dead: list[QueuedItem] = msgspec.field(default_factory=list)
    count: int = 0
    nbytes: int = 0
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
WorkerOf = Callable[[bytes], str]
"""Returns the id of the worker at the other end of a link, "" if that is a driver."""
MOST_SHOWN = 4096
"""Most bytes of a key that is decoded to show it."""
GET = Getter(None)
"""Stands for every waiting get: a get holds no items."""


def load(queue: KeyQueue) -> int:
    """Return how many items and requests wait under a key."""
    return len(queue.items) + len(queue.parked) + len(queue.getters) + len(queue.dead)


def key_figures(key: Hashable, queue: KeyQueue, worker_of: WorkerOf) -> KeyFigures:
    """Return what `rlinf-actors channel show` says of a key. No item is looked at."""
    return KeyFigures(
        _text(key),
        items=len(queue.items),
        out=queue.out,
        puts_waiting=len(queue.parked),
        gets_waiting=len(queue.getters),
        undeliverable=len(queue.dead),
        producers=_who(queue.parked, worker_of),
        consumers=_who(queue.getters, worker_of),
        size=queue.nbytes,
    )


def _text(key: Hashable) -> str:
    """Return a key as text. A key came from another process, and may be no key that `key_bytes` has made."""
    if type(key) is not bytes or len(key) > MOST_SHOWN:
        return f"a key of {len(key):,} bytes" if type(key) is bytes else repr(key)[:KEY_CHARS]
    try:
        return repr(key_of(key))[:KEY_CHARS]
    except (msgspec.DecodeError, ValueError, RecursionError):
        return repr(key)[:KEY_CHARS]


def _who(tickets: Iterable[Ticket], worker_of: WorkerOf) -> list[str]:
    """Return the first processes that wait, a worker by its id, a driver by its incarnation. Many requests are of few
    processes.
    """
    first = itertools.islice(tickets, 100)
    owners = dict.fromkeys(worker_of(ticket.peer) or ticket.owner.partition(":")[2] for ticket in first)
    return list(owners)[:MAX_WAITERS]
