"""Messages that arrived and receives that were posted, paired in order. Pure; the caller holds a lock.

A queue is named by (sender, stream): "" is what send and recv use, a broadcast has a stream of its
own. In a queue the first message goes to the first receive. A group that was started again under
its old name is another sender: its messages are not taken for those of the first.
"""

from __future__ import annotations

from collections import deque
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


@dataclass
class Arrived:
    """A message that is here.

    Attributes:
        incarnation: id of the worker that sent it.
        size: bytes that its sender gets back when it is taken.
        body: whatever the caller keeps of it.
    """

    incarnation: str
    size: int
    body: Any


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
        self.held = 0

    def arrived(self, key: Key, message: Arrived) -> P | None:
        """A message came: the receive that it goes to, None if it waits for one."""
        queue = self._queues.setdefault(key, _Queue())
        for receive in list(queue.receives):
            if receive.abandoned:
                queue.receives.remove(receive)
            elif receive.incarnation in ("", message.incarnation):
                queue.receives.remove(receive)
                self._tidy(key, queue)
                return receive
        queue.messages.append(message)
        self.held += message.size
        return None

    def posted(self, key: Key, receive: P) -> tuple[Arrived | None, list[Arrived]]:
        """A receive came: the message that it gets (None if it waits), and stale ones that nobody can get."""
        queue = self._queues.setdefault(key, _Queue())
        stale: list[Arrived] = []
        while queue.messages:
            message = queue.messages.popleft()
            self.held -= message.size
            if receive.incarnation in ("", message.incarnation):
                self._tidy(key, queue)
                return message, stale
            stale.append(message)
        queue.receives.append(receive)
        return None, stale

    def put_back(self, key: Key, message: Arrived) -> P | None:
        """A message was taken by somebody who never looked at it: it is the first again."""
        queue = self._queues.setdefault(key, _Queue())
        if queue.receives:
            return self.arrived(key, message)
        queue.messages.appendleft(message)
        self.held += message.size
        return None

    def withdraw(self, key: Key, receive: P) -> bool:
        """The receive does not wait any more; False if it does not wait here."""
        queue = self._queues.get(key)
        if queue is None or receive not in queue.receives:
            return False
        queue.receives.remove(receive)
        self._tidy(key, queue)
        return True

    def sender_gone(self, key: Key, incarnation: str) -> list[P]:
        """The sender will send nothing more: the receives that wait for it in vain. What arrived stays."""
        queue = self._queues.get(key)
        if queue is None:
            return []
        lost = [receive for receive in queue.receives if receive.incarnation == incarnation]
        for receive in lost:
            queue.receives.remove(receive)
        self._tidy(key, queue)
        return lost

    def forget(self, key: Key) -> list[Arrived]:
        """Nobody will receive from this queue any more: the messages that were in it."""
        queue = self._queues.pop(key, None)
        if queue is None:
            return []
        self.held -= sum(message.size for message in queue.messages)
        return list(queue.messages)

    def has_messages(self, key: Key) -> bool:
        """Whether a message waits."""
        queue = self._queues.get(key)
        return queue is not None and bool(queue.messages)

    def _tidy(self, key: Key, queue: _Queue[P]) -> None:
        if not queue.messages and not queue.receives:
            self._queues.pop(key, None)
