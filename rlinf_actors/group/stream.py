"""Streaming calls: a generator runs in each worker, and the caller iterates over the merged items.

Backpressure: a worker may send at most WINDOW items more than the caller has taken from this worker.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union

from rlinf_actors.errors import GroupClosedError, SerializationError
from rlinf_actors.group.result import refuse_own
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.runtime.lost_errors import LostErrors
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")

WINDOW = 16
"""Number of items that a worker may send before the caller takes them. A Credit is sent for half of this number."""


class _RankStream:
    """The items that one rank sends for a streaming call. The Peer of the rank keeps it until the stream ends."""

    __slots__ = ("_feed", "call", "peer", "taken")
    anywhere = False

    def __init__(self, feed: _Feed, peer: Peer) -> None:
        self._feed = feed
        self.peer = peer
        self.call = 0
        self.taken = 0  # items taken since the last credit

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self._feed.put(self, frame, parts)
        return not isinstance(frame, frames.Item)

    def fail(self, error: Exception) -> None:
        self._feed.put(self, error, AuthenticatedParts())

    def took_one(self) -> None:
        self.taken += 1
        if self.taken >= WINDOW // 2:
            self.peer.send(frames.Credit(self.call, self.taken))
            self.taken = 0

    def error_of(self, frame: frames.Raised | Exception, parts: AuthenticatedParts) -> Exception:
        if isinstance(frame, Exception):
            return frame
        return self.peer.exception(frame, parts)


_Arrived = tuple[_RankStream, Union[frames.AnyFrame, Exception], AuthenticatedParts]
_Failure = tuple[_RankStream, Union[frames.Raised, Exception], AuthenticatedParts]


class _Feed:
    """The items of a streaming call that have arrived from the workers and were not taken yet. Any thread.

    The connections refer to this object and not to the StreamResult, which the user iterates over. So the stream ends
    when the user drops the StreamResult.
    """

    shared = False  # this, `loop`, `cause`, `raised` and `describe`: see runtime.lost_errors.FailedOperation

    def __init__(self, method: str, peers: Sequence[Peer], lost: LostErrors) -> None:
        self.method = method
        self.loop = asyncio._get_running_loop()
        self.iterated = False
        self._lost = lost
        self._failed: _Failure | None = None  # the first failure, until it is taken
        self._streams = [_RankStream(self, peer) for peer in peers]
        self._lock = Lock()
        self._items: collections.deque[_Arrived] = collections.deque()
        self._arrival: Promise[None] | None = None  # ends when something arrives
        self._left = len(peers)
        self._closed = False

    def start(self, parts: Sequence[Sequence[Buffer]]) -> None:
        own = len(parts) > 1 or len(self._streams) == 1
        for index, stream in enumerate(self._streams):
            stream.call = stream.peer.open(stream)
            if (active := recorder.active) is not None:
                goes = flows.of_request(stream.peer.own_identity, stream.call)
                flows.note(active, f"{stream.peer.name}.{self.method}() streams", flows.CALL, goes=goes)
            header = frames.Stream(stream.call, self.method, WINDOW)
            stream.peer.send(header, parts[index] if own else parts[0], now=True, alone=own)

    def begin(self) -> None:
        """Record that the user iterates now, and so gets the error if a worker fails: LostErrors need not report it."""
        with self._lock:
            self.iterated = True
            if self._failed is not None:
                self._lost.seen(self)

    def put(self, stream: _RankStream, frame: frames.AnyFrame | Exception, parts: AuthenticatedParts) -> None:
        with self._lock:
            self._items.append((stream, frame, parts))
            arrival, self._arrival = self._arrival, None
            failed = isinstance(frame, (frames.Raised, Exception)) and not isinstance(frame, GroupClosedError)
            if failed and self._failed is None and not self._closed:
                self._failed = (stream, frame, parts)  # type: ignore[assignment]  # of what Raised and Exception are
                self._lost.failed(self, awaited=self.iterated)
        if arrival is not None:
            arrival.resolve(None)

    def next_arrival(self) -> Promise[None] | None:
        """Return a promise that ends when an item arrives or the stream ends; None if `take` need not wait for that."""
        with self._lock:
            if self._items or self._closed or not self._left:
                return None
            if self._arrival is None:
                self._arrival = Promise(f"the next item of {self.method}()")
            return self._arrival

    def take(self) -> tuple[int, Any] | bool:
        """Take the next ``(rank, item)``. Return True if none has arrived yet, False at the end of the stream.

        If the stream of a rank has failed, end all streams and raise the error.
        """
        while self._left and not self._closed:
            with self._lock:
                if not self._items:
                    return True
                stream, frame, parts = self._items.popleft()
            if isinstance(frame, frames.Item):
                stream.took_one()
                peer = stream.peer
                try:
                    return peer.rank, payload.decode(parts)
                except Exception as error:
                    raise failure.unreadable("an item", self.method, peer.name, peer.node, error) from error
            if isinstance(frame, frames.Ok):
                self._left -= 1
                continue
            if self._failed is not None:
                self._lost.seen(self)
                self._failed = None
            self.close()
            assert isinstance(frame, (frames.Raised, Exception))
            raise stream.error_of(frame, parts)
        return False

    def close(self) -> None:
        """End the stream: end the generators in the workers and drop the remaining items. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._items.clear()
            arrival, self._arrival = self._arrival, None
        for stream in self._streams:
            stream.peer.forget(stream.call)
        if arrival is not None:
            arrival.resolve(None)
        if self._failed is None:
            return
        if self.iterated:  # a caller who leaves the loop early does not want later errors
            self._lost.seen(self)
        else:
            self._lost.collected(self)

    def drop(self) -> None:
        """Call `close` on the loop thread, soon. For a destructor, whose thread may hold a lock that `close` needs."""
        if not self._closed:
            self._streams[0].peer.soon(self.close)

    @property
    def cause(self) -> Exception | None:
        return self._failed[1] if self._failed is not None and isinstance(self._failed[1], Exception) else None

    def raised(self) -> Exception:
        assert self._failed is not None
        stream, frame, parts = self._failed
        return stream.error_of(frame, parts)

    def describe(self) -> str:
        assert self._failed is not None
        stream, frame, _ = self._failed
        return failure.describe(frame, self.method, worker=stream.peer.name, node=stream.peer.node)


class StreamResult(Generic[T]):
    """The items of a call of a generator method, to be iterated once: ``for rank, item in ...`` or ``async for``.

    The items of one rank come in order; the items of several ranks are merged as they arrive. If a worker fails, the
    iteration raises the worker's error. The generators in the workers end when the loop is left early, when `close` is
    called, or when this object is dropped. Errors that come after the loop was left are not reported. ``for`` blocks,
    ``async for`` does not.
    """

    def __init__(
        self,
        runtime: Runtime,
        method: str,
        peers: Sequence[Peer],
        parts: Sequence[Sequence[Buffer]],
        *,
        beside: bool = False,
        control: object = None,
    ) -> None:
        self._control = control  # a stream keeps a launch going, as a handle does
        self._runtime = runtime
        self._peers: Sequence[Peer] = () if beside else peers
        self._feed = _Feed(method, peers, runtime.lost)
        self._feed.start(parts)

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"it is the stream of {self._feed.method}(), which its caller alone can iterate: send the items, as in "
            f"[item async for rank, item in other.{self._feed.method}()]"
        )

    async def __aiter__(self) -> AsyncIterator[tuple[int, T]]:
        self._feed.begin()
        try:
            while (taken := self._feed.take()) is not False:
                if taken is not True:
                    yield taken
                elif (arrival := self._feed.next_arrival()) is not None:
                    await arrival
        finally:
            self.close()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        refuse_own(self._runtime, self._feed.method, self._peers)
        self._feed.begin()
        try:
            while (taken := self._feed.take()) is not False:
                if taken is not True:
                    yield taken
                elif (arrival := self._feed.next_arrival()) is not None:
                    arrival.wait()
        finally:
            self.close()

    def close(self) -> None:
        """End the generators in the workers. Any thread; never blocks; calling twice is harmless."""
        self._feed.close()
        self._control = None

    async def aclose(self) -> None:
        """End the generators in the workers; the async form of `close`."""
        self.close()

    def __del__(self) -> None:
        feed = self.__dict__.get("_feed")
        if feed is not None:
            feed.drop()
