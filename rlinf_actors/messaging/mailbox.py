"""Messages that arrived and receives that were posted, paired in order. Pure; the caller holds a lock.

A queue is named by (sender, stream): "" is what send and recv use, a broadcast has a stream of its
own. In a queue the first message goes to the first receive. A group that was started again under
its old name is another sender: its messages are not taken for those of the first. A name is given
again when its last worker is gone, so what an earlier one sent is in front: it is stale, and dropped,
when a receive takes what a later one sent behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Key = tuple[str, str]
"""(name of the sender, stream)."""


class Posted(Protocol):
    """A receive that waits."""

    @property
    def abandoned(self) -> bool:
        """Whether nobody will look at what it gets: then it gets nothing."""

    @property
    def incarnation(self) -> str:
        """Id of the worker it waits for; "" for whoever has the name."""


P = TypeVar("P", bound=Posted)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

REMEMBERED = 1024
"""So many ended workers and broadcasts are known. What comes late comes within seconds: older ones are forgotten."""


class Recent(dict[K, V]):
    """The `REMEMBERED` newest entries; an older one leaves for each that is added beyond them."""

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > REMEMBERED:
            del self[next(iter(self))]


@dataclass(eq=False, slots=True)
class Arrived:
    """A message that is here.

    Attributes:
        incarnation: id of the worker that sent it.
        size: bytes that its sender gets back when it is taken.
        body: whatever the caller keeps of it.
        order: its place among all that arrived; the mailbox sets it.
    """

    incarnation: str
    size: int
    body: Any
    order: int = 0


@dataclass
class _Queue(Generic[P]):
    messages: deque[Arrived] = field(default_factory=deque)
    receives: deque[P] = field(default_factory=deque)


class Mailbox(Generic[P]):
    """All queues of one worker.

    Attributes:
        held: bytes of messages that wait for a receive.
    """

    def __init__(self) -> None:
        self._queues: dict[Key, _Queue[P]] = {}
        self._forgotten: Recent[Key, None] = Recent()
        self._gone: Recent[str, None] = Recent()
        self._count = 0
        self.held = 0

    def wants(self, key: Key, incarnation: str) -> bool:
        """Whether a message that comes now can ever be received."""
        return key not in self._forgotten and not (key[1] and incarnation in self._gone)

    def arrived(self, key: Key, message: Arrived) -> P | None:
        """A message came: the receive that it goes to, None if it waits for one."""
        self._count += 1
        message.order = self._count
        queue = self._queues.setdefault(key, _Queue())
        return self._pair(key, queue, message)

    def posted(self, key: Key, receive: P) -> tuple[Arrived | None, list[Arrived]]:
        """A receive came: the message that it gets (None if it waits), and stale ones that nobody can get."""
        queue = self._queues.setdefault(key, _Queue())
        for place, message in enumerate(queue.messages):
            if receive.incarnation in ("", message.incarnation):
                stale = self._drop(queue, place)
                queue.messages.popleft()
                self.held -= message.size
                self._tidy(key, queue)
                return message, stale
        queue.receives.append(receive)
        return None, []

    def put_back(self, key: Key, message: Arrived) -> P | None:
        """A message was taken by somebody who never looked at it: it has its place again, or goes to who waits."""
        return self._pair(key, self._queues.setdefault(key, _Queue()), message)

    def withdraw(self, key: Key, receive: P) -> bool:
        """The receive does not wait any more; False if it does not wait here."""
        queue = self._queues.get(key)
        if queue is None or receive not in queue.receives:
            return False
        queue.receives.remove(receive)
        self._tidy(key, queue)
        return True

    def sender_gone(self, name: str, incarnation: str) -> list[P]:
        """The sender will send nothing more: the receives that wait for it in vain.

        What it sent by send() and has arrived stays; its part in broadcasts is dropped, for they cannot go on.
        """
        self._gone[incarnation] = None
        for key in [key for key in self._queues if key[0] == name and key[1]]:
            self._drop_of(self._queues[key], incarnation)
            self._tidy(key, self._queues[key])
        key = (name, "")
        queue = self._queues.get(key)
        if queue is None:
            return []
        lost = [receive for receive in queue.receives if receive.incarnation == incarnation]
        for receive in lost:
            queue.receives.remove(receive)
        self._tidy(key, queue)
        return lost

    def forget(self, key: Key) -> list[Arrived]:
        """Nobody will receive from this queue any more: the messages that were in it. Later ones are not kept."""
        self._forgotten[key] = None
        queue = self._queues.pop(key, None)
        return [] if queue is None else self._drop(queue, len(queue.messages))

    def has_messages(self, key: Key) -> bool:
        """Whether a message waits."""
        queue = self._queues.get(key)
        return queue is not None and bool(queue.messages)

    def _pair(self, key: Key, queue: _Queue[P], message: Arrived) -> P | None:
        for receive in list(queue.receives):
            if receive.abandoned:
                queue.receives.remove(receive)
            elif receive.incarnation in ("", message.incarnation):
                queue.receives.remove(receive)
                self._tidy(key, queue)
                return receive
        later = 0
        while later < len(queue.messages) and queue.messages[-1 - later].order > message.order:
            later += 1
        queue.messages.insert(len(queue.messages) - later, message)
        self.held += message.size
        return None

    def _drop(self, queue: _Queue[P], count: int) -> list[Arrived]:
        dropped = [queue.messages.popleft() for _ in range(count)]
        self.held -= sum(message.size for message in dropped)
        return dropped

    def _drop_of(self, queue: _Queue[P], incarnation: str) -> None:
        for message in [message for message in queue.messages if message.incarnation == incarnation]:
            queue.messages.remove(message)
            self.held -= message.size

    def _tidy(self, key: Key, queue: _Queue[P]) -> None:
        if not queue.messages and not queue.receives:
            self._queues.pop(key, None)
