"""Streaming calls: a generator in each worker, one merged iteration at the caller.

Back-pressure: a worker may be WINDOW items ahead of what the caller has taken from it, no more.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlinf_actors.errors import GroupClosedError, SerializationError, UsageError
from rlinf_actors.group.result import refuse_own
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.runtime.lost_errors import LostErrors
    from rlinf_actors.runtime.runtime import Runtime

T = TypeVar("T")

WINDOW = 16
"""Items a worker may be ahead; half of it is given back at a time, so that credits cost little."""


class _Slot:
    """One rank's stream, as its peer sees it."""

    __slots__ = ("_feed", "peer", "taken")

    def __init__(self, feed: _Feed, peer: Peer) -> None:
        self._feed = feed
        self.peer = peer
        self.taken = 0

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self._feed.put(self, frame, parts)
        return not isinstance(frame, frames.Item)

    def fail(self, error: Exception) -> None:
        self._feed.put(self, error, AuthenticatedParts())


class _Feed:
    """What arrived and was not taken yet; and who waits for it. Any thread."""

    shared = False

    def __init__(self, method: str, peers: Sequence[Peer], lost: LostErrors) -> None:
        self.method = method
        self.loop = asyncio._get_running_loop()
        self.iterated = False
        self._lost = lost
        self._failed: tuple[_Slot, frames.Raised | Exception, AuthenticatedParts] | None = (
            None  # the first, until it is taken
        )
        self.calls: list[tuple[_Slot, int]] = []
        self._peers = peers
        self._lock = threading.Lock()
        self._items: collections.deque[tuple[_Slot, frames.AnyFrame | Exception, AuthenticatedParts]] = (
            collections.deque()
        )
        self._wake: Callable[[], object] | None = None
        self._left = len(peers)
        self._closed = False

    def start(self, parts: Sequence[Sequence[Buffer]]) -> None:
        for index, peer in enumerate(self._peers):
            slot = _Slot(self, peer)
            call = peer.open(slot)
            self.calls.append((slot, call))
            own = len(parts) > 1 or len(self._peers) == 1
            peer.send(frames.Stream(call, self.method, WINDOW), parts[index] if own else parts[0], now=True, alone=own)

    def begin(self) -> None:
        """A loop takes what arrives from now on, an error that is here already included."""
        with self._lock:
            self.iterated = True
            if self._failed is not None:
                self._lost.seen(self)

    def put(self, slot: _Slot, frame: frames.AnyFrame | Exception, parts: AuthenticatedParts) -> None:
        with self._lock:
            self._items.append((slot, frame, parts))
            wake, self._wake = self._wake, None
            failed = isinstance(frame, (frames.Raised, Exception)) and not isinstance(frame, GroupClosedError)
            if failed and self._failed is None and not self._closed:
                self._failed = (slot, frame, parts)  # type: ignore[assignment]  # of what Raised and Exception are
                self._lost.failed(self, awaited=self.iterated)
        if wake is not None:
            wake()

    def wait(self, wake: Callable[[], object]) -> bool:
        """Call *wake* when there is something to take; False if there is now."""
        with self._lock:
            if self._items or self._closed or not self._left:
                return False
            self._wake = wake
            return True

    def take(self) -> tuple[int, Any] | bool:
        """The next (rank, item); False at the end; True when nothing is there at the moment."""
        while self._left and not self._closed:
            with self._lock:
                if not self._items:
                    return True
                slot, frame, parts = self._items.popleft()
            if isinstance(frame, frames.Item):
                self._credit(slot)
                try:
                    return slot.peer.rank, payload.decode(parts)
                except Exception as error:
                    raise failure.unreadable("an item", self.method, slot.peer.name, slot.peer.node, error) from error
            if isinstance(frame, frames.Ok):
                self._left -= 1
                continue
            if self._failed is not None:
                self._lost.seen(self)
                self._failed = None
            self.close()
            assert isinstance(frame, (frames.Raised, Exception))
            raise _error(slot, frame, parts)
        return False

    def close(self) -> None:
        """End the generators in the workers; nothing more comes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._items.clear()
            wake, self._wake = self._wake, None
        for slot, call in self.calls:
            slot.peer.forget(call)
        if wake is not None:
            wake()
        if self._failed is None:
            return
        if self.iterated:  # whoever leaves the loop early wants nothing of what comes after
            self._lost.seen(self)
        else:
            self._lost.collected(self)

    @property
    def cause(self) -> Exception | None:
        """See runtime.lost.Failed."""
        return self._failed[1] if self._failed is not None and isinstance(self._failed[1], Exception) else None

    def raised(self) -> Exception:
        """The error as the iteration would raise it."""
        assert self._failed is not None
        return _error(*self._failed)

    def describe(self) -> str:
        """The error as one text, for the log."""
        assert self._failed is not None
        slot, frame, _ = self._failed
        return failure.describe(frame, self.method, worker=slot.peer.name, node=slot.peer.node)

    def drop(self) -> None:
        """As `close`, a little later: from a destructor, whose own thread may hold any lock, this one's too."""
        if not self._closed:
            self._peers[0].soon(self.close)

    def _credit(self, slot: _Slot) -> None:
        slot.taken += 1
        if slot.taken >= WINDOW // 2:
            call = next(number for known, number in self.calls if known is slot)
            slot.peer.send(frames.Credit(call, slot.taken))
            slot.taken = 0


def _error(slot: _Slot, frame: frames.Raised | Exception, parts: AuthenticatedParts) -> Exception:
    if isinstance(frame, Exception):
        return frame
    if frame.text.startswith("the result of ") or frame.text.endswith("it is not an async generator"):
        return UsageError(
            f"{slot.peer.name} on {slot.peer.node} is of an older version of rlinf-actors, which streams async "
            "generators only, no plain ones: upgrade that node"
        )
    return failure.decode(frame, parts, worker=slot.peer.name, rank=slot.peer.rank, node=slot.peer.node)


class StreamResult(Generic[T]):
    """Iterate it once, by ``async for rank, item in …`` or ``for rank, item in …``.

    Items of one rank come in order; ranks are merged as they arrive. An error of a worker ends the
    iteration with that error. Leaving the loop early, `close`, or dropping it ends the generators. An error
    behind the item at which the loop was left is not reported.
    """

    def __init__(
        self,
        runtime: Runtime,
        method: str,
        peers: Sequence[Peer],
        parts: Sequence[Sequence[Buffer]],
        *,
        beside: bool = False,
    ) -> None:
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
        loop = asyncio.get_running_loop()
        self._feed.begin()
        try:
            while True:
                event = asyncio.Event()

                def wake(event: asyncio.Event = event) -> None:
                    call_threadsafe(loop, event.set)

                if self._feed.wait(wake):
                    await event.wait()
                    continue
                taken = self._feed.take()
                if taken is False:
                    return
                if not isinstance(taken, bool):
                    yield taken
        finally:
            self.close()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        refuse_own(self._runtime, self._feed.method, self._peers)
        self._feed.begin()
        try:
            while True:
                gate = threading.Lock()
                gate.acquire()
                if self._feed.wait(gate.release):
                    gate.acquire()
                    continue
                taken = self._feed.take()
                if taken is False:
                    return
                if not isinstance(taken, bool):
                    yield taken
        finally:
            self.close()

    def close(self) -> None:
        """End the generators in the workers. Any thread; twice is fine."""
        self._feed.close()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def __del__(self) -> None:
        feed = self.__dict__.get("_feed")
        if feed is not None:
            feed.drop()
