"""The decisions of a channel: which request gets which item, and which request waits. Pure.

`ChannelQueue` takes requests and returns commands; its shells are the channel's host process (`queue_server`) and the
local channel (`local`).

House rules:
* Under a key there are waiting items or waiting getters, never both.
* An item is in one place: parked (its put is not accepted yet), waiting, held by an incomplete batch, delivered and not
  acknowledged, or undeliverable. Only an acknowledgement removes it.
* An item that comes back goes in front of everything that entered the queue after it.
* Each ticket is answered once. The shell drops answers to processes that are gone.
* Bytes are limited over all keys together, but an empty key always accepts one item, so that a full key never blocks
  another key.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

MAX_DELIVERIES = 3
"""Default for how often a take gets an item that no consumer releases."""
ERROR_CHARS = 2000
"""Most characters that are kept of the reason why an item was not processed."""


class Ticket(NamedTuple):
    """Identifies a request: the process that made it, the link that it came by, and its number on that link."""

    owner: str
    peer: bytes
    id: int


class QueuedItem:
    """An item of the queue.

    Attributes:
        again: True if a consumer may have seen it before.
        failed: number of deliveries that were not acknowledged although a consumer may have seen the item.
        last_failure: consumer of the last such delivery ("" for a get), and how that delivery ended.
    """

    __slots__ = ("again", "failed", "last_failure", "nbytes", "seq", "value", "weight")

    def __init__(self, value: Any, nbytes: int = 0, weight: float = 0) -> None:
        self.value = value
        self.nbytes = nbytes
        self.weight = weight
        self.seq = 0
        self.again = False
        self.failed = 0
        self.last_failure = ("", "")


class AcceptPut(NamedTuple):
    """Tell the producer that its item is in the queue."""

    ticket: Ticket


class DeliverItems(NamedTuple):
    """Send these items, in order; they come back unless the ticket is acknowledged. Without items none is expected.

    `kind` is "take" or "drain" if that was the request, else "".
    """

    ticket: Ticket
    items: tuple[QueuedItem, ...]
    kind: str = ""


class RefuseRequest(NamedTuple):
    """Refuse a request: full, empty, closed, cancelled, or undeliverable (*item* was to be delivered)."""

    ticket: Ticket
    why: str
    item: QueuedItem | None = None


Command = Union[AcceptPut, DeliverItems, RefuseRequest]


@dataclass
class _Getter:
    """A request that waits for items.

    Attributes:
        target: weight of a batch; None for one item.
        taker: name of the consumer of a take; None for a get.
        held: items that the batch has so far, of weight `total`.
    """

    target: float | None
    taker: str | None = None
    held: list[QueuedItem] = field(default_factory=list)
    total: float = 0


@dataclass
class _KeyQueue:
    """The FIFO of one key.

    Attributes:
        dead: undeliverable items, the oldest first.
        count: number of items that entered and are neither acknowledged nor undeliverable.
        out: number of deliveries that are not acknowledged.
    """

    items: collections.deque[QueuedItem] = field(default_factory=collections.deque)
    parked: collections.OrderedDict[Ticket, QueuedItem] = field(default_factory=collections.OrderedDict)
    getters: collections.OrderedDict[Ticket, _Getter] = field(default_factory=collections.OrderedDict)
    dead: list[QueuedItem] = field(default_factory=list)
    count: int = 0
    out: int = 0

    @property
    def unused(self) -> bool:
        return not (self.items or self.parked or self.getters or self.out or self.dead)


class ChannelQueue:
    """All keys of one channel, or of one replica of it.

    Args:
        maxsize: waiting items per key; 0 or less for no limit.
        max_bytes: bytes of all keys together, unacknowledged and undeliverable ones included; a key with nothing else
            in it always takes one item. 0 or less for no limit.
        max_deliveries: deliveries of an item that may fail before a take gives it up; 0 or less for no limit.
    """

    def __init__(self, maxsize: int = 0, max_bytes: int = 0, max_deliveries: int = 0) -> None:
        self.maxsize = maxsize
        self.max_bytes = max_bytes
        self.max_deliveries = max_deliveries
        self.closed = False
        self.nbytes = 0
        self._keys: dict[Hashable, _KeyQueue] = {}
        self._starved: dict[Hashable, _KeyQueue] = {}  # keys whose next put waits for bytes, the longest wait first
        self._waiting: dict[Ticket, Hashable] = {}
        self._delivered: dict[Ticket, tuple[Hashable, tuple[QueuedItem, ...]]] = {}
        self._takers: dict[Ticket, str] = {}  # consumer of each delivery that answers a take
        self._drains: set[Ticket] = set()  # deliveries of undeliverable items
        self._seq = 0

    # --- inspection ---

    def in_use(self) -> list[Hashable]:
        """Return the keys in use, the oldest first."""
        return list(self._keys)

    def waiting(self, key: Hashable) -> list[QueuedItem]:
        """Return the waiting items."""
        found = self._keys.get(key)
        return [] if found is None else list(found.items)

    def size(self, key: Hashable) -> int:
        """Return the number of waiting items."""
        found = self._keys.get(key)
        return 0 if found is None else len(found.items)

    def full(self, key: Hashable) -> bool:
        """True if a put would wait, for the number of items or for bytes."""
        found = self._keys.get(key)
        return found is not None and (bool(found.parked) or not self._room(found, 1))

    def undeliverable(self, key: Hashable) -> list[QueuedItem]:
        """Return the undeliverable items, the oldest first."""
        found = self._keys.get(key)
        return [] if found is None else list(found.dead)

    def unacknowledged(self) -> int:
        """Return the number of deliveries that are not acknowledged."""
        return len(self._delivered)

    def is_out(self, ticket: Ticket) -> bool:
        """True if that delivery is not acknowledged."""
        return ticket in self._delivered

    @property
    def drained(self) -> bool:
        """True if it is closed and every item was acknowledged, so that its host can end."""
        return self.closed and not self._keys

    # --- requests ---

    def put(self, ticket: Ticket, key: Hashable, item: QueuedItem, nowait: bool = False) -> list[Command]:
        """Append an item, or wait for room; *nowait* refuses instead of waiting."""
        if self.closed:
            return [RefuseRequest(ticket, "closed")]
        queue = self._key(key)
        if queue.parked or not self._room(queue, item.nbytes):
            if nowait:
                return [RefuseRequest(ticket, "full")]
            queue.parked[ticket] = item
            self._waiting[ticket] = key
            self._note_starved(key, queue)
            return []
        self._enter(queue, item)
        if queue.getters:
            return [AcceptPut(ticket), *self._pump(key, queue)]
        return [AcceptPut(ticket)]

    def get(self, ticket: Ticket, key: Hashable, nowait: bool = False) -> list[Command]:
        """Take the item at the head, or wait for one; *nowait* refuses instead of waiting."""
        queue = self._key(key)
        if not queue.items and (nowait or self.closed):
            self._drop_if_unused(key, queue)
            return [RefuseRequest(ticket, "closed" if self.closed else "empty")]
        if queue.items and not queue.getters and not queue.parked:  # as below, but at once
            item = queue.items.popleft()
            self._delivered[ticket] = (key, (item,))
            queue.out += 1
            return [DeliverItems(ticket, (item,))]
        return self._wait(ticket, key, queue, _Getter(None))

    def batch(self, ticket: Ticket, key: Hashable, target: float) -> list[Command]:
        """Take items from the head until the next would make more than *target*; wait while there is less.

        What it takes while it waits makes room for others, and goes back if it is cancelled.
        """
        queue = self._key(key)
        if self.closed and not queue.items:
            self._drop_if_unused(key, queue)
            return [RefuseRequest(ticket, "closed")]
        commands = self._wait(ticket, key, queue, _Getter(target))
        return [*commands, *self._end_getters(key, queue)] if self.closed else commands

    def take(self, ticket: Ticket, key: Hashable, taker: str) -> list[Command]:
        """Take the item at the head until it is acknowledged or fails, or wait for one.

        An item whose deliveries have failed too often becomes undeliverable instead, and the take is refused. On a
        closed channel a take also waits while items of the key are out, since these may come back.
        """
        queue = self._key(key)
        if self.closed and not queue.items and not queue.out:
            self._drop_if_unused(key, queue)
            return [RefuseRequest(ticket, "closed")]
        return self._wait(ticket, key, queue, _Getter(None, taker))

    def drain(self, ticket: Ticket, key: Hashable) -> list[Command]:
        """Deliver all undeliverable items of a key; they come back to its list unless the ticket is acknowledged."""
        queue = self._key(key)
        items, queue.dead = tuple(queue.dead), []
        if items:
            self._delivered[ticket] = (key, items)
            self._drains.add(ticket)
            queue.out += 1
        self._drop_if_unused(key, queue)
        return [DeliverItems(ticket, items, "drain")]

    def ack(self, ticket: Ticket) -> list[Command]:
        """Remove the delivered items: user code has them, or has processed them.

        A ticket that is not known is ignored: its items went back before.
        """
        delivered = self._delivered.pop(ticket, None)
        if delivered is None:
            return []
        key, items = delivered
        queue = self._keys[key]
        queue.out -= 1
        if self._takers:
            self._takers.pop(ticket, None)
        if self._drains and ticket in self._drains:
            self._drains.remove(ticket)
        else:
            queue.count -= len(items)
        for item in items:
            self.nbytes -= item.nbytes
        commands: list[Command] = []
        for other, starved in list(self._starved.items()) if self._starved else ():  # other keys do not wait for bytes
            commands += self._pump(other, starved)
        if self.closed and queue.getters:
            commands += self._pump(key, queue)
        self._drop_if_unused(key, queue)
        return commands

    def fail(self, ticket: Ticket, how: str) -> list[Command]:
        """Return the items of a failed delivery to the head of their queue, and count the failure.

        A ticket that is not known is ignored: its items went back before.
        """
        delivered = self._delivered.get(ticket)
        if delivered is None:
            return []
        for item in delivered[1]:
            self._count_failure(item, self._takers.get(ticket, ""), how)
        return self._return_delivery(ticket)

    def cancel(self, ticket: Ticket, back: bool = False) -> list[Command]:
        """Refuse a request that still waits.

        If its items are on their way already, they are the requester's; with *back* they return to the queue, and the
        failure is not counted.
        """
        key = self._waiting.get(ticket)
        if key is not None:
            queue = self._keys[key]
            self._leave(ticket, queue)
            return [RefuseRequest(ticket, "cancelled"), *self._pump(key, queue)]
        return self._return_delivery(ticket) if back else []

    def owner_gone(self, owner: str, how: str = "") -> list[Command]:
        """Return what an ended process had not acknowledged, and count the failure; what it put stays."""
        touched: dict[Hashable, _KeyQueue] = {}
        for ticket, key in [(t, k) for t, k in self._waiting.items() if t.owner == owner]:
            queue = self._keys[key]
            if ticket in queue.getters:
                self._leave(ticket, queue)
                touched[key] = queue
        for ticket in [t for t in self._delivered if t.owner == owner]:
            key, items = self._delivered[ticket]
            queue = touched[key] = self._keys[key]
            if ticket not in self._drains:
                for item in items:
                    self._count_failure(item, self._takers.get(ticket, ""), how)
            self._undeliver(ticket)
        return [command for key, queue in touched.items() for command in self._pump(key, queue)]

    def close(self) -> list[Command]:
        """Refuse puts from now on, and gets once their key is empty. Twice is fine."""
        self.closed = True
        commands: list[Command] = []
        for key, queue in list(self._keys.items()):
            for ticket in queue.parked:
                del self._waiting[ticket]
                commands.append(RefuseRequest(ticket, "closed"))
            queue.parked.clear()
            self._starved.pop(key, None)
            commands += self._end_getters(key, queue)
        return commands

    # --- inside ---

    def _key(self, key: Hashable) -> _KeyQueue:
        queue = self._keys.get(key)
        if queue is None:
            queue = self._keys[key] = _KeyQueue()
        return queue

    def _room(self, queue: _KeyQueue, nbytes: int) -> bool:
        if 0 < self.maxsize <= len(queue.items):
            return False
        return self.max_bytes <= 0 or queue.count == 0 or self.nbytes + nbytes <= self.max_bytes

    def _note_starved(self, key: Hashable, queue: _KeyQueue) -> None:
        """Keep track of the keys whose next put waits for bytes, not for the number of items."""
        if queue.parked and not 0 < self.maxsize <= len(queue.items):
            self._starved.setdefault(key, queue)
        else:
            self._starved.pop(key, None)

    def _enter(self, queue: _KeyQueue, item: QueuedItem) -> None:
        self._seq += 1
        item.seq = self._seq
        self.nbytes += item.nbytes
        queue.count += 1
        queue.items.append(item)

    def _wait(self, ticket: Ticket, key: Hashable, queue: _KeyQueue, getter: _Getter) -> list[Command]:
        queue.getters[ticket] = getter
        self._waiting[ticket] = key
        return self._pump(key, queue)

    def _leave(self, ticket: Ticket, queue: _KeyQueue) -> None:
        """Remove a waiting request; the items of its batch go back."""
        del self._waiting[ticket]
        if queue.parked.pop(ticket, None) is None:
            self._return(queue, queue.getters.pop(ticket).held)

    def _return(self, queue: _KeyQueue, items: Iterable[QueuedItem]) -> None:
        back = list(items)
        if not back:
            return
        first = next(iter(queue.getters.values()), None)
        if first is not None and first.held:  # a batch that took later items starts again, to keep the order
            back += first.held
            first.held, first.total = [], 0
        back.sort(key=lambda item: item.seq)
        before = []
        while queue.items and queue.items[0].seq < back[-1].seq:
            before.append(queue.items.popleft())  # items that came back earlier
        queue.items.extendleft(sorted([*before, *back], key=lambda item: -item.seq))

    def _count_failure(self, item: QueuedItem, consumer: str, how: str) -> None:
        item.again = True
        item.failed += 1
        item.last_failure = (consumer, how)

    def _return_delivery(self, ticket: Ticket) -> list[Command]:
        delivered = self._delivered.get(ticket)
        if delivered is None:
            return []
        self._undeliver(ticket)
        key = delivered[0]
        return self._pump(key, self._keys[key])

    def _undeliver(self, ticket: Ticket) -> None:
        """Return the items of a delivery to where they came from."""
        key, items = self._delivered.pop(ticket)
        queue = self._keys[key]
        queue.out -= 1
        self._takers.pop(ticket, None)
        if ticket in self._drains:
            self._drains.remove(ticket)
            queue.dead = sorted([*queue.dead, *items], key=lambda item: item.seq)
        else:
            self._return(queue, items)

    def _make_undeliverable(self, ticket: Ticket, queue: _KeyQueue) -> RefuseRequest:
        """Make the head undeliverable, and refuse the take that would have got it."""
        item = queue.items.popleft()
        queue.dead.append(item)
        queue.count -= 1
        self._leave(ticket, queue)
        return RefuseRequest(ticket, "undeliverable", item)

    def _pump(self, key: Hashable, queue: _KeyQueue) -> list[Command]:
        """Serve the getters in order, and accept parked puts as room is made."""
        commands: list[Command] = []
        moved = True
        while moved:
            moved = False
            while queue.getters and queue.items:
                ticket, getter = next(iter(queue.getters.items()))
                if getter.taker is not None and 0 < self.max_deliveries <= queue.items[0].failed:
                    commands.append(self._make_undeliverable(ticket, queue))
                    moved = True
                    continue
                if not self._served(getter, queue):
                    break
                moved = True
                commands.append(self._deliver(ticket, key, queue))
            if queue.getters and not queue.items:  # a batch of weight 0 is complete without items
                ticket, getter = next(iter(queue.getters.items()))
                if getter.target is not None and getter.total >= getter.target:
                    moved = True
                    commands.append(self._deliver(ticket, key, queue))
            while queue.parked and self._room(queue, next(iter(queue.parked.values())).nbytes):
                ticket, item = queue.parked.popitem(last=False)
                del self._waiting[ticket]
                self._enter(queue, item)
                self._starved.pop(key, None)  # `_note_starved` adds it behind the other keys
                commands.append(AcceptPut(ticket))
                moved = True
        if queue.parked or key in self._starved:
            self._note_starved(key, queue)
        if self.closed and queue.getters and not queue.items and not queue.out:
            commands += self._end_getters(key, queue)
        self._drop_if_unused(key, queue)
        return commands

    def _served(self, getter: _Getter, queue: _KeyQueue) -> bool:
        """Give items to the first getter; True if it has all that it waits for."""
        if getter.target is None:
            getter.held.append(queue.items.popleft())
            return True
        while queue.items and getter.total + queue.items[0].weight <= getter.target:
            item = queue.items.popleft()
            getter.held.append(item)
            getter.total += item.weight
        return bool(queue.items) or getter.total >= getter.target

    def _deliver(self, ticket: Ticket, key: Hashable, queue: _KeyQueue) -> DeliverItems:
        del self._waiting[ticket]
        getter = queue.getters.pop(ticket)
        items = tuple(getter.held)
        if items:
            self._delivered[ticket] = (key, items)
            queue.out += 1
            if getter.taker is not None:
                self._takers[ticket] = getter.taker
                return DeliverItems(ticket, items, "take")
        return DeliverItems(ticket, items)

    def _end_getters(self, key: Hashable, queue: _KeyQueue) -> list[Command]:
        """End the getters of an empty key of a closed channel: batches get what they have, takes wait for items out."""
        commands: list[Command] = []
        for ticket, getter in list(queue.getters.items()):
            if getter.held:
                commands.append(self._deliver(ticket, key, queue))
            elif getter.taker is None or not queue.out:
                self._leave(ticket, queue)
                commands.append(RefuseRequest(ticket, "closed"))
        self._drop_if_unused(key, queue)
        return commands

    def _drop_if_unused(self, key: Hashable, queue: _KeyQueue) -> None:
        if queue.unused:
            self._keys.pop(key, None)
