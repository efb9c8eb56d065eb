"""Requests to a channel's host: gets, batches, takes and questions, and how their answers are read.

House rule: a request is made, and its arguments are checked, before the host is known. `begin` sends it then, on the
caller's thread; or on the I/O thread, if the host was not known yet.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import msgspec

from rlinf_actors.channel.backend import Delivery, PendingGet, Shown, UndeliverableItem, View
from rlinf_actors.channel.key_encoding import key_bytes, key_of
from rlinf_actors.channel.puts import Outgoing, Put
from rlinf_actors.channel.queue import ERROR_CHARS
from rlinf_actors.errors import (
    CallTimeoutError,
    ChannelClosedError,
    ConnectionLostError,
    ProtocolMismatchError,
)
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import printable

CONFIRM_S = 5.0
"""How long a put or get whose time is up waits for the host to say whether it still came true."""

_unpack = msgspec.msgpack.Decoder().decode


class Line(Protocol):
    """What a request needs of the channel that it goes to: see client.RemoteChannel."""

    outgoing: Outgoing

    def acknowledge(self) -> None:
        """Say what was taken, before what is sent next."""

    def ask(self, work: Get | Asked, peer: Peer) -> None:
        """Send a request to one replica."""

    def taken(self, peer: Peer, call: int) -> None:
        """What a get brought has reached the user's code. Any thread."""

    def give_back(self, peer: Peer, call: int, later: bool) -> None:
        """See PendingGet."""


Frame = Callable[[int], frames.AnyFrame]
"""Makes a request's frame from its number."""


class Get(PendingGet[Any]):
    """A get under way. `call` is its number on the link to `peer`, 0 until the host of its key is known."""

    peer: Peer
    line: Line

    def __init__(self, name: str, what: str, key: bytes, frame: Frame) -> None:
        super().__init__(what)
        self.name = name
        self.key = key
        self.frame = frame
        self.call = 0

    def held(self) -> Callable[[], Get | None]:
        """What keeps it while it waits: one that is dropped is over."""
        return weakref.ref(self)

    def begin(self, line: Line, peer: Peer) -> None:
        """Send it. On the thread of the caller, or on the I/O thread."""
        self.line, self.peer = line, peer
        line.ask(self, peer)

    def expire(self) -> None:
        """Its time is up. Loop thread."""
        if not self.call:
            self.reject(CallTimeoutError(f"{self._what} was not done in its time: the channel was not found yet"))
        else:
            self.peer.send(frames.ChannelCancel(self.call, False))

    def forget(self) -> None:
        """The host does not say whether there was an item in time. Loop thread."""
        self._give_back(False)

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        return payload.decode(arrived.cut(1)), _unpack(arrived[0])[0][2]

    def _acknowledge(self, arrived: AuthenticatedParts) -> None:
        if len(arrived[0]) > 1:  # an empty batch has nothing to acknowledge
            self.line.taken(self.peer, self.call)

    def _give_back(self, later: bool) -> None:
        if self.call:  # else nothing was sent; `RemoteChannel.ask` looks again after it has sent something
            self.line.give_back(self.peer, self.call, later)


class Batch(Get):
    """A get_batch under way."""

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        found, at, any_again = [], 1, False
        for count, _, again in _unpack(arrived[0]):
            found.append(payload.decode(arrived.cut(at, at + count)))
            at += count
            any_again |= again
        return found, any_again


class RemoteTake(Get, Delivery[Any]):
    """A take under way, and then the delivery that it got."""

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        about = _unpack(arrived[0])[0]
        if len(about) < 4:
            raise ProtocolMismatchError(_too_old(self.name, self.peer, "take()"))
        self.deliveries = about[3]
        return payload.decode(arrived.cut(1)), about[2]

    def _acknowledge(self, arrived: AuthenticatedParts) -> None:
        """The release does."""

    def _not_decoded(self, error: BaseException) -> None:
        if self.deliveries:  # counted: an item that no consumer can read does not come for ever
            why = "".join(traceback.format_exception_only(type(error), error)).strip()
            self.fail(f"it could not be read: {why}")
        else:
            self._give_back(False)

    def release(self) -> AsyncWork[None]:
        work = _Release(self.name, f"the release of an item of channel {self.name!r}", b"", self._released)
        work.begin(self.line, self.peer)
        return work

    def fail(self, how: str, later: bool = False) -> None:
        # without an answer: if it is lost, the host gives back too
        frame = frames.ChannelRelease(0, self.call, printable(how, ERROR_CHARS))
        if later:
            self.peer.soon(functools.partial(self.peer.send, frame))
        else:
            self.peer.send(frame)

    def _released(self, id: int) -> frames.AnyFrame:
        return frames.ChannelRelease(id, self.call)


class Drain(Get):
    """A request for the undeliverable items of a key that takes them off the list."""

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        return undeliverable(self.name, self.peer, self.key, arrived, payload.decode), False


class Asked(AsyncWork[Any]):
    """A question whose answer is decoded by the thread that waits."""

    peer: Peer

    def __init__(
        self, name: str, what: str, key: bytes, frame: Frame, decode: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(what)
        self.name = name
        self.key = key
        self.frame = frame
        self.call = 0
        self._decode = decode

    def held(self) -> Callable[[], Asked]:
        """What keeps it while it waits for its host to be known."""
        return lambda: self

    def begin(self, line: Line, peer: Peer) -> None:
        """Send it. On the thread of the caller, or on the I/O thread."""
        self.peer = peer
        line.ask(self, peer)

    def _outcome(self) -> Any:
        parts = super()._outcome()
        return _unpack(parts[0]) if self._decode is None else self._decode(self.peer, parts)


class _Release(Asked):
    """The host is told that an item was processed; the end of a channel that was drained says that it heard so."""

    def reject(self, error: BaseException) -> bool:
        if isinstance(error, ChannelClosedError):
            return self.resolve(AuthenticatedParts())
        if isinstance(error, ConnectionLostError):
            text = f"{error}. {self._what} was under way and is not confirmed: the item may be processed again"
            error = ConnectionLostError(text)
        return super().reject(error)

    def _outcome(self) -> None:
        AsyncWork._outcome(self)


Request = Put | Get | Asked


class Requests:
    """Makes requests; a subclass sends them.

    Args:
        io: the I/O thread.
        name: of the channel.
        taker: this process, for people.
    """

    def __init__(self, io: IoThread, name: str, taker: str) -> None:
        self._io = io
        self._name = name
        self._taker = taker
        self._putting = f"put() into channel {name!r}"
        self._getting = f"get() from channel {name!r}"

    def _begin(self, request: Request) -> None:
        """Send it, or keep it until the host of its key is known: in order."""
        raise NotImplementedError

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        # not a snapshot: what waits here is the producer's own memory, and costs nothing more
        put = Put(self._putting, key_bytes(key), weight, nowait, payload.encode(item, "item", copy=None))
        self._begin(put)
        if timeout is not None:
            limit(self._io, put, timeout)
        return put

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Get:
        where = key_bytes(key)
        return self._get(
            Get(self._name, self._getting, where, lambda id: frames.ChannelGet(id, where, nowait)), timeout
        )

    def batch(self, key: Hashable, target: float, timeout: float | None) -> Get:
        where, what = key_bytes(key), f"get_batch() from channel {self._name!r}"
        return self._get(Batch(self._name, what, where, lambda id: frames.ChannelBatch(id, where, target)), timeout)

    def take(self, key: Hashable, timeout: float | None) -> RemoteTake:
        where, what = key_bytes(key), f"take() from channel {self._name!r}"
        take = RemoteTake(self._name, what, where, lambda id: frames.ChannelGet(id, where, False, self._taker))
        self._get(take, timeout)
        return take

    def look(self, key: Hashable) -> AsyncWork[tuple[int, bool]]:
        where = key_bytes(key)
        return self._asked(where, lambda id: frames.ChannelLook(id, where))

    def undeliverable(self, key: Hashable, drain: bool) -> AsyncWork[list[UndeliverableItem[Any]]]:
        where, what = key_bytes(key), f"undeliverable() of channel {self._name!r}"
        if drain:
            return self._get(Drain(self._name, what, where, lambda id: frames.ChannelShow(id, "drain", where)), None)
        return self._asked(
            where,
            lambda id: frames.ChannelShow(id, "list", where),
            lambda peer, parts: undeliverable(self._name, peer, where, parts, _decoded_or_why_not),
        )

    def _get(self, get: Get, timeout: float | None) -> Get:
        self._begin(get)
        if timeout is not None:
            limit(self._io, get, timeout)
        return get

    def _asked(self, where: bytes, frame: Frame, decode: Callable[..., Any] | None = None) -> Asked:
        work = Asked(self._name, f"a request to channel {self._name!r}", where, frame, decode)
        self._begin(work)
        return work


def limit(io: IoThread, work: Put | Get, timeout: float) -> None:
    """After *timeout* seconds cancel *work*; if the host does not answer that either, end it here."""
    if work.done():
        return
    ref = weakref.ref(work)
    handles: list[asyncio.TimerHandle] = []

    def under_way() -> Put | Get | None:
        found = ref()
        return None if found is None or found.done() else found

    def give_up() -> None:
        found = under_way()
        if found is not None:
            found.forget()
            found.reject(CallTimeoutError(f"{found._what} was not done in {timeout:g} s, and its host does not answer"))

    def expire() -> None:
        found = under_way()
        if found is not None:
            handles[:] = [io.loop.call_later(CONFIRM_S, give_up)]
            found.expire()

    def disarm() -> None:
        for handle in handles:
            handle.cancel()

    def arm() -> None:
        if under_way() is not None:
            handles.append(io.loop.call_later(max(0.0, timeout), expire))

    io.call(arm)
    work._on_done(lambda: io.call(disarm))


def opened(parts: AuthenticatedParts) -> View:
    """Return what a ChannelShow was answered with."""
    closed, rows, *dead = _unpack(parts[0])
    at, shown = 1, []
    for key, count, about in rows:
        items = []
        for number, nbytes, weight, again in about:
            if number < 0:
                items.append(Shown(None, nbytes, weight, again, whole=False))
                continue
            items.append(Shown(payload.decode(parts.cut(at, at + number)), nbytes, weight, again))
            at += number
        shown.append((key_of(key), count, items))
    return closed, shown, {key_of(key): count for key, count in (dead[0] if dead else ())}


def _decoded_or_why_not(parts: AuthenticatedParts) -> Any:
    try:
        return payload.decode(parts)
    except Exception as error:  # noqa: BLE001 - of the user's classes; the other items can be read
        return error


def undeliverable(
    name: str, peer: Peer, key: bytes, parts: AuthenticatedParts, decode: Callable[[AuthenticatedParts], Any]
) -> list[UndeliverableItem[Any]]:
    """Return what a ChannelShow of the list of undeliverable items was answered with.

    Raises:
        ProtocolMismatchError: the host does not know such a list.
    """
    closed, about = _unpack(parts[0])[:2]
    if closed is not None:
        raise ProtocolMismatchError(_too_old(name, peer, "undeliverable()"))
    at, found = 1, []
    for count, deliveries, consumer, reason in about:
        item = decode(parts.cut(at, at + count))
        found.append(UndeliverableItem(item, key_of(key), deliveries, consumer, reason))
        at += count
    return found


def _too_old(name: str, peer: Peer, what: str) -> str:
    return (
        f"{what} needs a host of protocol 7, and the host of channel {name!r}, {peer.name} on {peer.node}, speaks an "
        "older one: upgrade rlinf-actors there, and create the channel again. The channel's items are untouched"
    )
