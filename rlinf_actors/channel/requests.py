"""The requests of a process to a channel's host: puts, gets, batches, takes and queries.

A request is made, and its arguments are checked, before the host of its key is known. `begin` sends the request when
the host is known: on the caller's thread, or on the I/O thread if the host was not known yet. Answers arrive on any
thread that reads the sockets (`net.reading`); the thread that waits for the item unpickles it.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Union

import msgspec

from rlinf_actors.channel.answers import decoded_or_error, undeliverable
from rlinf_actors.channel.key_encoding import key_bytes
from rlinf_actors.channel.put_window import Put
from rlinf_actors.channel.queue_commands import ERROR_CHARS
from rlinf_actors.channel.request_sender import RequestSender
from rlinf_actors.channel.request_spans import trace_request
from rlinf_actors.channel.results import PendingGet, PendingTake, UndeliverableItem, Withdrawable, too_late
from rlinf_actors.errors import ChannelClosedError, ConnectionLostError
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import AsyncWork, finish_all
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import printable

if TYPE_CHECKING:
    from rlinf_actors.channel.client import RemoteChannel

CONFIRM_S = 5.0
"""Seconds that a put or get whose time is up waits for the host to confirm the cancellation."""

_unpack = msgspec.msgpack.Decoder().decode

FrameMaker = Callable[[int], frames.AnyFrame]
"""Makes the frame of a request from the request's number."""


class Get(PendingGet[Any], Withdrawable):
    """A get that this process requests from a channel's host; its result is the item.

    Attributes:
        sender: sends to the host of the key.
        frame: makes the request's frame; None for a plain get.
        call: number of the get on the link to the host; 0 until the get is sent.
        bare: True if the answer is only the item's part, which no consumer has received before.
    """

    channel: RemoteChannel
    sender: RequestSender
    span = 0
    call = 0
    bare = False

    def __init__(self, name: str, what: str, key: bytes, frame: FrameMaker | None = None) -> None:
        super().__init__(what)
        self.name = name
        self.key = key
        self.frame = frame

    @property
    def peer(self) -> Peer:
        return self.sender.peer

    def begin(self, channel: RemoteChannel, sender: RequestSender) -> None:
        self.channel, self.sender = channel, sender
        peer = sender.peer
        alone = not peer.pending
        self._by_loop = not alone  # the answers to many come together, and the loop takes them in meanwhile
        self.call = peer.open(PendingAnswer(self))
        if not self._finished:
            if self.frame is None:
                sender.add((self.key, self.call), alone)
            else:
                sender.send(self.frame(self.call), now=alone)
        self._was_sent()

    def expire(self) -> None:
        if not self.call:
            self.reject(too_late(self._what, self.had_s, "the channel was not found yet"))
        else:
            self.sender.send(frames.ChannelCancel(self.call, False))

    def forget(self) -> None:
        self._give_back(False)

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        if self.bare:
            return payload.decode(arrived), False
        return payload.decode(arrived.cut(1)), _unpack(arrived[0])[0][2]

    def _acknowledge(self, arrived: AuthenticatedParts) -> None:
        if self.bare or len(arrived[0]) > 1:  # an empty batch has nothing to acknowledge
            self.sender.acknowledge(self.call)

    def _give_back(self, later: bool) -> None:
        if self.call:  # else nothing was sent; `RequestBuffer.flush` looks again after it has sent the get
            self.channel.give_back(self.sender, self.call, later)


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
        _, _, again, self.deliveries = _unpack(arrived[0])[0]
        return payload.decode(arrived.cut(1)), again

    def _acknowledge(self, arrived: AuthenticatedParts) -> None:
        """Do nothing when user code receives the item: `release` acknowledges it at the end of the user's block."""

    def _decode_failed(self, error: BaseException) -> None:
        # counted as a failure, so that an item that no consumer can read does not come for ever
        why = "".join(traceback.format_exception_only(type(error), error)).strip()
        self.fail(f"it could not be read: {why}")

    def release(self) -> AsyncWork[None]:
        what = f"the release of an item of channel {self.name!r}"
        work = _Release(self.name, what, b"", lambda id: frames.ChannelRelease(id, self.call))
        work.begin(self.channel, self.sender)
        return work

    def fail(self, how: str, later: bool = False) -> None:
        # without an answer: if the frame is lost, the host has lost the link, and gives the item back anyway
        frame = frames.ChannelRelease(0, self.call, printable(how, ERROR_CHARS))
        if later:
            self.peer.soon(functools.partial(self.sender.send, frame))
        else:
            self.sender.send(frame)


class DrainUndeliverable(Get):
    """A request to remove the undeliverable items of a key from the channel and return them."""

    def _decode(self, arrived: AuthenticatedParts) -> tuple[Any, bool]:
        return undeliverable(self.key, arrived, payload.decode), False


class PendingAnswer(weakref.ref[Get]):
    """The entry of a get in the table of pending calls of its host's Peer; it gets the host's answer.

    The entry refers weakly to the get, so that a get that the caller drops is cancelled.
    """

    __slots__ = ()
    anywhere = True

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Complete the get with the host's answer. Any thread.

        Return True, which removes the entry from the table, because a request has only one answer.
        """
        get = self()
        if get is None:
            return True  # dropped: its destructor has told the host
        if type(frame) is frames.Raised:
            get.reject(get.channel.refusal(frame, get, parts))
        else:
            get.resolve(parts)
        return True

    @staticmethod
    def answer_all(answered: Sequence[tuple[PendingAnswer, AuthenticatedParts]], frame: frames.AnyFrame) -> None:
        """Complete several gets of one channel with their items. Any thread."""
        gets, items = [], []
        for entry, item in answered:
            get = entry()
            if get is not None:
                get.bare = True
                gets.append(get)
                items.append(item)
        if not gets:
            return
        sender = gets[0].sender
        sender.arrived.update([get.call for get in gets])  # first: the threads that wait may take the items at once
        finish_all(gets, items)
        for get in gets:
            if get._error is not None:
                sender.arrived.discard(get.call)  # cancelled just now

    def fail(self, error: Exception) -> None:
        get = self()
        if get is not None:
            get.reject(get.channel.gone(error))


class Query(AsyncWork[Any]):
    """A question to one host that changes no item. *decode* makes the result from the answer."""

    channel: RemoteChannel
    anywhere = True
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

    def begin(self, channel: RemoteChannel, sender: RequestSender) -> None:
        self.channel = channel
        self.call = sender.peer.open(self)
        if not self.done():
            sender.send(self.frame(self.call), now=True)  # behind acknowledgements: what user code has does not wait

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Complete the query with the host's answer, and return True. Any thread."""
        if type(frame) is frames.Raised:
            self.reject(self.channel.refusal(frame, self, parts))
        else:
            self.resolve(parts)
        return True

    def fail(self, error: Exception) -> None:
        self.reject(self.channel.gone(error))

    def _make_result(self, value: AuthenticatedParts) -> Any:
        return _unpack(value[0]) if self._decode is None else self._decode(value)


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


Request = Union[Put, Get, Query]
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

    def _undo(self, request: Put | Get) -> None:
        """Cancel a request, because a signal handler has raised while it was sent. Loop thread only."""

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        # copy=None: a put that waits here keeps the producer's own memory, and costs no more
        put = Put(self._putting, key_bytes(key), weight, nowait, payload.encode(item, "item", copy=None))
        return self._start(put, timeout)

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Get:
        where = key_bytes(key)
        frame = (lambda id: frames.ChannelGet(id, where, True)) if nowait else None
        get = Get(self._name, self._getting, where, frame)
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
            lambda parts: undeliverable(where, parts, decoded_or_error),
        )

    def _start(self, request: R, timeout: float | None) -> R:
        if recorder.active is not None:
            trace_request(request)
        try:
            self._begin(request)
        except BaseException:
            self._io.call(self._undo, request)
            raise
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
    work.had_s = timeout
    if isinstance(work, PendingGet):
        work.limit_s = timeout
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
        work.reject(too_late(work._what, timeout, "the process that holds it does not answer"))

    io.call(after, timeout, expire)
    work._on_done(lambda: io.call(lambda: handles[0].cancel()))
