"""A channel's decisions: who gets which item, and who waits. Pure; the host and the local channel are its shells.

House rules:
* Items wait only while nobody waits for them: under a key there are items or getters, never both.
* An item is in one place: parked (its put is not accepted), waiting, held by a batch that is not
  complete, or delivered and not acknowledged. It leaves by its acknowledgement alone.
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


class Ticket(NamedTuple):
    """One request: `owner` is the process that made it, `peer` the link it came by, `id` its number there."""

    owner: str
    peer: bytes
    id: int


class Item:
    """Something that was put. `again`: somebody may have seen it before."""

    __slots__ = ("again", "nbytes", "seq", "value", "weight")

    def __init__(self, value: Any, nbytes: int = 0, weight: float = 0) -> None:
        self.value = value
        self.nbytes = nbytes
        self.weight = weight
        self.seq = 0
        self.again = False


class Accepted(NamedTuple):
    """The put is in."""

    ticket: Ticket


class Deliver(NamedTuple):
    """These items, in order; they come back unless the ticket is acknowledged. No items: nothing to acknowledge."""

    ticket: Ticket
    items: tuple[Item, ...]


class Refused(NamedTuple):
    """`why`: full, empty, closed or cancelled."""

    ticket: Ticket
    why: str


Command = Union[Accepted, Deliver, Refused]


@dataclass
class _Getter:
    """Who waits for items; `target` is a batch's, None for one item. `held` is what the batch has so far."""

    target: float | None
    held: list[Item] = field(default_factory=list)
    total: float = 0


@dataclass
class _Key:
    """One FIFO. `count` is of everything that entered and was not acknowledged, `out` of the deliveries under way."""

    items: collections.deque[Item] = field(default_factory=collections.deque)
    parked: collections.OrderedDict[Ticket, Item] = field(default_factory=collections.OrderedDict)
    getters: collections.OrderedDict[Ticket, _Getter] = field(default_factory=collections.OrderedDict)
    count: int = 0
    out: int = 0

    @property
    def unused(self) -> bool:
        return not (self.items or self.parked or self.getters or self.out)


class ChannelQueue:
    """All keys of one channel, or of one replica of it.

    Args:
        maxsize: waiting items per key; 0 or less for no limit.
        max_bytes: bytes of all keys together, delivered and unacknowledged ones included; a key with nothing
            in it always takes one item. 0 or less for no limit.
    """

    def __init__(self, maxsize: int = 0, max_bytes: int = 0) -> None:
        self.maxsize = maxsize
        self.max_bytes = max_bytes
        self.closed = False
        self.nbytes = 0
        self._keys: dict[Hashable, _Key] = {}
        self._starved: dict[Hashable, _Key] = {}  # whose next put waits for bytes; who waits longest is first
        self._waiting: dict[Ticket, Hashable] = {}
        self._delivered: dict[Ticket, tuple[Hashable, tuple[Item, ...]]] = {}
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

    def unacknowledged(self) -> int:
        """Number of deliveries that may come back."""
        return len(self._delivered)

    @property
    def drained(self) -> bool:
        """Whether it is closed, and everything that was put has been taken: nobody needs it any more."""
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

    def ack(self, ticket: Ticket) -> list[Command]:
        """Its items have reached the user's code. Unknown tickets are ignored: their items went back before."""
        delivered = self._delivered.pop(ticket, None)
        if delivered is None:
            return []
        key, items = delivered
        queue = self._keys[key]
        queue.out -= 1
        queue.count -= len(items)
        for item in items:
            self.nbytes -= item.nbytes
        commands: list[Command] = []
        for other, starved in list(self._starved.items()) if self._starved else ():  # others have no use of bytes
            commands += self._pump(other, starved)
        self._drop_if_unused(key, queue)
        return commands

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

    def owner_gone(self, owner: str) -> list[Command]:
        """A process has ended: what it had not acknowledged goes back, marked; what it put stays."""
        touched: dict[Hashable, _Key] = {}
        for ticket, key in [(t, k) for t, k in self._waiting.items() if t.owner == owner]:
            queue = self._keys[key]
            if ticket in queue.getters:
                self._leave(ticket, queue)
                touched[key] = queue
        for ticket in [t for t in self._delivered if t.owner == owner]:
            key, items = self._delivered.pop(ticket)
            queue = touched[key] = self._keys[key]
            for item in items:
                item.again = True
            queue.out -= 1
            self._return(queue, items)
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

    def _give_back(self, ticket: Ticket) -> list[Command]:
        delivered = self._delivered.pop(ticket, None)
        if delivered is None:
            return []
        key, items = delivered
        queue = self._keys[key]
        queue.out -= 1
        self._return(queue, items)
        return self._pump(key, queue)

    def _pump(self, key: Hashable, queue: _Key) -> list[Command]:
        """Serve getters in their order, and let parked puts in as room is made."""
        commands: list[Command] = []
        moved = True
        while moved:
            moved = False
            while queue.getters and queue.items:
                ticket, getter = next(iter(queue.getters.items()))
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
        items = tuple(queue.getters.pop(ticket).held)
        if items:
            self._delivered[ticket] = (key, items)
            queue.out += 1
        return Deliver(ticket, items)

    def _end_getters(self, key: Hashable, queue: _Key) -> list[Command]:
        """The channel is closed and this key is empty: batches get what they have."""
        commands: list[Command] = []
        for ticket, getter in list(queue.getters.items()):
            if getter.held:
                commands.append(self._deliver(ticket, key, queue))
            else:
                self._leave(ticket, queue)
                commands.append(Refused(ticket, "closed"))
        self._drop_if_unused(key, queue)
        return commands

    def _drop_if_unused(self, key: Hashable, queue: _Key) -> None:
        if queue.unused:
            self._keys.pop(key, None)
