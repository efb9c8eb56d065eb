"""Decide which request to a channel gets which item, and which request waits. Nothing here does I/O.

`ChannelQueue` takes requests and returns commands. Its callers carry out the commands: the channel's host process
(`queue_server`) and the local channel (`local`).

Rules that hold at all times:
* A key has waiting items or waiting getters, never both.
* An item is in exactly one place. It is parked (its put is not accepted yet), waiting, held by an incomplete batch,
  delivered and not acknowledged, or undeliverable. Only an acknowledgement removes it from the channel.
* An item that returns goes in front of every item that entered the queue after it.
* Each request is answered once. The caller drops answers to processes that are gone.
* The limit in bytes holds for all keys together. A key without items always accepts one item, so that a full key never
  blocks another key.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence

from rlinf_actors.channel.key_queue import GET, NO_QUEUE, Getter, KeyQueue, WorkerOf, key_figures, load
from rlinf_actors.channel.queue_commands import (
    AcceptPut,
    AcceptPuts,
    AnyCommand,
    DeliverEach,
    DeliverItems,
    QueuedItem,
    RefuseRequest,
    Ticket,
    tickets_of,
)
from rlinf_actors.wire.figure_values import MAX_KEYS, ChannelFigures

COUNTED_KEYS = 10_000
"""Most keys whose items `ChannelQueue.figures` counts."""


class ChannelQueue:
    """The queues of all keys of one channel, or of one replica of a channel.

    Args:
        maxsize: most waiting items per key; 0 or less for no limit.
        max_bytes: most bytes of all keys together, including unacknowledged and undeliverable items; 0 or less for no
            limit. A key with no items accepts one item regardless of this limit.
        max_deliveries: number of failed deliveries after which a take makes the item undeliverable; 0 or less for no
            limit.
    """

    def __init__(self, maxsize: int = 0, max_bytes: int = 0, max_deliveries: int = 0) -> None:
        self.maxsize = maxsize
        self.max_bytes = max_bytes
        self.max_deliveries = max_deliveries
        self.closed = False
        self.nbytes = 0
        self._keys: collections.defaultdict[Hashable, KeyQueue] = collections.defaultdict(KeyQueue)
        self._starved: dict[Hashable, KeyQueue] = {}  # keys whose next put waits for bytes, the longest wait first
        self._waiting: dict[Ticket, Hashable] = {}
        self._delivered: dict[Ticket, tuple[Hashable, tuple[QueuedItem, ...]]] = {}
        self._takers: dict[Ticket, str] = {}  # consumer of each delivery that answers a take
        self._drains: set[Ticket] = set()  # deliveries of undeliverable items
        self._seq = 0

    # --- inspection ---

    def in_use(self) -> list[Hashable]:
        return list(self._keys)

    def waiting(self, key: Hashable) -> list[QueuedItem]:
        return list(self._keys.get(key, NO_QUEUE).items)

    def size(self, key: Hashable) -> int:
        return len(self._keys.get(key, NO_QUEUE).items)

    def figures(self, worker_of: WorkerOf = lambda peer: "") -> ChannelFigures:
        pairs = list(itertools.islice(self._keys.items(), COUNTED_KEYS))
        queues = [queue for _, queue in pairs]
        busiest = heapq.nlargest(MAX_KEYS, pairs, lambda pair: load(pair[1]))
        return ChannelFigures(
            items=sum(len(queue.items) for queue in queues),
            size=self.nbytes,
            keys=len(self._keys),
            out=len(self._delivered),
            puts_waiting=sum(len(queue.parked) for queue in queues),
            gets_waiting=sum(len(queue.getters) for queue in queues),
            undeliverable=sum(len(queue.dead) for queue in queues),
            entered=self._seq,
            max_items=max(0, self.maxsize),
            max_bytes=max(0, self.max_bytes),
            by_key=[key_figures(key, queue, worker_of) for key, queue in busiest],
            closed=self.closed,
        )

    def full(self, key: Hashable) -> bool:
        """Return True if a put under this key would wait, because of the limit of items or the limit of bytes."""
        queue = self._keys.get(key, NO_QUEUE)
        return bool(queue.parked) or not self._room(queue, 1)

    def undeliverable(self, key: Hashable) -> list[QueuedItem]:
        return list(self._keys.get(key, NO_QUEUE).dead)

    def is_out(self, ticket: Ticket) -> bool:
        return ticket in self._delivered

    @property
    def drained(self) -> bool:
        """Return True if the channel is closed and holds no items and no requests, so that its host can end."""
        return self.closed and not self._keys

    # --- requests ---

    def put(self, ticket: Ticket, key: Hashable, item: QueuedItem, nowait: bool = False) -> list[AnyCommand]:
        """Append an item, and return the commands to carry out.

        If there is no room, park the item until there is, or refuse the put if *nowait* is True.
        """
        if self.closed:
            return [RefuseRequest(ticket, "closed")]
        queue = self._keys[key]
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

    def put_all(
        self, owner: str, peer: bytes, ids: Sequence[int], key: Hashable, items: Sequence[QueuedItem]
    ) -> list[AnyCommand]:
        """Handle the puts *ids*, which came by the link *peer* of *owner*, like one `put` after the other."""
        commands: list[AnyCommand] = []
        if self.closed:
            for id, item in zip(ids, items, strict=True):
                commands += self.put(Ticket(owner, peer, id), key, item)
            return commands
        queue = self._keys[key]
        room = 0 if queue.parked else self._room_for(queue, items)
        if room:
            self._enter(queue, *items[:room])
            commands.append(AcceptPuts(peer, ids[:room]))
        if room < len(items):
            tickets = tickets_of(owner, peer, ids[room:])
            queue.parked.update(zip(tickets, items[room:], strict=True))
            self._waiting.update(dict.fromkeys(tickets, key))
            self._note_starved(key, queue)
        if queue.getters:
            return [*commands, *self._pump(key, queue)]
        self._drop_if_unused(key, queue)
        return commands

    def get(self, ticket: Ticket, key: Hashable, nowait: bool = False) -> list[AnyCommand]:
        """Deliver the item at the head of *key*. If there is none, let the get wait; refuse it if *nowait* is True."""
        queue = self._keys[key]
        if not queue.items and (nowait or self.closed):
            self._drop_if_unused(key, queue)
            return [RefuseRequest(ticket, "closed" if self.closed else "empty")]
        if queue.items and not queue.getters and not queue.parked:  # as below, but at once
            item = queue.items.popleft()
            self._delivered[ticket] = (key, (item,))
            queue.out += 1
            return [DeliverItems(ticket, (item,))]
        return self._wait(ticket, key, queue, GET)

    def get_all(self, owner: str, peer: bytes, ids: Iterable[int], key: Hashable) -> list[AnyCommand]:
        """Handle the gets *ids*, which came by the link *peer* of *owner*, like one `get` after the other."""
        queue = self._keys[key]
        commands: list[AnyCommand] = []
        tickets = tickets_of(owner, peer, ids)
        if self.closed:
            for ticket in tickets:
                commands += self.get(ticket, key)
            self._drop_if_unused(key, self._keys[key])
            return commands
        if queue.items and not queue.getters:
            served = tickets[: len(queue.items)]
            tickets = tickets[len(served) :]
            if served:
                commands.append(self._serve(served, key, queue))
        queue.getters.update(dict.fromkeys(tickets, GET))
        self._waiting.update(dict.fromkeys(tickets, key))
        return [*commands, *self._pump(key, queue)]

    def batch(self, ticket: Ticket, key: Hashable, target: float) -> list[AnyCommand]:
        """Deliver items from the head of *key* whose total weight is at most *target*.

        The batch is complete when it weighs *target*, or when the next item would exceed *target*. Until then it waits
        and collects items, which makes room for puts. If the batch is cancelled, its items return.
        """
        queue = self._keys[key]
        if self.closed and not queue.items:
            self._drop_if_unused(key, queue)
            return [RefuseRequest(ticket, "closed")]
        commands = self._wait(ticket, key, queue, Getter(target))
        return [*commands, *self._end_getters(key, queue)] if self.closed else commands

    def take(self, ticket: Ticket, key: Hashable, taker: str) -> list[AnyCommand]:
        """Deliver the item at the head of *key*, or let the take wait for an item. Return the commands to carry out.

        The item stays in the channel until `ack` removes it or `fail` returns it. If too many deliveries of the item
        have failed, the item becomes undeliverable, and the take is refused. On a closed channel a take waits while
        delivered items of the key are not acknowledged, since these may return.
        """
        queue = self._keys[key]
        if self.closed and not queue.items and not queue.out:
            self._drop_if_unused(key, queue)
            return [RefuseRequest(ticket, "closed")]
        return self._wait(ticket, key, queue, Getter(None, taker))

    def drain(self, ticket: Ticket, key: Hashable) -> list[AnyCommand]:
        """Deliver all undeliverable items of a key. Without acknowledgement they become undeliverable again."""
        queue = self._keys[key]
        items, queue.dead = tuple(queue.dead), []
        if items:
            self._delivered[ticket] = (key, items)
            self._drains.add(ticket)
            queue.out += 1
        self._drop_if_unused(key, queue)
        return [DeliverItems(ticket, items, "drain")]

    def ack(self, *tickets: Ticket) -> list[AnyCommand]:
        """Remove the items delivered for *tickets*, because user code has received or processed them.

        An unknown ticket is ignored, because its items have returned to their queue before.
        """
        touched: dict[Hashable, KeyQueue] = {}
        for ticket in tickets:
            delivered = self._delivered.pop(ticket, None)
            if delivered is None:
                continue
            key, items = delivered
            queue = touched[key] = self._keys[key]
            queue.out -= 1
            if self._takers:
                self._takers.pop(ticket, None)
            if self._drains and ticket in self._drains:
                self._drains.remove(ticket)
            else:
                queue.count -= len(items)
            for item in items:
                self.nbytes -= item.nbytes
                queue.nbytes -= item.nbytes
        commands: list[AnyCommand] = []
        if self._starved and touched:  # only these keys wait for bytes
            for key, queue in list(self._starved.items()):
                commands += self._pump(key, queue)
        for key, queue in touched.items():
            if self.closed and queue.getters:
                commands += self._pump(key, queue)
            self._drop_if_unused(key, queue)
        return commands

    def fail(self, ticket: Ticket, how: str) -> list[AnyCommand]:
        """Return the items that were delivered for *ticket* to the head of their queue, and count a failure of each.

        *how* is the reason. An unknown ticket is ignored, because its items have returned to their queue before.
        """
        if ticket in self._delivered:
            self._count_failure(ticket, how)
        return self._return_delivery(ticket)

    def cancel(self, ticket: Ticket, back: bool = False) -> list[AnyCommand]:
        """Refuse a request that still waits. If its items are delivered already, they stay with the consumer.

        If *back* is True, delivered items return to the queue instead, and no failure is counted.
        """
        key = self._waiting.get(ticket)
        if key is not None:
            queue = self._keys[key]
            self._leave(ticket, queue)
            return [RefuseRequest(ticket, "cancelled"), *self._pump(key, queue)]
        return self._return_delivery(ticket) if back else []

    def owner_gone(self, owner: str, how: str = "") -> list[AnyCommand]:
        """End the gets, batches and takes of a process that is gone, and return its unacknowledged items to the queues.

        Each such item counts one failure, with the reason *how*, unless the process was draining undeliverable items.
        Items that the process has put stay in the channel. Return the commands to carry out.
        """
        touched: dict[Hashable, KeyQueue] = {}
        for ticket, key in [(t, k) for t, k in self._waiting.items() if t.owner == owner]:
            queue = self._keys[key]
            if ticket in queue.getters:
                self._leave(ticket, queue)
                touched[key] = queue
        for ticket in [t for t in self._delivered if t.owner == owner]:
            if ticket not in self._drains:
                self._count_failure(ticket, how)
            key = self._undeliver(ticket)
            touched[key] = self._keys[key]
        return [command for key, queue in touched.items() for command in self._pump(key, queue)]

    def close(self) -> list[AnyCommand]:
        """Close the channel: refuse all later puts, and refuse gets when their key is empty. May be called again."""
        self.closed = True
        commands: list[AnyCommand] = []
        for key, queue in list(self._keys.items()):
            for ticket in queue.parked:
                del self._waiting[ticket]
                commands.append(RefuseRequest(ticket, "closed"))
            queue.parked.clear()
            self._starved.pop(key, None)
            commands += self._end_getters(key, queue)
        return commands

    # --- inside ---

    def _room(self, queue: KeyQueue, nbytes: int) -> bool:
        if 0 < self.maxsize <= len(queue.items):
            return False
        return self.max_bytes <= 0 or queue.count == 0 or self.nbytes + nbytes <= self.max_bytes

    def _room_for(self, queue: KeyQueue, items: Collection[QueuedItem]) -> int:
        """Return how many of *items*, from the first on, have room now, one after the other."""
        most = min(len(items), self.maxsize - len(queue.items)) if self.maxsize > 0 else len(items)
        if most <= 0 or self.max_bytes <= 0:
            return max(most, 0)
        nbytes, count = self.nbytes, queue.count
        for found, item in enumerate(itertools.islice(items, most)):
            nbytes += item.nbytes
            if nbytes > self.max_bytes and count + found:
                return found
        return most

    def _note_starved(self, key: Hashable, queue: KeyQueue) -> None:
        """Keep in `_starved` the keys whose first parked put waits because of the limit of bytes, not of items."""
        if queue.parked and not 0 < self.maxsize <= len(queue.items):
            self._starved.setdefault(key, queue)
        else:
            self._starved.pop(key, None)

    def _enter(self, queue: KeyQueue, *items: QueuedItem) -> None:
        for item in items:
            self._seq += 1
            item.seq = self._seq
            self.nbytes += item.nbytes
            queue.nbytes += item.nbytes
        queue.count += len(items)
        queue.items.extend(items)

    def _wait(self, ticket: Ticket, key: Hashable, queue: KeyQueue, getter: Getter) -> list[AnyCommand]:
        queue.getters[ticket] = getter
        self._waiting[ticket] = key
        return self._pump(key, queue)

    def _leave(self, ticket: Ticket, queue: KeyQueue) -> None:
        """Remove a waiting request. If it is a batch, return the items that it has collected to the queue."""
        del self._waiting[ticket]
        if queue.parked.pop(ticket, None) is None:
            queue.give_back(queue.getters.pop(ticket).held)

    def _count_failure(self, ticket: Ticket, how: str) -> None:
        for item in self._delivered[ticket][1]:
            item.again = True
            item.failed += 1
            item.last_failure = (self._takers.get(ticket, ""), how)

    def _return_delivery(self, ticket: Ticket) -> list[AnyCommand]:
        if ticket not in self._delivered:
            return []
        key = self._undeliver(ticket)
        return self._pump(key, self._keys[key])

    def _undeliver(self, ticket: Ticket) -> Hashable:
        """Take back the items that were delivered for *ticket*, and return their key.

        Undeliverable items that were drained become undeliverable again. Other items return to their queue.
        """
        key, items = self._delivered.pop(ticket)
        queue = self._keys[key]
        queue.out -= 1
        self._takers.pop(ticket, None)
        if ticket in self._drains:
            self._drains.remove(ticket)
            queue.dead = sorted([*queue.dead, *items], key=lambda item: item.seq)
        else:
            queue.give_back(items)
        return key

    def _make_undeliverable(self, ticket: Ticket, queue: KeyQueue) -> RefuseRequest:
        """Make the item at the head undeliverable, and return the refusal of the take that would have received it."""
        item = queue.items.popleft()
        queue.dead.append(item)
        queue.count -= 1
        self._leave(ticket, queue)
        return RefuseRequest(ticket, "undeliverable", item)

    def _pump(self, key: Hashable, queue: KeyQueue) -> list[AnyCommand]:
        """Give waiting items to the waiting requests in order, and accept parked puts as room becomes free."""
        commands: list[AnyCommand] = []
        moved = True
        while moved:
            moved = False
            while queue.getters and queue.items:
                ticket, getter = next(iter(queue.getters.items()))
                if getter is GET:
                    moved = True
                    commands.append(self._serve_first(key, queue))
                    continue
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
            room = self._room_for(queue, queue.parked.values()) if queue.parked else 0
            if room:
                moved = True
                entering = [queue.parked.popitem(last=False) for _ in range(room)]
                self._enter(queue, *[item for _, item in entering])
                self._starved.pop(key, None)  # `_note_starved` adds it behind the other keys
                for ticket, _ in entering:
                    del self._waiting[ticket]
                    commands.append(AcceptPut(ticket))
        if queue.parked or key in self._starved:
            self._note_starved(key, queue)
        if self.closed and queue.getters and not queue.items and not queue.out:
            commands += self._end_getters(key, queue)
        self._drop_if_unused(key, queue)
        return commands

    def _serve_first(self, key: Hashable, queue: KeyQueue) -> DeliverItems | DeliverEach:
        """Deliver waiting items to the gets that have waited longest, up to the first batch or take."""
        tickets = []
        for ticket, getter in itertools.islice(queue.getters.items(), len(queue.items)):
            if getter is not GET:
                break
            tickets.append(ticket)
        for ticket in tickets:
            del self._waiting[ticket], queue.getters[ticket]
        return self._serve(tickets, key, queue)

    def _serve(self, tickets: Sequence[Ticket], key: Hashable, queue: KeyQueue) -> DeliverItems | DeliverEach:
        """Deliver one waiting item to each of the gets *tickets*, which do not wait (any more)."""
        items = [queue.items.popleft() for _ in tickets]
        deliveries = zip(itertools.repeat(key), zip(items, strict=True), strict=False)
        self._delivered.update(zip(tickets, deliveries, strict=True))
        queue.out += len(tickets)
        return DeliverItems(tickets[0], (items[0],)) if len(tickets) == 1 else DeliverEach(tickets, items)

    def _served(self, getter: Getter, queue: KeyQueue) -> bool:
        """Give waiting items to the first waiting request. Return True if the request has all that it needs."""
        if getter.target is None:
            getter.held.append(queue.items.popleft())
            return True
        while queue.items and getter.total + queue.items[0].weight <= getter.target:
            item = queue.items.popleft()
            getter.held.append(item)
            getter.total += item.weight
        return bool(queue.items) or getter.total >= getter.target

    def _deliver(self, ticket: Ticket, key: Hashable, queue: KeyQueue) -> DeliverItems:
        del self._waiting[ticket]
        getter = queue.getters.pop(ticket)
        items = tuple(getter.held)
        if items:
            self._delivered[ticket] = (key, items)
            queue.out += 1
            if getter.taker is not None:
                self._takers[ticket] = getter.taker
                return DeliverItems(ticket, items, "take")
        return DeliverItems(ticket, items, "batch")

    def _end_getters(self, key: Hashable, queue: KeyQueue) -> list[AnyCommand]:
        """End the requests that wait for items of a key, because the channel is closed and the key is empty.

        Batches get the items collected so far. Takes go on waiting while delivered items of the key are not
        acknowledged. All others are refused.
        """
        commands: list[AnyCommand] = []
        for ticket, getter in list(queue.getters.items()):
            if getter.held:
                commands.append(self._deliver(ticket, key, queue))
            elif getter.taker is None or not queue.out:
                self._leave(ticket, queue)
                commands.append(RefuseRequest(ticket, "closed"))
        self._drop_if_unused(key, queue)
        return commands

    def _drop_if_unused(self, key: Hashable, queue: KeyQueue) -> None:
        if queue.unused and self._keys.get(key) is queue:
            del self._keys[key]
