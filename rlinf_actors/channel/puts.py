"""Puts on their way to a channel's host: how many bytes may be, and who waits for their turn."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames

WINDOW_BYTES = 32 << 20
"""Bytes of puts of one process that may be on their way to a channel, or wait there for room. Of each key one put
always may, so that a full key does not block another."""


class Ends(Protocol):
    """Makes exceptions of how a host refuses, and of how it ended."""

    def refusal(self, raised: frames.Raised, work: AsyncWork[None]) -> Exception:
        """Of a refusal."""

    def gone(self, error: Exception) -> Exception:
        """Of an end."""


class Line(Protocol):
    """What a put needs of the channel that it goes to: see client.RemoteChannel."""

    outgoing: Outgoing

    def acknowledge(self) -> None:
        """Say what was taken, before what is sent next."""


class Put(AsyncWork[None]):
    """A put under way; keeps the item until the host has it.

    Attributes:
        outgoing: None until the host of its key is known.
        peer: that host, then.
        call: its number on the link, 0 while it waits.
    """

    peer: Peer

    def __init__(self, what: str, key: bytes, weight: float, nowait: bool, parts: Sequence[Buffer]) -> None:
        super().__init__(what)
        self.key = key
        self.weight = weight
        self.nowait = nowait
        self.parts = parts
        self.nbytes = 0
        for part in parts:
            self.nbytes += len(part) if type(part) is bytes else memoryview(part).nbytes
        self.call = 0
        self.outgoing: Outgoing | None = None

    def begin(self, line: Line, peer: Peer) -> None:
        """Send it to the host of its key. On the thread of the caller, or on the I/O thread."""
        if self.nowait:
            line.acknowledge()  # for the room that it makes
        line.outgoing.add(self, peer)

    def held(self) -> Callable[[], Put]:
        """What keeps it while it waits for its host to be known: it goes on if it is dropped."""
        return lambda: self

    def expire(self) -> None:
        """Its time is up. Loop thread."""
        if self.outgoing is None:
            self.reject(CallTimeoutError(f"{self._what} was not done in its time: the channel was not found yet"))
        else:
            self.outgoing.cancel(self)

    def forget(self) -> None:
        """The host does not say whether it came in time: do not wait any more. Loop thread."""
        if self.call:
            self.peer.pending.pop(self.call, None)
            self.peer.send(frames.ChannelCancel(self.call, True))

    def answer(self, frame: frames.AnyFrame, parts: list[Buffer]) -> bool:
        """The host answered. Loop thread."""
        assert self.outgoing is not None
        error = self.outgoing.ends.refusal(frame, self) if type(frame) is frames.Raised else None
        self._end(error)
        return True

    def fail(self, error: Exception) -> None:
        """The host is gone. Any thread."""
        assert self.outgoing is not None
        self._end(self.outgoing.ends.gone(error))

    def _end(self, error: Exception | None) -> None:
        assert self.outgoing is not None
        self.parts = ()  # before who waits goes on, and may change them
        self.outgoing.settled(self)
        if error is None:
            self.resolve(None)
        else:
            self.reject(error)


class _Key:
    """One key's puts: how many are out, and those that wait."""

    __slots__ = ("out", "waiting")

    def __init__(self) -> None:
        self.out = 0
        self.waiting: collections.deque[Put] = collections.deque()


class Outgoing:
    """All puts of one process to one channel. Any thread.

    Args:
        ends: see Ends.
    """

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self.nbytes = 0
        self._lock = threading.RLock()  # an answer may come while a put is being sent, on the same thread
        self._keys: dict[bytes, _Key] = {}
        self._starved: dict[bytes, _Key] = {}  # keys whose puts wait here, who waits longest first
        self._moving = False

    def add(self, put: Put, peer: Peer) -> None:
        """Send it to the host of its key, or keep it until its turn; one that may not wait is refused instead."""
        put.peer, put.outgoing = peer, self
        with self._lock:
            key = self._keys.get(put.key)
            if key is None:
                key = self._keys[put.key] = _Key()
            if not key.waiting and (put.nowait or self._room(key, put)):
                self._send(key, put)
            elif put.nowait:
                put.reject(asyncio.QueueFull(f"{put._what}: earlier puts of this process still wait for their turn"))
            else:
                key.waiting.append(put)
                self._starved.setdefault(put.key, key)

    def cancel(self, put: Put) -> None:
        """Its time is up."""
        with self._lock:
            key = self._keys.get(put.key)
            if not put.call and key is not None and put in key.waiting:
                key.waiting.remove(put)
                if not key.waiting:
                    self._starved.pop(put.key, None)
                put.reject(CallTimeoutError(f"{put._what} was not done in its time"))
            elif not put.done():
                put.peer.send(frames.ChannelCancel(put.call, False))

    def settled(self, put: Put) -> None:
        """The host has answered, or is gone."""
        with self._lock:
            self.nbytes -= put.nbytes
            key = self._keys[put.key]
            key.out -= 1
            if self._starved and not self._moving:  # what is sent to a host that is gone is settled at once
                self._moving = True
                try:
                    while self._starved and self._move():
                        pass
                finally:
                    self._moving = False
            if not key.out and not key.waiting and self._keys.get(put.key) is key:
                del self._keys[put.key]

    def _move(self) -> bool:
        """Send those of each key for which there is room; whether there were any."""
        moved = False
        for name, key in list(self._starved.items()):
            while key.waiting and self._room(key, key.waiting[0]):
                moved = True
                put = key.waiting.popleft()
                del self._starved[name]
                if key.waiting:
                    self._starved[name] = key  # behind the others
                self._send(key, put)
        return moved

    def _room(self, key: _Key, put: Put) -> bool:
        return not key.out or self.nbytes + put.nbytes <= WINDOW_BYTES

    def _send(self, key: _Key, put: Put) -> None:
        """Called with the lock held."""
        self.nbytes += put.nbytes
        key.out += 1
        alone = not put.peer.pending
        put.call = put.peer.open(put)
        if not put.done():
            put.peer.send(frames.ChannelPut(put.call, put.key, put.weight, put.nowait), put.parts, now=alone)
