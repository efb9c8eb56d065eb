"""Queues for what threads read (`net.reading`): calls that wait for a thread, messages that wait for the loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from rlinf_actors.net.loop import call_threadsafe

if TYPE_CHECKING:
    from rlinf_actors.net.reading import Reading

T = TypeVar("T")

TURN = 256
"""Most messages that the loop handles of a `LoopQueue` before it lets other callbacks run."""


class WaitingQueue(Generic[T]):
    """A queue like queue.SimpleQueue, for threads that read the sockets while they wait for an item.

    A signal handler must not raise on such a thread while it waits. One thread at a time puts items.

    Attributes:
        qsize: returns the number of items.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._items: collections.deque[T] = collections.deque()
        self.qsize: Callable[[], int] = self._items.__len__
        self._reader = False  # the thread that has the turn waits here, and no item was put for it
        self._asleep: collections.deque[threading.Lock] = collections.deque()
        self._here = threading.local()

    def put(self, *items: T) -> None:
        """Add items, and wake a thread that waits. A thread that finds more than its item wakes the next."""
        self._items.extend(items)
        if self._reader:
            self._reader = False
            self._reading.ring()
        elif self._asleep:
            self._wake_one()

    def _wake_one(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was quicker
            self._asleep.pop().release()

    def get(self) -> T:
        """Remove and return the first item, and wait for one if there is none. Any thread."""
        items, reading = self._items, self._reading
        while True:
            if not items:
                holder = object()
                if reading.take(holder):
                    try:
                        reading.wait(self._arrived, None, False)
                    finally:
                        self._reader = False
                        reading.leave(holder)
                else:
                    self._sleep()
            try:  # not suppress(), which costs as much as the rest
                item = items.popleft()
            except IndexError:
                continue  # another thread has taken it
            if items and self._asleep:
                self._wake_one()  # `put` may have left an item to this thread
            return item

    def _arrived(self) -> bool:
        self._reader = True
        return bool(self._items)

    def _sleep(self) -> None:
        gate = self._gate()
        self._asleep.append(gate)
        if self._items:
            try:
                self._asleep.remove(gate)
            except ValueError:
                pass  # it is being opened
            else:
                return
        gate.acquire()

    def _gate(self) -> threading.Lock:
        """Return the lock by which this thread sleeps. It is held."""
        gate: threading.Lock | None = getattr(self._here, "gate", None)
        if gate is None:
            gate = self._here.gate = threading.Lock()
            gate.acquire()
        return gate


class LoopQueue:
    """Messages of one source, and its end, that the loop must handle, in order. Only the thread that reads appends.

    Attributes:
        waiting: what the loop has not handled. While there is any, later messages must be appended too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self.waiting: collections.deque[tuple[Callable[..., object], tuple[object, ...]]] = collections.deque()

    def append(self, handle: Callable[..., object], *args: object) -> None:
        """Let the loop call *handle* with *args* after all that was appended before."""
        with self._lock:
            self.waiting.append((handle, args))
            first = len(self.waiting) == 1
        if first:
            call_threadsafe(self._loop, self._run)

    def _run(self) -> None:
        more = True
        try:
            for _ in range(TURN):
                try:
                    handle, args = self.waiting[0]
                    handle(*args)
                finally:
                    with self._lock:
                        self.waiting.popleft()
                        more = bool(self.waiting)
                if not more:
                    return
        finally:
            if more:
                self._loop.call_soon(self._run)
