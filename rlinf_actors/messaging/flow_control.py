"""Flow control in bytes between one sending and one receiving worker. Pure.

The sender keeps at most `limit` bytes in flight, that is, sent and not yet received by the user's code. Further
messages wait in order. A message larger than the window is sent when nothing else is in flight, so the receiver's
memory is bounded by the larger of the window and the largest message. The receiver returns credit in lumps of `SLACK`
bytes, and the sender ignores less than `SLACK` bytes in flight, so the two never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from rlinf_actors.messaging.mailbox import Recent

T = TypeVar("T")

SLACK = 64 << 10
"""Bytes of credit that the receiver may keep back. Sender and receiver must agree on it."""
OVERHEAD = 768
"""Bytes counted for every message: an empty one takes 430 at the receiver, and 680 while it arrives (measured)."""


class Window(Generic[T]):
    """The sender's side.

    Args:
        limit: most bytes in flight.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self._waiting: deque[tuple[int, T]] = deque()

    def offer(self, size: int, item: T) -> bool:
        """True if the caller sends *item* now; else *item* waits for `returned`."""
        if self._waiting or not self._fits(size):
            self._waiting.append((size, item))
            return False
        self.outstanding += size
        return True

    def returned(self, size: int) -> list[T]:
        """Take back *size* bytes of credit; return the waiting items to send now, in order."""
        self.outstanding -= size
        sendable: list[T] = []
        while self._waiting and self._fits(self._waiting[0][0]):
            size, item = self._waiting.popleft()
            self.outstanding += size
            sendable.append(item)
        return sendable

    def remove_waiting(self) -> list[T]:
        """Remove and return everything that waits."""
        waiting = [item for _, item in self._waiting]
        self._waiting.clear()
        return waiting

    def _fits(self, size: int) -> bool:
        return self.outstanding <= SLACK or self.outstanding + size <= self.limit


class CreditAccumulator:
    """The receiver's side: collects credit until it is worth a frame."""

    def __init__(self) -> None:
        self._owed: dict[Hashable, dict[int, int]] = {}
        self._ended: Recent[Hashable, None] = Recent()

    def taken(self, link: Hashable, outbox: int, size: int) -> int:
        """Count a received message of *size* bytes; return the bytes of credit to return now, 0 for none yet."""
        if link in self._ended:
            return 0
        owed = self._owed.setdefault(link, {})
        due = owed.pop(outbox, 0) + size
        if due >= SLACK:
            return due
        owed[outbox] = due
        return 0

    def forget(self, link: Hashable) -> None:
        """Return no more credit over *link*. Messages that came over it may still be received."""
        self._ended[link] = None
        self._owed.pop(link, None)
