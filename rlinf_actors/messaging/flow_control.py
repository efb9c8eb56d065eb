"""Credits in bytes between one sender and one receiver. Pure.

The sender has at most `limit` bytes on their way that were not taken; what exceeds it waits, in
order. A message larger than the window goes when nothing else is on its way, so memory at the
receiver is bounded by the larger of the window and the largest message. The receiver returns
credit in lumps of `SLACK`; the sender counts less than that as nothing, so the two never wait for
one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from rlinf_actors.messaging.mailbox import Recent

T = TypeVar("T")

SLACK = 64 << 10
"""Bytes that were taken and that the sender may not know of yet. The same on both sides."""
OVERHEAD = 768
"""Counted for every message: what an empty one takes at the receiver (measured: 430 bytes, 680 while it arrives)."""


class Window(Generic[T]):
    """The sender's side.

    Args:
        limit: bytes that may be on their way.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self._waiting: deque[tuple[int, T]] = deque()

    def offer(self, size: int, item: T) -> bool:
        """Whether *item* goes now; else it waits for `returned`."""
        if self._waiting or not self._fits(size):
            self._waiting.append((size, item))
            return False
        self.outstanding += size
        return True

    def returned(self, size: int) -> list[T]:
        """The receiver took *size* bytes: what goes now, in order."""
        self.outstanding -= size
        going: list[T] = []
        while self._waiting and self._fits(self._waiting[0][0]):
            size, item = self._waiting.popleft()
            self.outstanding += size
            going.append(item)
        return going

    def drain(self) -> list[T]:
        """Take everything that waits: the receiver is gone."""
        waiting = [item for _, item in self._waiting]
        self._waiting.clear()
        return waiting

    def _fits(self, size: int) -> bool:
        return self.outstanding <= SLACK or self.outstanding + size <= self.limit


class Returns:
    """The receiver's side: what to give back, and when."""

    def __init__(self) -> None:
        self._owed: dict[Hashable, dict[int, int]] = {}
        self._ended: Recent[Hashable, None] = Recent()

    def taken(self, link: Hashable, outbox: int, size: int) -> int:
        """A message of *size* was taken from an outbox at that link: the bytes to return now, 0 for later."""
        if link in self._ended:
            return 0
        owed = self._owed.setdefault(link, {})
        due = owed.pop(outbox, 0) + size
        if due >= SLACK:
            return due
        owed[outbox] = due
        return 0

    def forget(self, link: Hashable) -> None:
        """Nothing is returned over that link any more, whose messages may be taken yet."""
        self._ended[link] = None
        self._owed.pop(link, None)
