"""The requests of a process to a channel's host: puts, gets, batches, takes and queries.

A request is made, and its arguments are checked, before the host of its key is known. `begin` sends the request when
the host is known: on the caller's thread, or on the I/O thread if the host was not known yet. Answers arrive on the I/O
thread; the thread that waits unpickles them.

`PutWindow` bounds the puts of one process to one channel: a put's bytes count until the host has accepted it. Puts that
exceed the window wait here, in order, as the producer's own objects.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rlinf_actors.channel.key_encoding import key_bytes, key_of
from rlinf_actors.channel.queue import ERROR_CHARS
from rlinf_actors.channel.request_spans import trace_request, trace_sent
from rlinf_actors.channel.results import PendingGet, PendingTake, ShownItem, UndeliverableItem, View, Withdrawable
from rlinf_actors.errors import CallTimeoutError, ChannelClosedError, ConnectionLostError, ProtocolMismatchError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import printable

if TYPE_CHECKING:
    from rlinf_actors.channel.client import RemoteChannel

WINDOW_BYTES = 32 << 20
"""Bytes of puts of one process that may be on their way to a channel, or wait in its host for room.

One put of each key is always sent, so that a full key does not block another.
"""
CONFIRM_S = 5.0
"""Seconds that a put or get whose time is up waits for the host to confirm the cancellation."""

_unpack = msgspec.msgpack.Decoder().decode

FrameMaker = Callable[[int], frames.AnyFrame]
"""Makes the frame of a request from the request's number."""


class Put(AsyncWork[None], Withdrawable):
    """A put that was requested; it keeps the item until the host has accepted it.

    Attributes:
        channel: the channel; None until it is found.
        peer: the host of the key; set together with `channel`.
        call: number of the put on the link to the host; 0 until the put is sent.
    """

    peer: Peer
    span = 0  # in the trace, 0 if this process is not traced

    def __init__(self, what: str, key: bytes, weight: float, nowait: bool, parts: Sequence[Buffer]) -> None:
        super().__init__(what)
        self.key = key
        self.weight = weight
        self.nowait = nowait
        self.parts = parts
        self.nbytes = sum(len(part) if type(part) is bytes else memoryview(part).nbytes for part in parts)
        self.call = 0
        self.channel: RemoteChannel | None = None

    def begin(self, channel: RemoteChannel, peer: Peer) -> None:
        """Send the put to *peer*, the host of its key, as soon as the PutWindow has room."""
        self.channel, self.peer = channel, peer
        if self.nowait:
            channel.acknowledge()  # what user code has got makes room
        channel.put_window.add(self)
        self._was_sent()

    def expire(self) -> None:
        """End the put with CallTimeoutError, because its time is up. Loop thread only.

        If the put is sent already, ask the host to cancel it; the host's answer then ends the put.
        """
        if self.channel is None:
            self.reject(CallTimeoutError(f"{self._what} was not done in its time: the channel was not found yet"))
        else:
            self.channel.put_window.cancel(self)

    def forget(self) -> None:
        """Tell the host to cancel the put, and ignore the host's answers. Loop thread only."""
        if self.call:
            self.peer.pending.pop(self.call, None)
            self.peer.send(frames.ChannelCancel(self.call, True))

    def answer(self, frame: frames.AnyFrame, parts: list[Buffer]) -> bool:
        """Complete the put with the host's answer. Loop thread only.

        Return True, which removes the put from the table of pending calls, because a put has only one answer.
        """
        assert self.channel is not None
        self._end(self.channel.refusal(frame, self) if type(frame) is frames.Raised else None)
        return True

    def fail(self, error: Exception) -> None:
        """Fail the put because its host is gone. Any thread."""
        assert self.channel is not None
        self._end(self.channel.gone(error))

    def _end(self, error: Exception | None) -> None:
        assert self.channel is not None
        self.parts = ()  # before the caller goes on, and may change them
        self.channel.put_window.remove(self)
        if error is None:
            self.resolve(None)
        else:
            self.reject(error)


@dataclasses.dataclass(slots=True, eq=False)
class _KeyPuts:
    """The unanswered puts of one key: `out` is the number of puts sent to the host, `waiting` holds those not sent."""

    out: int = 0
    waiting: collections.deque[Put] = dataclasses.field(default_factory=collections.deque)


class PutWindow:
    """Sends the puts of one process to one channel, and limits the bytes that no host has accepted. Any thread."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.RLock()  # an answer may come while a put is being sent, on the same thread
        self._keys: dict[bytes, _KeyPuts] = {}
        self._starved: dict[bytes, _KeyPuts] = {}  # keys whose puts wait here, the longest wait first
        self._moving = False

    def add(self, put: Put) -> None:
        """Send a put if the window has room; otherwise keep the put until there is room, or refuse a put_nowait."""
        with self._lock:
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
        with self._lock:
            key = self._keys.get(put.key)
            if not put.call and key is not None and put in key.waiting:
                key.waiting.remove(put)
                if not key.waiting:
                    self._starved.pop(put.key, None)
                put.reject(CallTimeoutError(f"{put._what} was not done in its time"))
            elif not put.done():
                put.peer.send(frames.ChannelCancel(put.call, False))

    def remove(self, put: Put) -> None:
        """Stop counting a put whose host has answered or is gone, and send the waiting puts that now have room."""
        with self._lock:
            self.nbytes -= put.nbytes
            key = self._keys[put.key]
            key.out -= 1
            if self._starved and not self._moving:  # a put to a host that is gone is removed while it is sent
                self._moving = True
                try:
                    while self._starved and self._send_starved():
                        pass
                finally:
                    self._moving = False
            if not key.out and not key.waiting and self._keys.get(put.key) is key:
                del self._keys[put.key]

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
        self.nbytes += put.nbytes
        key.out += 1
        alone = not put.peer.pending
        put.call = put.peer.open(put)
        trace_sent(put)
        if not put.done():
            put.peer.send(frames.ChannelPut(put.call, put.key, put.weight, put.nowait), put.parts, now=alone)


class Get(PendingGet[Any], Withdrawable):
    """A get that this process requests from a channel's host; its result is the item.

    `call` is the number of the get on the link to the host `peer`; 0 until the get is sent.
    """

    channel: RemoteChannel
    peer: Peer
    span = 0

    def __init__(self, name: str, what: str, key: bytes, frame: FrameMaker) -> None:
        super().__init__(what)
        self.name = name
        self.key = key
        self.frame = frame
        self.call = 0

    def begin(self, channel: RemoteChannel, peer: Peer) -> None:
        self.channel, self.peer = channel, peer
        channel.ask(self, peer)
        self._was_sent()

    def expire(self) -> None:
        if not self.call:
            self.reject(CallTimeoutError(f"{self._what} was not done in its time: the channel was not found yet"))
        else:
            self.peer.send(frames.ChannelCancel(self.call, False))

    def forget(self) -> None:
        self._give_back(False)

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        return payload.decode(arrived.cut(1)), _unpack(arrived[0])[0][2]

    def _acknowledge(self, arrived: AuthenticatedParts) -> None:
        if len(arrived[0]) > 1:  # an empty batch has nothing to acknowledge
            self.channel.taken(self.peer, self.call)

    def _give_back(self, later: bool) -> None:
        if self.call:  # else nothing was sent; `RequestBuffer.flush` looks again after it has sent the get
            self.channel.give_back(self.peer, self.call, later)


class GetBatch(Get):
    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        found, at, any_again = [], 1, False
        for count, _, again in _unpack(arrived[0]):
            found.append(payload.decode(arrived.cut(at, at + count)))
            at += count
            any_again |= again
        return found, any_again


class RemoteTake(Get, PendingTake[Any]):
    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        about = _unpack(arrived[0])[0]
        if len(about) < 4:
            raise _too_old(self.name, self.peer, "take()")
        self.deliveries = about[3]
        return payload.decode(arrived.cut(1)), about[2]

    def _acknowledge(self, arrived: AuthenticatedParts) -> None:
        """Do nothing when user code receives the item: `release` acknowledges it at the end of the user's block."""

    def _decode_failed(self, error: BaseException) -> None:
        if self.deliveries:  # counted as a failure, so that an item that no consumer can read does not come for ever
            why = "".join(traceback.format_exception_only(type(error), error)).strip()
            self.fail(f"it could not be read: {why}")
        else:
            self._give_back(False)

    def release(self) -> AsyncWork[None]:
        what = f"the release of an item of channel {self.name!r}"
        work = _Release(self.name, what, b"", lambda id: frames.ChannelRelease(id, self.call))
        work.begin(self.channel, self.peer)
        return work

    def fail(self, how: str, later: bool = False) -> None:
        # without an answer: if the frame is lost, the host has lost the link, and gives the item back anyway
        frame = frames.ChannelRelease(0, self.call, printable(how, ERROR_CHARS))
        if later:
            self.peer.soon(functools.partial(self.peer.send, frame))
        else:
            self.peer.send(frame)


class DrainUndeliverable(Get):
    """A request to remove the undeliverable items of a key from the channel and return them."""

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        return undeliverable(self.name, self.peer, self.key, arrived, payload.decode), False


class Query(AsyncWork[Any]):
    """A question to one host that changes no item. *decode* makes the result from the host's Peer and the answer."""

    peer: Peer
    _lazy = True

    def __init__(
        self, name: str, what: str, key: bytes, frame: FrameMaker, decode: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(what)
        self.name = name
        self.key = key
        self.frame = frame
        self.call = 0
        self._decode = decode

    def begin(self, channel: RemoteChannel, peer: Peer) -> None:
        self.peer = peer
        channel.ask(self, peer)

    def _make_result(self, value: AuthenticatedParts) -> Any:
        return _unpack(value[0]) if self._decode is None else self._decode(self.peer, value)


class _Release(Query):
    """Tells the host that the item of a take was processed, and is done when the host confirms that.

    If the channel has ended because it was closed and all items were processed, that end confirms the release too.
    """

    def reject(self, error: BaseException) -> bool:
        if isinstance(error, ChannelClosedError):
            return self.resolve(AuthenticatedParts())
        if isinstance(error, ConnectionLostError):
            text = f"{error}. {self._what} was under way and is not confirmed: the item may be processed again"
            error = ConnectionLostError(text)
        return super().reject(error)

    def _make_result(self, value: AuthenticatedParts) -> None:
        return None


Request = Put | Get | Query
R = TypeVar("R", bound=Put | Get)


def reference(request: AsyncWork[Any]) -> Callable[[], Any]:
    """Return a function that returns *request*. It refers weakly to a get, since a dropped get is to be cancelled."""
    return weakref.ref(request) if isinstance(request, Get) else lambda: request


class RequestMaker:
    """Base class that makes the requests to a channel whose items are in host processes. A subclass sends them.

    *taker* names this process; it is shown as the consumer of items that this process takes.
    """

    def __init__(self, io: IoThread, name: str, taker: str) -> None:
        self._io = io
        self._name = name
        self._taker = taker
        self._putting = f"put() into channel {name!r}"
        self._getting = f"get() from channel {name!r}"

    def _begin(self, request: Request) -> None:
        """Send a request to the host of its key. While that host is not known, keep the request, in order."""
        raise NotImplementedError

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        # copy=None: a put that waits here keeps the producer's own memory, and costs no more
        put = Put(self._putting, key_bytes(key), weight, nowait, payload.encode(item, "item", copy=None))
        return self._start(put, timeout)

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Get:
        where = key_bytes(key)
        get = Get(self._name, self._getting, where, lambda id: frames.ChannelGet(id, where, nowait))
        return self._start(get, timeout)

    def batch(self, key: Hashable, target: float, timeout: float | None) -> Get:
        where, what = key_bytes(key), f"get_batch() from channel {self._name!r}"
        get = GetBatch(self._name, what, where, lambda id: frames.ChannelBatch(id, where, target))
        return self._start(get, timeout)

    def take(self, key: Hashable, timeout: float | None) -> RemoteTake:
        where, what = key_bytes(key), f"take() from channel {self._name!r}"
        take = RemoteTake(self._name, what, where, lambda id: frames.ChannelGet(id, where, False, self._taker))
        return self._start(take, timeout)

    def look(self, key: Hashable) -> AsyncWork[tuple[int, bool]]:
        where = key_bytes(key)
        return self._query(where, lambda id: frames.ChannelLook(id, where))

    def undeliverable(self, key: Hashable, drain: bool) -> AsyncWork[list[UndeliverableItem[Any]]]:
        where, what = key_bytes(key), f"undeliverable() of channel {self._name!r}"
        if drain:
            get = DrainUndeliverable(self._name, what, where, lambda id: frames.ChannelShow(id, "drain", where))
            return self._start(get, None)
        return self._query(
            where,
            lambda id: frames.ChannelShow(id, "list", where),
            lambda peer, parts: undeliverable(self._name, peer, where, parts, _decoded_or_error),
        )

    def _start(self, request: R, timeout: float | None) -> R:
        trace_request(request)
        self._begin(request)
        if timeout is not None:
            limit(self._io, request, timeout)
        return request

    def _query(self, where: bytes, frame: FrameMaker, decode: Callable[..., Any] | None = None) -> Query:
        work = Query(self._name, f"a request to channel {self._name!r}", where, frame, decode)
        self._begin(work)
        return work


def limit(io: IoThread, work: Put | Get, timeout: float) -> None:
    """Cancel *work* after *timeout* seconds. If the host does not answer in CONFIRM_S more seconds, fail it here."""
    if work.done():
        return
    ref = weakref.ref(work)
    handles: list[asyncio.TimerHandle] = []

    def after(seconds: float, step: Callable[[Put | Get], None]) -> None:
        def due() -> None:
            found = ref()
            if found is not None and not found.done():
                step(found)

        handles[:] = [io.loop.call_later(max(0.0, seconds), due)]

    def expire(work: Put | Get) -> None:
        after(CONFIRM_S, give_up)
        work.expire()

    def give_up(work: Put | Get) -> None:
        work.forget()
        work.reject(CallTimeoutError(f"{work._what} was not done in {timeout:g} s, and its host does not answer"))

    io.call(after, timeout, expire)
    work._on_done(lambda: io.call(lambda: handles[0].cancel()))


# --- answers ---


def description(parts: AuthenticatedParts) -> View:
    """Decode a host's answer for `Channel.describe`: the keys, their waiting items, and how many are undeliverable."""
    closed, rows, *dead = _unpack(parts[0])
    at, shown = 1, []
    for key, count, about in rows:
        items = []
        for number, nbytes, weight, again in about:
            if number < 0:
                items.append(ShownItem(None, nbytes, weight, again, whole=False))
                continue
            items.append(ShownItem(payload.decode(parts.cut(at, at + number)), nbytes, weight, again))
            at += number
        shown.append((key_of(key), count, items))
    return closed, shown, {key_of(key): count for key, count in (dead[0] if dead else ())}


def undeliverable(
    name: str, peer: Peer, key: bytes, parts: AuthenticatedParts, decode: Callable[[AuthenticatedParts], Any]
) -> list[UndeliverableItem[Any]]:
    """Decode a host's answer to the request for the undeliverable items of a key.

    *decode* makes an item from the message parts of the item.

    Raises:
        ProtocolMismatchError: the host has protocol 6, which does not know undeliverable items.
    """
    closed, about = _unpack(parts[0])[:2]
    if closed is not None:
        raise _too_old(name, peer, "undeliverable()")
    at, found = 1, []
    for count, deliveries, consumer, reason in about:
        item = decode(parts.cut(at, at + count))
        found.append(UndeliverableItem(item, key_of(key), deliveries, consumer, reason))
        at += count
    return found


def _decoded_or_error(parts: AuthenticatedParts) -> Any:
    try:
        return payload.decode(parts)
    except Exception as error:  # noqa: BLE001 - of the user's classes; the other items can be read
        return error


def _too_old(name: str, peer: Peer, what: str) -> ProtocolMismatchError:
    return ProtocolMismatchError(
        f"{what} needs a host of protocol 7, and the host of channel {name!r}, {peer.name} on {peer.node}, speaks an "
        "older one: upgrade rlinf-actors there, and create the channel again. The channel's items are untouched"
    )
