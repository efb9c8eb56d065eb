"""Pair messages that arrived with receives that wait, in order. Nothing here does I/O; the caller holds a lock.

Each pair (sender, stream) has a queue. Stream "" carries send and recv; each broadcast tree has a stream of its own. In
a queue the first message goes to the first receive.

A group that is launched again under its old name is a different sender: its workers have new ids ("incarnations"). The
head grants a name again only when the last worker of the earlier group is gone, so messages of the earlier worker are
at the front of the queue. They are stale, and are dropped when a receive gets a later worker's message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar, Union

import msgspec

if TYPE_CHECKING:
    from rlinf_actors.messaging.blocking_receive import BlockingReceive
    from rlinf_actors.messaging.receive import PostedReceive

    Posted = Union[PostedReceive, BlockingReceive]
    """The entry of a receive."""

Key = tuple[str, str]
"""(name of the sender, stream): names a queue."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

REMEMBERED = 1024
"""Number of ended workers and broadcast streams that a mailbox remembers, in order to refuse their late messages."""


class Recent(dict[K, V]):
    """A dict that keeps its `REMEMBERED` newest entries. An added entry removes the oldest if the dict is full."""

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > REMEMBERED:
            del self[next(iter(self))]


class ArrivedMessage(msgspec.Struct, eq=False):
    """A message that has arrived.

    Attributes:
        incarnation: id of the worker that sent the message.
        size: bytes to return to the sender as credit when the message is received; 0 once they are returned.
        parts: contents of the message; AuthenticatedParts outside of tests.
        link: link on which the message arrived.
        outbox: number of the sender's outbox on that link.
        tensors: the message's IncomingTensors (tensor_receiver); None if no tensor travels beside the message.
        flow: number of its arrow in the trace; 0 if this process is not traced.
        order: position among all messages that arrived; set by the mailbox.
    """

    incarnation: str
    size: int
    parts: Any
    link: bytes = b""
    outbox: int = 0
    tensors: Any = None
    order: int = 0
    flow: int = 0


class _Queue(msgspec.Struct):
    messages: deque[ArrivedMessage] = msgspec.field(default_factory=deque)
    receives: deque[Posted] = msgspec.field(default_factory=deque)


class Mailbox:
    """The messages that one worker has received and its user code has not, and the receives that wait for messages."""

    def __init__(self) -> None:
        self._queues: dict[Key, _Queue] = {}
        self._forgotten: Recent[Key, None] = Recent()
        self._gone: Recent[str, None] = Recent()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of messages that wait for a receive."""
        return sum(len(queue.messages) for queue in list(self._queues.values()))

    def wants(self, key: Key, incarnation: str) -> bool:
        """Return False if a message must be dropped on arrival: its queue was forgotten, or its broadcast has ended.

        *key* is the message's sender and stream; *incarnation* is the id of the sending worker.
        """
        return key not in self._forgotten and not (key[1] and incarnation in self._gone)

    def arrived(self, key: Key, message: ArrivedMessage) -> Posted | None:
        """Add a message that has arrived.

        Return the receive that gets the message, or None if the message waits in its queue.
        """
        self._count += 1
        message.order = self._count
        return self.put_back(key, message)

    def put_back(self, key: Key, message: ArrivedMessage) -> Posted | None:
        """Put a message that no caller has seen back into its queue, in its old place.

        Return the waiting receive that gets the message, or None if the message waits.
        """
        queue = self._queues.setdefault(key, _Queue())
        for receive in list(queue.receives):
            if receive.abandoned:
                queue.receives.remove(receive)
            elif receive.incarnation in ("", message.incarnation):
                queue.receives.remove(receive)
                self._drop_if_empty(key, queue)
                return receive
        later = 0
        while later < len(queue.messages) and queue.messages[-1 - later].order > message.order:
            later += 1
        queue.messages.insert(len(queue.messages) - later, message)
        return None

    def posted(self, key: Key, receive: Posted) -> tuple[ArrivedMessage | None, list[ArrivedMessage]]:
        """Add a receive to its queue. Return the message for it, and the stale messages that were dropped.

        The message is None if the receive must wait.
        """
        queue = self._queues.setdefault(key, _Queue())
        for place, message in enumerate(queue.messages):
            if receive.incarnation in ("", message.incarnation):
                stale = self._drop(queue, place) if place else []
                queue.messages.popleft()
                self._drop_if_empty(key, queue)
                return message, stale
        queue.receives.append(receive)
        return None, []

    def next_receive(self, key: Key, incarnation: str) -> Posted | None:
        """Return the receive that would get a message that arrives now. *incarnation* is the id of its sender."""
        queue = self._queues.get(key)
        waiting = queue.receives if queue is not None and self.wants(key, incarnation) else ()
        return next((one for one in waiting if not one.abandoned and one.incarnation in ("", incarnation)), None)

    def withdraw(self, key: Key, receive: Posted) -> bool:
        """Remove a receive that waits in the queue *key*. Return True if it waited there, else False."""
        queue = self._queues.get(key)
        if queue is None or receive not in queue.receives:
            return False
        queue.receives.remove(receive)
        self._drop_if_empty(key, queue)
        return True

    def sender_gone(self, name: str, incarnation: str) -> list[Posted]:
        """Remove and return the receives of stream "" that wait for a worker that is gone.

        The worker's messages of stream "" can still be received. Its broadcast messages are dropped, since a broadcast
        cannot go on without a member.
        """
        self._gone[incarnation] = None
        for key in [key for key in self._queues if key[0] == name and key[1]]:
            queue = self._queues[key]
            for message in [message for message in queue.messages if message.incarnation == incarnation]:
                queue.messages.remove(message)
            self._drop_if_empty(key, queue)
        found = self._queues.get((name, ""))
        if found is None:
            return []
        lost = [receive for receive in found.receives if receive.incarnation == incarnation]
        for receive in lost:
            found.receives.remove(receive)
        self._drop_if_empty((name, ""), found)
        return lost

    def forget(self, key: Key) -> list[ArrivedMessage]:
        """Drop the queue *key* for good, and return its messages.

        From now on `wants` returns False for messages of that queue.
        """
        self._forgotten[key] = None
        queue = self._queues.pop(key, None)
        return [] if queue is None else self._drop(queue, len(queue.messages))

    def has_messages(self, key: Key) -> bool:
        queue = self._queues.get(key)
        return queue is not None and bool(queue.messages)

    def _drop(self, queue: _Queue, count: int) -> list[ArrivedMessage]:
        return [queue.messages.popleft() for _ in range(count)]

    def _drop_if_empty(self, key: Key, queue: _Queue) -> None:
        if not queue.messages and not queue.receives:
            self._queues.pop(key, None)
