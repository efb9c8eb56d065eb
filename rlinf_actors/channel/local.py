"""LocalChannel: a channel inside one process (``local=True``). It uses ChannelQueue under a lock and never copies."""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from rlinf_actors import forks
from rlinf_actors.channel.key_encoding import key_bytes, key_of
from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_commands import (
    AcceptPut,
    AcceptPuts,
    AnyCommand,
    DeliverItems,
    QueuedItem,
    Ticket,
    one_by_one,
)
from rlinf_actors.channel.results import (
    PendingGet,
    PendingTake,
    ShownItem,
    UndeliverableItem,
    View,
    not_processed,
    refusal,
)
from rlinf_actors.net.held_signals import undisturbed
from rlinf_actors.runtime.deadline_timers import timers
from rlinf_actors.runtime.future import AsyncWork

log = logging.getLogger(__name__)

T = TypeVar("T")
G = TypeVar("G", bound="_Get")

_SHOWN_ITEMS = 20

_registered: weakref.WeakValueDictionary[str, LocalChannel] = weakref.WeakValueDictionary()
_with_items: set[LocalChannel] = set()
_registering = forks.free_in_children(threading.Lock())
"""The local channels that were sent to another process or came from one, by id; those with items are kept alive."""


def local_channel(name: str, maxsize: int, max_deliveries: int, id: str) -> LocalChannel:
    """Return this process's LocalChannel with the *id*; the first call makes an empty one.

    All handles with this id that come to this process share it, as the calls of RLinf's workers expect: one call puts
    items that a later call gets.
    """
    with _registering:
        channel = _registered.get(id)
        if channel is None:
            log.info("channel %r was made with local=True in another process: here it has items of its own", name)
            channel = _registered[id] = LocalChannel(name, maxsize, max_deliveries, id)
        return channel


class LocalChannel:
    """A channel whose items stay in this process. Any thread may use it.

    It consists of the queue, a lock for the queue, and the AsyncWorks of the waiting requests. Processes to which a
    handle of it is sent have a LocalChannel each with the same *id*; see `local_channel`.
    """

    starting = False  # as no process holds the items for this one

    def __init__(self, name: str = "local", maxsize: int = 0, max_deliveries: int = 0, id: str = "") -> None:
        self._name = name
        self._id = id
        self._maxsize = maxsize
        self._max_deliveries = max_deliveries
        self._queue = ChannelQueue(maxsize, 0, max_deliveries)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._works: dict[int, Callable[[], _Put | _Get | None]] = {}
        self._dropped: collections.deque[tuple[Ticket, str | None]] = collections.deque()

    @property
    def identity(self) -> tuple[str, int, int, str]:
        """The arguments of `local_channel` for this channel in another process, and back here."""
        if not self._id:
            with _registering:
                self._id = self._id or uuid.uuid4().hex
                _registered[self._id] = self
        return self._name, self._maxsize, self._max_deliveries, self._id

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        where, ticket = key_bytes(key), self._ticket()
        work = _Put(f"put() into channel {self._name!r}")
        self._works[ticket.id] = lambda: work
        self._do(lambda: self._queue.put(ticket, where, QueuedItem(item, 0, weight), nowait))
        self._limit(work, ticket, timeout)
        return work

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> PendingGet[Any]:
        where = key_bytes(key)
        work = _Get(self, f"get() from channel {self._name!r}", self._ticket())
        return self._take(work, lambda: self._queue.get(work.ticket, where, nowait), timeout)

    def batch(self, key: Hashable, target: float, timeout: float | None) -> PendingGet[list[Any]]:
        where = key_bytes(key)
        work = _Batch(self, f"get_batch() from channel {self._name!r}", self._ticket())
        return self._take(work, lambda: self._queue.batch(work.ticket, where, target), timeout)

    def take(self, key: Hashable, timeout: float | None) -> _Take:
        where = key_bytes(key)
        work = _Take(self, f"take() from channel {self._name!r}", self._ticket())
        work.key = key
        return self._take(work, lambda: self._queue.take(work.ticket, where, "this process"), timeout)

    def look(self, key: Hashable) -> AsyncWork[tuple[int, bool]]:
        where = key_bytes(key)
        with self._lock:
            return self.completed((self._queue.size(where), self._queue.full(where)))

    def show(self, what: str = "counts") -> AsyncWork[View]:
        queue = self._queue
        with self._lock:
            keys: list[Any] = queue.in_use()
            rows = [(key_of(key), queue.waiting(key), len(queue.undeliverable(key))) for key in keys]
            closed = queue.closed
        waiting = [
            (key, len(items), [ShownItem(i.value, 0, i.weight, i.again) for i in items[:_SHOWN_ITEMS]])
            for key, items, _ in rows
        ]
        return self.completed((closed, waiting, {key: dead for key, _, dead in rows if dead}))

    def undeliverable(self, key: Hashable, drain: bool) -> AsyncWork[list[UndeliverableItem[Any]]]:
        where, ticket = key_bytes(key), self._ticket()
        items: list[QueuedItem] = []

        def look() -> list[AnyCommand]:
            items.extend(self._queue.undeliverable(where))
            return [*self._queue.drain(ticket, where), *self._queue.ack(ticket)] if drain else []

        self._do(look)
        return self.completed([UndeliverableItem(item.value, key, item.failed, *item.last_failure) for item in items])

    def close(self) -> AsyncWork[None]:
        self._do(self._queue.close)
        return self.completed(None)

    # --- inside ---

    def _ticket(self) -> Ticket:
        return Ticket("", b"", next(self._ids))

    def _take(self, work: G, ask: Callable[[], list[AnyCommand]], timeout: float | None) -> G:
        self._works[work.ticket.id] = weakref.ref(work)
        self._do(ask)
        self._limit(work, work.ticket, timeout)
        return work

    def completed(self, value: T) -> AsyncWork[T]:
        work: AsyncWork[T] = AsyncWork(f"a request to channel {self._name!r}")
        work.resolve(value)
        return work

    def acknowledge(self, ticket: Ticket) -> None:
        """Remove the items that were delivered for *ticket*, because user code has received or processed them."""
        self._do(lambda: self._queue.ack(ticket))

    def fail(self, ticket: Ticket, how: str) -> None:
        """Return the item that was delivered for *ticket* to its queue. *how* says why it was not processed."""
        self._do(lambda: self._queue.fail(ticket, how))

    def _do(self, step: Callable[[], list[AnyCommand]]) -> None:
        undisturbed(None, self._do_now, step)

    def _do_now(self, step: Callable[[], list[AnyCommand]]) -> None:
        with self._lock:
            commands = step()
            self._keep()
        self._complete(commands)
        self._sweep()

    def drop(self, ticket: Ticket, how: str | None = None) -> None:
        """Return the items delivered for *ticket* to their queue.

        Safe in a destructor: on any thread, with any lock held.

        *how* says why the item was not processed; None if user code never received the items.
        """
        self._dropped.append((ticket, how))
        undisturbed(None, self._sweep)

    def _sweep(self) -> None:
        """Return all items given to `drop` to their queues, if the lock is free.

        A destructor may run on a thread that holds the lock. After that thread has released the lock, `_do` calls
        `_sweep` again.
        """
        while self._dropped and self._lock.acquire(blocking=False):
            commands: list[AnyCommand] = []
            try:
                while self._dropped:
                    ticket, how = self._dropped.popleft()
                    self._works.pop(ticket.id, None)
                    commands += self._queue.cancel(ticket, True) if how is None else self._queue.fail(ticket, how)
                self._keep()
            finally:
                self._lock.release()
            self._complete(commands)

    def _keep(self) -> None:
        """Keep a channel alive that has items, because code that puts one may drop its handle. Holds the lock."""
        if self._id:
            (_with_items.add if self._queue.in_use() else _with_items.discard)(self)

    def _complete(self, commands: list[AnyCommand]) -> None:
        for command in one_by_one(commands):
            assert not isinstance(command, AcceptPuts)
            found = self._works.pop(command.ticket.id, None)
            work = found() if found is not None else None
            if work is None:
                continue  # dropped: its destructor gives the items back
            if isinstance(command, AcceptPut):
                work.resolve(None)
            elif isinstance(command, DeliverItems):
                work.resolve(command.items)
            elif command.item is not None:
                item = command.item
                work.reject(not_processed(self._name, cast(_Take, work).key, item.failed, *item.last_failure))
            else:
                work.reject(refusal(self._name, command.why, work._what, work.had_s))

    def _limit(self, work: _Put | _Get, ticket: Ticket, timeout: float | None) -> None:
        if timeout is None or work.done():
            return
        work.had_s = timeout
        timer = timers.start(timeout, lambda: self._do(lambda: self._queue.cancel(ticket)))
        work._on_done(timer.cancel)


class _Put(AsyncWork[Any]):
    had_s = 0.0  # its time limit, for the error


class _Get(PendingGet[Any]):
    had_s = 0.0

    def __init__(self, channel: LocalChannel, what: str, ticket: Ticket) -> None:
        super().__init__(what)
        self.ticket = ticket
        self._channel = channel

    def _decode(self, arrived: tuple[QueuedItem, ...]) -> tuple[Any, bool]:
        return arrived[0].value, arrived[0].again

    def _acknowledge(self, arrived: tuple[QueuedItem, ...]) -> None:
        self._channel.acknowledge(self.ticket)

    def _give_back(self, later: bool) -> None:
        self._channel.drop(self.ticket)


class _Batch(_Get):
    def _decode(self, arrived: tuple[QueuedItem, ...]) -> tuple[Any, bool]:
        return [item.value for item in arrived], any(item.again for item in arrived)


class _Take(_Get, PendingTake[Any]):
    key: Hashable

    def _decode(self, arrived: tuple[QueuedItem, ...]) -> tuple[Any, bool]:
        self.deliveries = arrived[0].failed + 1
        return super()._decode(arrived)

    def _acknowledge(self, arrived: tuple[QueuedItem, ...]) -> None:
        """Do nothing when user code receives the item.

        A take acknowledges its item by `release`, when the user's block ends.
        """

    def release(self) -> AsyncWork[None]:
        self._channel.acknowledge(self.ticket)
        return self._channel.completed(None)

    def fail(self, how: str, later: bool = False) -> None:
        if later:
            self._channel.drop(self.ticket, how)
        else:
            self._channel.fail(self.ticket, how)
