"""Puts of this process into a channel, and `PutWindow`, which bounds them.

The bytes of a put count until its host has accepted it. Puts that exceed the window wait here, in order, as the
producer's own objects.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.channel.request_sender import RequestSender
from rlinf_actors.channel.results import Withdrawable, too_late
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork, finish_all
from rlinf_actors.wire import frames

if TYPE_CHECKING:
    from rlinf_actors.channel.client import RemoteChannel
    from rlinf_actors.runtime.peer import Peer

WINDOW_BYTES = 32 << 20
"""Bytes of puts of one process that may be on their way to a channel, or wait in its host for room.

One put of each key is always sent, so that a full key does not block another.
"""


class Put(AsyncWork[None], Withdrawable):
    """A put that was requested; it keeps the item until the host has accepted it.

    Attributes:
        channel: the channel; None until it is found.
        sender: sends to the host of the key; set together with `channel`.
        call: number of the put on the link to the host; 0 until the put is sent.
    """

    sender: RequestSender
    channel: RemoteChannel | None = None
    call = 0
    anywhere = True
    span = 0  # in the trace, 0 if this process is not traced

    def __init__(self, what: str, key: bytes, weight: float, nowait: bool, parts: Sequence[Buffer]) -> None:
        super().__init__(what)
        self.key = key
        self.weight = weight
        self.nowait = nowait
        self.parts = parts
        self.nbytes = 0
        for part in parts:
            self.nbytes += len(part) if type(part) is bytes else memoryview(part).nbytes

    @property
    def peer(self) -> Peer:
        """The host of the key."""
        return self.sender.peer

    def begin(self, channel: RemoteChannel, sender: RequestSender) -> None:
        """Send the put by *sender* as soon as the PutWindow has room."""
        self.channel, self.sender = channel, sender
        channel.put_window.add(self)
        self._was_sent()

    def expire(self) -> None:
        """End the put with CallTimeoutError, because its time is up. Loop thread only.

        If the put is sent already, ask the host to cancel it; the host's answer then ends the put.
        """
        if self.channel is None:
            self.reject(too_late(self._what, self.had_s, "the channel was not found yet"))
        else:
            self.channel.put_window.cancel(self)

    def forget(self) -> None:
        """Tell the host to cancel the put, and ignore the host's answers. Loop thread only."""
        if self.call:
            assert self.channel is not None
            self.peer.pending.pop(self.call, None)
            self.sender.send(frames.ChannelCancel(self.call, True))
            self.channel.put_window.remove(self)

    def answer(self, frame: frames.AnyFrame, parts: list[Buffer]) -> bool:
        """Fail the put, which the host has refused. Any thread.

        Return True, which removes the put from the table of pending calls, because a put has only one answer.
        """
        assert self.channel is not None
        assert isinstance(frame, frames.Raised)
        self._end(self.channel.refusal(frame, self))
        return True

    @staticmethod
    def answer_all(answered: Sequence[tuple[Put, object]], frame: frames.AnyFrame) -> None:
        """Complete several puts into one channel, which the host has accepted. Any thread."""
        puts = [put for put, _ in answered]
        first = puts[0]
        assert first.channel is not None
        for put in puts:
            put.parts = ()  # before the caller goes on, and may change them
        first.channel.put_window.remove(*puts)
        finish_all(puts, itertools.repeat(None))

    def fail(self, error: Exception) -> None:
        """Fail the put because its host is gone. Any thread."""
        assert self.channel is not None
        self._end(self.channel.gone(error))

    def _end(self, error: Exception) -> None:
        assert self.channel is not None
        self.parts = ()  # before the caller goes on, and may change them
        self.channel.put_window.remove(self)
        self.reject(error)


class _KeyPuts(msgspec.Struct, eq=False):
    """The unanswered puts of one key: `out` holds those sent to the host, `waiting` those not sent."""

    out: dict[Put, None] = msgspec.field(default_factory=dict)
    waiting: collections.deque[Put] = msgspec.field(default_factory=collections.deque)


class PutWindow:
    """Sends the puts of one process to one channel, and limits the bytes that no host has accepted. Any thread."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.lock = threading.RLock()  # an answer may come while a put is being sent, on the same thread
        self._keys: dict[bytes, _KeyPuts] = {}
        self._starved: dict[bytes, _KeyPuts] = {}  # keys whose puts wait here, the longest wait first
        self._moving = False

    def add(self, put: Put) -> None:
        """Send a put if the window has room; otherwise keep the put until there is room, or refuse a put_nowait."""
        with self.lock:
            key = self._keys.get(put.key)
            if key is None:
                key = self._keys[put.key] = _KeyPuts()
            if not key.waiting and (put.nowait or self._has_room(key, put)):
                self._send(key, put)
            elif put.nowait:
                put.reject(asyncio.QueueFull(f"{put._what}: earlier puts of this process still wait for their turn"))
            else:
                key.waiting.append(put)
                self._starved.setdefault(put.key, key)

    def cancel(self, put: Put) -> None:
        """End a put because its time is up: reject it if it still waits here, else ask the host to cancel it."""
        with self.lock:
            key = self._keys.get(put.key)
            if not put.call and key is not None and put in key.waiting:
                key.waiting.remove(put)
                if not key.waiting:
                    self._starved.pop(put.key, None)
                put.reject(too_late(put._what, put.had_s, "earlier puts of this process still wait for their turn"))
            elif not put.done():
                put.sender.send(frames.ChannelCancel(put.call, False))

    def remove(self, *puts: Put) -> None:
        """Stop counting puts whose host has answered or is gone, and send the waiting puts that now have room."""
        with self.lock:
            keys: dict[bytes, _KeyPuts] = {}
            for put in puts:
                key = self._keys.get(put.key)
                if key is None or put not in key.out:
                    continue  # given up, and answered at the same moment
                del key.out[put]
                self.nbytes -= put.nbytes
                keys[put.key] = key
            if self._starved and not self._moving:  # a put to a host that is gone is removed while it is sent
                self._moving = True
                try:
                    while self._starved and self._send_starved():
                        pass
                finally:
                    self._moving = False
            for name, key in keys.items():
                if not key.out and not key.waiting and self._keys.get(name) is key:
                    del self._keys[name]

    def give_up(self, put: Put) -> None:
        """Stop counting a put in the middle of which a signal handler has raised, wherever that was."""
        with self.lock:
            self.remove(put)
            self.nbytes = sum(put.nbytes for key in self._keys.values() for put in key.out)

    def _send_starved(self) -> bool:
        """Send the waiting puts that have room now. Return True if at least one was sent."""
        moved = False
        for name, key in list(self._starved.items()):
            while key.waiting and self._has_room(key, key.waiting[0]):
                moved = True
                put = key.waiting.popleft()
                del self._starved[name]
                if key.waiting:
                    self._starved[name] = key  # behind the other keys
                self._send(key, put)
        return moved

    def _has_room(self, key: _KeyPuts, put: Put) -> bool:
        return not key.out or self.nbytes + put.nbytes <= WINDOW_BYTES

    def _send(self, key: _KeyPuts, put: Put) -> None:
        """Send a put to its host. Call with the lock held."""
        key.out[put] = None
        self.nbytes += put.nbytes
        put.sender.put(put)
