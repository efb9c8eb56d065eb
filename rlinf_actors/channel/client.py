"""A channel as any process of the job reaches it: requests to its host, and their ends.

House rules: everything is sent by the link to one replica, so that one process's requests for a key
keep their order; a put's bytes count until the host has accepted it, and what would be too many
waits here, in order.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from rlinf_actors.channel.backend import Shown
from rlinf_actors.channel.keys import key_bytes, key_of
from rlinf_actors.channel.taking import Taking
from rlinf_actors.errors import (
    CallTimeoutError,
    ChannelClosedError,
    GroupClosedError,
    NodeLostError,
    PeerDiedError,
    RlinfActorsError,
    WorkerDiedError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.runtime.remote import RemoteGroup
from rlinf_actors.wire import frames, payload

WINDOW_BYTES = 32 << 20
"""Bytes of puts that may be on their way, or wait at the host for room, per process and key. One item always may."""
CONFIRM_S = 5.0
"""How long a put or get whose time is up waits for the host to say whether it still came true."""

_unpack = msgspec.msgpack.Decoder().decode


class _Waits:
    """What a peer keeps of a request: where its answer goes."""

    __slots__ = ("_channel", "_work")

    def __init__(self, channel: RemoteChannel, work: Callable[[], AsyncWork[Any] | None]) -> None:
        self._channel = channel
        self._work = work

    def answer(self, frame: frames.AnyFrame, parts: list[Buffer]) -> bool:
        """The host answered. Loop thread."""
        work = self._work()
        if work is None:
            return True  # dropped: its destructor has told the host
        if isinstance(frame, frames.Raised):
            work.reject(self._channel.refusal(frame, work))
        else:
            work.resolve(parts)
        return True

    def fail(self, error: Exception) -> None:
        """The host is gone. Any thread."""
        work = self._work()
        if work is not None:
            work.reject(self._channel.gone(error))


class _Put(AsyncWork[None]):
    """A put under way; keeps the item until the host has it."""

    def __init__(self, what: str, frame: Callable[[int], frames.ChannelPut], parts: Sequence[Buffer]) -> None:
        super().__init__(what)
        self.frame = frame
        self.parts = parts
        self.nbytes = sum(memoryview(part).nbytes for part in parts)
        self.call = 0

    def _outcome(self) -> None:
        super()._outcome()


class _Window:
    """One key's puts: bytes that the host has not accepted, and who waits for their turn."""

    __slots__ = ("out", "puts", "waiting")

    def __init__(self) -> None:
        self.out = 0
        self.puts = 0
        self.waiting: collections.deque[_Put] = collections.deque()


class RemoteChannel:
    """The requests of this process to one channel.

    Args:
        runtime: this process's.
        group: the host processes, one per replica.
        name: for messages.
        node_rank: which replica new keys should live on.
    """

    def __init__(self, runtime: Runtime, group: RemoteGroup, name: str, node_rank: int) -> None:
        self._runtime = runtime
        self._group = group
        self._name = name
        self._node_rank = node_rank
        self._lock = threading.RLock()  # an answer may come while a put is being sent, on the same thread
        self._windows: dict[bytes, _Window] = {}
        self._homes: dict[bytes, int] = {}

    # --- requests ---

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        where = key_bytes(key)
        parts = payload.encode(item, "item")
        peer = self._peer(where)
        put = _Put(f"put() into channel {self._name!r}", lambda id: frames.ChannelPut(id, where, weight, nowait), parts)
        with self._lock:
            window = self._windows.setdefault(where, _Window())
            if window.waiting or (window.puts and window.out + put.nbytes > WINDOW_BYTES):
                if nowait:
                    raise asyncio.QueueFull
                window.waiting.append(put)
            else:
                self._send(peer, where, window, put)
        if timeout is not None:
            self._limit(put, timeout, lambda: self._cancel_put(peer, where, put), lambda: self._forget(peer, put.call))
        return put

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Taking[Any]:
        where = key_bytes(key)
        what = f"get() from channel {self._name!r}"
        return self._take(where, what, lambda id: frames.ChannelGet(id, where, nowait), _one, timeout)

    def batch(self, key: Hashable, target: float, timeout: float | None) -> Taking[list[Any]]:
        where = key_bytes(key)
        what = f"get_batch() from channel {self._name!r}"
        return self._take(where, what, lambda id: frames.ChannelBatch(id, where, target), _many, timeout)

    def look(self, key: Hashable) -> tuple[int, bool]:
        where = key_bytes(key)
        size, full = self._ask(self._peer(where), lambda id: frames.ChannelLook(id, where)).wait()
        return size, full

    def show(self) -> tuple[bool, list[tuple[Any, int, list[Shown]]]]:
        asked = [self._ask(peer, frames.ChannelShow, _opened) for peer in self._group.peers]
        answers = [work.wait() for work in asked]
        return any(closed for closed, _ in answers), [row for _, rows in answers for row in rows]

    def close(self) -> None:
        closing = [self._ask(peer, frames.ChannelClose) for peer in self._group.peers]
        for work in closing:
            with contextlib.suppress(ChannelClosedError):  # it is
                work.wait()

    # --- ends ---

    def refusal(self, raised: frames.Raised, work: AsyncWork[Any]) -> Exception:
        """The exception that a host's refusal stands for."""
        if raised.kind == "full":
            return asyncio.QueueFull(f"channel {self._name!r} is full")
        if raised.kind == "empty":
            return asyncio.QueueEmpty(f"channel {self._name!r} is empty")
        if raised.kind == "closed":
            return ChannelClosedError(f"channel {self._name!r} was closed")
        if raised.kind == "cancelled":
            return CallTimeoutError(f"{work._what} was not done in its time")
        return RlinfActorsError(f"channel {self._name!r}: {raised.text}")

    def gone(self, error: Exception) -> Exception:
        """What a request gets for a host that is gone as *error* says."""
        if isinstance(error, GroupClosedError):
            found: RlinfActorsError = ChannelClosedError(f"channel {self._name!r} has ended: {error}")
        elif isinstance(error, (WorkerDiedError, NodeLostError)):
            found = PeerDiedError(f"the host of channel {self._name!r} died, and its items: {error}", peer=self._name)
        else:
            return error
        found.__cause__ = error
        return found

    # --- puts ---

    def _send(self, peer: Peer, where: bytes, window: _Window, put: _Put) -> None:
        """Called with the lock held."""
        window.out += put.nbytes
        window.puts += 1
        put._on_done(lambda: self._settled(peer, where, window, put))
        put.call = peer.open(_Waits(self, lambda: put))
        if not put.done():
            peer.send(put.frame(put.call), put.parts, now=window.puts == 1)
        put.parts = ()

    def _settled(self, peer: Peer, where: bytes, window: _Window, put: _Put) -> None:
        with self._lock:
            window.out -= put.nbytes
            window.puts -= 1
            while window.waiting and (not window.puts or window.out + window.waiting[0].nbytes <= WINDOW_BYTES):
                self._send(peer, where, window, window.waiting.popleft())
            if not window.puts and not window.waiting:
                self._windows.pop(where, None)

    def _cancel_put(self, peer: Peer, where: bytes, put: _Put) -> None:
        with self._lock:
            window = self._windows.get(where)
            if window is not None and put in window.waiting:
                window.waiting.remove(put)
                put.reject(CallTimeoutError(f"{put._what} was not done in its time"))
            elif not put.done():
                peer.send(frames.ChannelCancel(put.call, False))

    # --- gets ---

    def _take(
        self,
        where: bytes,
        what: str,
        frame: Callable[[int], frames.AnyFrame],
        decode: Callable[[Any], Any],
        timeout: float | None,
    ) -> Taking[Any]:
        peer = self._peer(where)
        call = 0

        def acknowledge(parts: Sequence[Buffer]) -> None:
            if len(parts[0]) > 1:  # an empty batch has nothing to acknowledge
                peer.send(frames.ChannelAck(call), now=True)

        def give_back(later: bool) -> None:
            if later:
                self._runtime.io.call(self._forget, peer, call)
            else:
                self._forget(peer, call)

        work: Taking[Any] = Taking(what, decode, acknowledge, give_back)
        idle = not peer.pending
        call = peer.open(_Waits(self, weakref.ref(work)))
        if not work.done():
            peer.send(frame(call), now=idle)
            if timeout is not None:
                self._limit(
                    work,
                    timeout,
                    lambda: peer.send(frames.ChannelCancel(call, False)),
                    lambda: self._forget(peer, call),
                )
        return work

    def _forget(self, peer: Peer, call: int) -> None:
        """Nobody waits for it any more, whatever becomes of it. Any thread."""
        peer.pending.pop(call, None)
        peer.send(frames.ChannelCancel(call, True))

    # --- inside ---

    def _peer(self, where: bytes) -> Peer:
        """The replica that has a key; the first use of one asks node 0's, and blocks for a round trip."""
        peers = self._group.peers
        if len(peers) == 1:
            return peers[0]
        home = self._homes.get(where)
        if home is None:
            here = min(self._node_rank, len(peers) - 1)
            home = self._homes[where] = self._ask(peers[0], lambda id: frames.ChannelWhere(id, where, here)).wait()
        return peers[home]

    def _ask(
        self, peer: Peer, frame: Callable[[int], frames.AnyFrame], decode: Callable[[Any], Any] | None = None
    ) -> AsyncWork[Any]:
        work = _Asked(f"a request to channel {self._name!r}", decode or (lambda parts: _unpack(parts[0])))
        call = peer.open(_Waits(self, lambda: work))
        if not work.done():
            peer.send(frame(call), now=True)
        return work

    def _limit(
        self, work: AsyncWork[Any], timeout: float, cancel: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        """After *timeout* seconds cancel *work*; if the host does not answer that either, end it here."""
        ref, io = weakref.ref(work), self._runtime.io
        handles: list[asyncio.TimerHandle] = []

        def give_up() -> None:
            found = ref()
            if found is not None and not found.done():
                forget()
                found.reject(
                    CallTimeoutError(f"{found._what} was not done in {timeout:g} s, and its host does not answer")
                )

        def expire() -> None:
            found = ref()
            if found is not None and not found.done():
                handles[:] = [io.loop.call_later(CONFIRM_S, give_up)]
                cancel()

        def disarm() -> None:
            for handle in handles:
                handle.cancel()

        def arm() -> None:
            if not _done(ref):
                handles.append(io.loop.call_later(max(0.0, timeout), expire))

        io.call(arm)
        work._on_done(lambda: io.call(disarm))


class _Asked(AsyncWork[Any]):
    """A question whose answer is decoded by who waits."""

    def __init__(self, what: str, decode: Callable[[Any], Any]) -> None:
        super().__init__(what)
        self._decode = decode

    def _outcome(self) -> Any:
        return self._decode(super()._outcome())


def _done(ref: weakref.ref[AsyncWork[Any]]) -> bool:
    work = ref()
    return work is None or work.done()


def _many(parts: Sequence[Buffer]) -> tuple[list[Any], bool]:
    found, at, any_again = [], 1, False
    for count, _, again in _unpack(parts[0]):
        found.append(payload.decode(parts[at : at + count]))
        at += count
        any_again |= again
    return found, any_again


def _one(parts: Sequence[Buffer]) -> tuple[Any, bool]:
    return payload.decode(parts[1:]), _unpack(parts[0])[0][2]


def _opened(parts: Sequence[Buffer]) -> tuple[bool, list[tuple[Any, int, list[Shown]]]]:
    closed, rows = _unpack(parts[0])
    at, shown = 1, []
    for key, count, about in rows:
        items = []
        for number, nbytes, weight, again in about:
            if number < 0:
                items.append(Shown(None, nbytes, weight, again, whole=False))
                continue
            items.append(Shown(payload.decode(parts[at : at + number]), nbytes, weight, again))
            at += number
        shown.append((key_of(key), count, items))
    return closed, shown
