"""Items of a channel, requests for them, and what the queue decides about these. Pure.

A channel's decisions: who gets which item, and who waits. Pure; the host and the local channel are its shells.

House rules:
* Items wait only while nobody waits for them: under a key there are items or getters, never both.
* An item is in one place: parked (its put is not accepted), waiting, held by a batch that is not
  complete, delivered and not acknowledged, or given up. It leaves by its acknowledgement alone.
* What comes back goes where it came from: before everything that entered the queue after it.
* A ticket is answered once. An answer to somebody who is gone is nobody's business here.
* Bytes are limited over all keys, but a key with nothing in it always takes one item: so a full key
  blocks no other one.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
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


@dataclass
class _Getter:
    """Who waits for items; `target` is a batch's, None for one item. `held` is what the batch has so far.

    `taker` is the consumer's name, of a take; None of a get.
    """

    target: float | None
    taker: str | None = None
    held: list[Item] = field(default_factory=list)
    total: float = 0


@dataclass
class _Key:
    """One FIFO. `out` is the number of deliveries under way; `count` that of all items that entered and were neither
    acknowledged nor given up. Those that were given up are in `dead`.
    """

    items: collections.deque[Item] = field(default_factory=collections.deque)
    parked: collections.OrderedDict[Ticket, Item] = field(default_factory=collections.OrderedDict)
    getters: collections.OrderedDict[Ticket, _Getter] = field(default_factory=collections.OrderedDict)
    dead: list[Item] = field(default_factory=list)
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
        self._keys: dict[Hashable, _Key] = {}
        self._starved: dict[Hashable, _Key] = {}  # whose next put waits for bytes; who waits longest is first
        self._waiting: dict[Ticket, Hashable] = {}
        self._delivered: dict[Ticket, tuple[Hashable, tuple[Item, ...]]] = {}
        self._takers: dict[Ticket, str] = {}  # of the deliveries that answer takes
        self._drains: set[Ticket] = set()  # the deliveries of items that were given up
        self._seq = 0

    # --- looking ---

    def in_use(self) -> list[Hashable]:
        """Keys in use, the oldest first."""
        return list(self._keys)

    def waiting(self, key: Hashable) -> list[Item]:
        """Items that a get would find now."""
        found = self._keys.get(key)
        return [] if found is None else list(found.items)

    def size(self, key: Hashable) -> int:
        """Number of waiting items."""
        found = self._keys.get(key)
        return 0 if found is None else len(found.items)

    def full(self, key: Hashable) -> bool:
        """Whether a put would wait. A key with a limit of bytes alone is full when these are reached."""
        found = self._keys.get(key)
        return found is not None and (bool(found.parked) or not self._room(found, 1))

    def undeliverable(self, key: Hashable) -> list[Item]:
        """Items that takes have given up, the oldest first."""
        found = self._keys.get(key)
        return [] if found is None else list(found.dead)

    def unacknowledged(self) -> int:
        """Number of deliveries that may come back."""
        return len(self._delivered)

    def is_out(self, ticket: Ticket) -> bool:
        """True if that delivery may come back."""
        return ticket in self._delivered

    @property
    def drained(self) -> bool:
        """True if it is closed, and every item was acknowledged: the channel is not needed any more."""
        return self.closed and not self._keys

    # --- requests ---

    def put(self, ticket: Ticket, key: Hashable, item: Item, nowait: bool = False) -> list[Command]:
        """Append an item, or wait for room; *nowait* refuses instead of waiting."""
        if self.closed:
            return [Refused(ticket, "closed")]
        queue = self._key(key)
        if queue.parked or not self._room(queue, item.nbytes):
            if nowait:
                return [Refused(ticket, "full")]
            queue.parked[ticket] = item
            self._waiting[ticket] = key
            self._note_starved(key, queue)
            return []
        self._enter(queue, item)
        if queue.getters:
            return [Accepted(ticket), *self._pump(key, queue)]
        return [Accepted(ticket)]

    def get(self, ticket: Ticket, key: Hashable, nowait: bool = False) -> list[Command]:
        """Take the item at the head, or wait for one; *nowait* refuses instead of waiting."""
        queue = self._key(key)
        if not queue.items and (nowait or self.closed):
            self._drop_if_unused(key, queue)
            return [Refused(ticket, "closed" if self.closed else "empty")]
        if queue.items and not queue.getters and not queue.parked:  # as below, but at once
            item = queue.items.popleft()
            self._delivered[ticket] = (key, (item,))
            queue.out += 1
            return [Deliver(ticket, (item,))]
        return self._wait(ticket, key, queue, _Getter(None))

    def batch(self, ticket: Ticket, key: Hashable, target: float) -> list[Command]:
        """Take items from the head until the next would make more than *target*; wait while there is less.

        What it takes while it waits makes room for others, and goes back if it is cancelled.
        """
        queue = self._key(key)
        if self.closed and not queue.items:
            self._drop_if_unused(key, queue)
            return [Refused(ticket, "closed")]
        commands = self._wait(ticket, key, queue, _Getter(target))
        return [*commands, *self._end_getters(key, queue)] if self.closed else commands

    def take(self, ticket: Ticket, key: Hashable, taker: str) -> list[Command]:
        """Take the item at the head until it is acknowledged or fails, or wait for one.

        An item whose deliveries have failed too often is given up instead. On a closed channel this waits also while
        items are out, since these may come back.

        Args:
            ticket, key: as elsewhere.
            taker: the consumer, for people.
        """
        queue = self._key(key)
        if self.closed and not queue.items and not queue.out:
            self._drop_if_unused(key, queue)
            return [Refused(ticket, "closed")]
        return self._wait(ticket, key, queue, _Getter(None, taker))

    def drain(self, ticket: Ticket, key: Hashable) -> list[Command]:
        """Deliver all items that were given up; they come back to the list unless the ticket is acknowledged."""
        queue = self._key(key)
        items, queue.dead = tuple(queue.dead), []
        if items:
            self._delivered[ticket] = (key, items)
            self._drains.add(ticket)
            queue.out += 1
        self._drop_if_unused(key, queue)
        return [Deliver(ticket, items, "drain")]

    def ack(self, ticket: Ticket) -> list[Command]:
        """Its items have reached the user's code, or were processed. Unknown tickets are ignored: their items went
        back before.
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
        for other, starved in list(self._starved.items()) if self._starved else ():  # others have no use of bytes
            commands += self._pump(other, starved)
        if self.closed and queue.getters:
            commands += self._pump(key, queue)
        self._drop_if_unused(key, queue)
        return commands

    def fail(self, ticket: Ticket, how: str) -> list[Command]:
        """A delivery has ended without success: its items are the head again, and count it.

        Args:
            ticket: of the delivery. Unknown ones are ignored: their items went back before.
            how: how it ended, for people.
        """
        delivered = self._delivered.get(ticket)
        if delivered is None:
            return []
        for item in delivered[1]:
            self._count(item, self._takers.get(ticket, ""), how)
        return self._give_back(ticket)

    def cancel(self, ticket: Ticket, back: bool = False) -> list[Command]:
        """Nobody waits for *ticket* any more.

        What still waits is refused as cancelled. If its items are on their way, *back* says that nobody will
        look at them: they go back unmarked. Otherwise who asked takes them.
        """
        key = self._waiting.get(ticket)
        if key is not None:
            queue = self._keys[key]
            self._leave(ticket, queue)
            return [Refused(ticket, "cancelled"), *self._pump(key, queue)]
        return self._give_back(ticket) if back else []

    def owner_gone(self, owner: str, how: str = "") -> list[Command]:
        """A process has ended, *how* for people: what it had not acknowledged goes back, marked; what it put stays."""
        touched: dict[Hashable, _Key] = {}
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
                    self._count(item, self._takers.get(ticket, ""), how)
            self._undeliver(ticket)
        return [command for key, queue in touched.items() for command in self._pump(key, queue)]

    def close(self) -> list[Command]:
        """No more puts; gets end when their key is empty. Closing twice is fine."""
        self.closed = True
        commands: list[Command] = []
        for key, queue in list(self._keys.items()):
            for ticket in queue.parked:
                del self._waiting[ticket]
                commands.append(Refused(ticket, "closed"))
            queue.parked.clear()
            self._starved.pop(key, None)
            commands += self._end_getters(key, queue)
        return commands

    # --- inside ---

    def _key(self, key: Hashable) -> _Key:
        queue = self._keys.get(key)
        if queue is None:
            queue = self._keys[key] = _Key()
        return queue

    def _room(self, queue: _Key, nbytes: int) -> bool:
        if 0 < self.maxsize <= len(queue.items):
            return False
        return self.max_bytes <= 0 or queue.count == 0 or self.nbytes + nbytes <= self.max_bytes

    def _note_starved(self, key: Hashable, queue: _Key) -> None:
        """Keep track of who waits for bytes, and not for the number of its items."""
        if queue.parked and not 0 < self.maxsize <= len(queue.items):
            self._starved.setdefault(key, queue)
        else:
            self._starved.pop(key, None)

    def _enter(self, queue: _Key, item: Item) -> None:
        self._seq += 1
        item.seq = self._seq
        self.nbytes += item.nbytes
        queue.count += 1
        queue.items.append(item)

    def _wait(self, ticket: Ticket, key: Hashable, queue: _Key, getter: _Getter) -> list[Command]:
        queue.getters[ticket] = getter
        self._waiting[ticket] = key
        return self._pump(key, queue)

    def _leave(self, ticket: Ticket, queue: _Key) -> None:
        """A request that waits is over; what its batch holds goes back."""
        del self._waiting[ticket]
        if queue.parked.pop(ticket, None) is None:
            self._return(queue, queue.getters.pop(ticket).held)

    def _return(self, queue: _Key, items: Iterable[Item]) -> None:
        back = list(items)
        if not back:
            return
        first = next(iter(queue.getters.values()), None)
        if first is not None and first.held:  # a batch that took what came after these takes again, in order
            back += first.held
            first.held, first.total = [], 0
        back.sort(key=lambda item: item.seq)
        before = []
        while queue.items and queue.items[0].seq < back[-1].seq:
            before.append(queue.items.popleft())  # these came back earlier
        queue.items.extendleft(sorted([*before, *back], key=lambda item: -item.seq))

    def _count(self, item: Item, consumer: str, how: str) -> None:
        item.again = True
        item.failed += 1
        item.story = (consumer, how)

    def _give_back(self, ticket: Ticket) -> list[Command]:
        delivered = self._delivered.get(ticket)
        if delivered is None:
            return []
        self._undeliver(ticket)
        key = delivered[0]
        return self._pump(key, self._keys[key])

    def _undeliver(self, ticket: Ticket) -> None:
        """Put the items of a delivery back where they came from."""
        key, items = self._delivered.pop(ticket)
        queue = self._keys[key]
        queue.out -= 1
        self._takers.pop(ticket, None)
        if ticket in self._drains:
            self._drains.remove(ticket)
            queue.dead = sorted([*queue.dead, *items], key=lambda item: item.seq)
        else:
            self._return(queue, items)

    def _give_up(self, ticket: Ticket, queue: _Key) -> Refused:
        """Put the head, whose deliveries have failed too often, on the list of such items; say so to who took it."""
        item = queue.items.popleft()
        queue.dead.append(item)
        queue.count -= 1
        self._leave(ticket, queue)
        return Refused(ticket, "undeliverable", item)

    def _pump(self, key: Hashable, queue: _Key) -> list[Command]:
        """Serve getters in their order, and let parked puts in as room is made."""
        commands: list[Command] = []
        moved = True
        while moved:
            moved = False
            while queue.getters and queue.items:
                ticket, getter = next(iter(queue.getters.items()))
                if getter.taker is not None and 0 < self.max_deliveries <= queue.items[0].failed:
                    commands.append(self._give_up(ticket, queue))
                    moved = True
                    continue
                if not self._served(getter, queue):
                    break
                moved = True
                commands.append(self._deliver(ticket, key, queue))
            if queue.getters and not queue.items:  # a batch whose target is reached by nothing
                ticket, getter = next(iter(queue.getters.items()))
                if getter.target is not None and getter.total >= getter.target:
                    moved = True
                    commands.append(self._deliver(ticket, key, queue))
            while queue.parked and self._room(queue, next(iter(queue.parked.values())).nbytes):
                ticket, item = queue.parked.popitem(last=False)
                del self._waiting[ticket]
                self._enter(queue, item)
                self._starved.pop(key, None)  # behind the others, if more of it waits
                commands.append(Accepted(ticket))
                moved = True
        if queue.parked or key in self._starved:
            self._note_starved(key, queue)
        if self.closed and queue.getters and not queue.items and not queue.out:
            commands += self._end_getters(key, queue)
        self._drop_if_unused(key, queue)
        return commands

    def _served(self, getter: _Getter, queue: _Key) -> bool:
        """Give items to the first getter; whether it has all it waits for."""
        if getter.target is None:
            getter.held.append(queue.items.popleft())
            return True
        while queue.items and getter.total + queue.items[0].weight <= getter.target:
            item = queue.items.popleft()
            getter.held.append(item)
            getter.total += item.weight
        return bool(queue.items) or getter.total >= getter.target

    def _deliver(self, ticket: Ticket, key: Hashable, queue: _Key) -> Deliver:
        del self._waiting[ticket]
        getter = queue.getters.pop(ticket)
        items = tuple(getter.held)
        if items:
            self._delivered[ticket] = (key, items)
            queue.out += 1
            if getter.taker is not None:
                self._takers[ticket] = getter.taker
                return Deliver(ticket, items, "take")
        return Deliver(ticket, items)

    def _end_getters(self, key: Hashable, queue: _Key) -> list[Command]:
        """The channel is closed and this key is empty: batches get what they have, takes wait for what is out."""
        commands: list[Command] = []
        for ticket, getter in list(queue.getters.items()):
            if getter.held:
                commands.append(self._deliver(ticket, key, queue))
            elif getter.taker is None or not queue.out:
                self._leave(ticket, queue)
                commands.append(Refused(ticket, "closed"))
        self._drop_if_unused(key, queue)
        return commands

    def _drop_if_unused(self, key: Hashable, queue: _Key) -> None:
        if queue.unused:
            self._keys.pop(key, None)
