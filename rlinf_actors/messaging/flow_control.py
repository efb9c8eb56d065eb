"""Limit the bytes in flight from one worker to another. Nothing here does I/O.

The sender keeps at most `Window.limit` bytes in flight, that is, sent but not yet received by user code in the
receiver. Further messages wait in order. A message larger than the window is sent when nothing else is in flight. So
the receiver's memory is bounded by the window, or by `Window.slack` and the largest message.

A message names the bytes that the receiver returns as credit when user code has the message. A message of send() names
none until all those since the last named ones are `Window.lump` bytes: to send credit costs as much as a small message.
A broadcast's message names its own bytes, since user code may receive it much later than messages of send() behind it,
and the receiver returns credit in amounts of at least SLACK bytes. The sender treats up to `Window.slack` bytes in
flight as none. Otherwise it could wait for credit that never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from rlinf_actors.messaging.mailbox import Recent

T = TypeVar("T")

SLACK = 64 << 10
"""Most bytes of credit that the receiver keeps back. Sender and receiver must use the same value."""
OVERHEAD = 768
"""Bytes added to the size of every message. An empty message takes 430 bytes at the receiver, 680 while it arrives."""


class Window(Generic[T]):
    """The sender's side of flow control for one receiver: at most *limit* bytes are in flight, later messages wait.

    Attributes:
        lump: fewest bytes of credit that messages of send() ask for at a time.
        slack: bytes in flight that count as none, since no credit may come for them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lump = max(SLACK, limit // 4)
        self.slack = self.lump + SLACK
        self.outstanding = 0
        self._unasked = 0
        self._waiting: deque[tuple[int, T]] = deque()

    def offer(self, size: int, item: T) -> bool:
        """Ask to send *item* of *size* bytes. Return True if the caller may send it now.

        If the result is False, the item waits, and a later call of `returned` returns it.
        """
        if self._waiting or not self._fits(size):
            self._waiting.append((size, item))
            return False
        self.outstanding += size
        return True

    def returned(self, size: int) -> list[T]:
        """Count *size* bytes of credit from the receiver. Return the waiting items to send now, in order."""
        self.outstanding -= size
        sendable: list[T] = []
        while self._waiting and self._fits(self._waiting[0][0]):
            size, item = self._waiting.popleft()
            self.outstanding += size
            sendable.append(item)
        return sendable

    def ask(self, size: int) -> int:
        """Return how many bytes of credit the next message of send(), of *size* bytes, asks for."""
        unasked = self._unasked + size
        asked = unasked if unasked >= self.lump else 0
        self._unasked = unasked - asked
        return asked

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    def remove_waiting(self) -> list[T]:
        waiting = [item for _, item in self._waiting]
        self._waiting.clear()
        return waiting

    def _fits(self, size: int) -> bool:
        return self.outstanding <= self.slack or self.outstanding + size <= self.limit


class CreditAccumulator:
    """The receiver's side of flow control: adds up received bytes until there are enough for a frame to the sender."""

    def __init__(self) -> None:
        self._owed: dict[Hashable, dict[int, int]] = {}
        self._ended: Recent[Hashable, None] = Recent()

    def taken(self, link: Hashable, outbox: int, size: int) -> int:
        """Count a message of *size* bytes that user code has received, and return the credit to send to the sender now.

        The credit is a number of bytes; it is 0 until enough bytes have added up. *outbox* is the number of the
        sender's outbox on *link*.
        """
        if link in self._ended:
            return 0
        owed = self._owed.setdefault(link, {})
        due = owed.pop(outbox, 0) + size
        if due >= SLACK:
            return due
        owed[outbox] = due
        return 0

    def forget(self, link: Hashable) -> None:
        """Stop counting messages that arrived on *link*: `taken` returns 0 for them from now on.

        No credit can be sent over this link any more.
        """
        self._ended[link] = None
        self._owed.pop(link, None)
