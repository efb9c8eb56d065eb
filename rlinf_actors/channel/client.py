"""A channel as any process of the job reaches it: requests to its host, and their ends.

House rules: everything is sent by the link to one replica, so that one process's requests for a key
keep their order; a put's bytes count until the host has accepted it, and what would be too many
waits here, in order, as the producer's own objects.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from rlinf_actors.channel.backend import Shown
from rlinf_actors.channel.keys import key_bytes
from rlinf_actors.channel.outgoing import Outgoing, Put
from rlinf_actors.channel.requests import Asked, Batch, Get, opened
from rlinf_actors.errors import (
    CallTimeoutError,
    ChannelBrokenError,
    ChannelClosedError,
    ConnectionLostError,
    GroupClosedError,
    NodeLostError,
    RlinfActorsError,
    WorkerDiedError,
)
from rlinf_actors.runtime.asyncwork import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.runtime.remote import RemoteGroup
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.vouched import Vouched

CONFIRM_S = 5.0
"""How long a put or get whose time is up waits for the host to say whether it still came true."""

_channels: weakref.WeakValueDictionary[int, RemoteChannel] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def remote_channel(runtime: Runtime, group: RemoteGroup, name: str, node_rank: int) -> RemoteChannel:
    """The one of this process for the hosts in *group*: handles share it, so that their puts are bounded together."""
    with _finding:
        channel = _channels.get(id(group))  # it keeps the group: nothing else gets that id
        if channel is None:
            channel = _channels[id(group)] = RemoteChannel(runtime, group, name, node_rank)
        return channel


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
        self._homes: dict[bytes, int] = {}
        self._taken: collections.deque[tuple[Peer, int]] = collections.deque()
        self._taken_due = False
        self._saying = threading.Lock()
        self._outgoing = Outgoing(self)
        self._putting = f"put() into channel {name!r}"
        self._getting = f"get() from channel {name!r}"

    # --- requests ---

    def put(self, key: Hashable, item: Any, weight: float, nowait: bool, timeout: float | None) -> AsyncWork[None]:
        where = key_bytes(key)
        if nowait:
            self._acknowledge()  # for the room that it makes
        # not a snapshot: what waits here is the producer's own memory, and costs nothing more
        parts = payload.encode(item, "item", copy=None)
        put = Put(self._putting, where, self._peer(where), weight, nowait, parts)
        self._outgoing.add(put)
        if timeout is not None:
            self._limit(put, timeout, lambda: self._outgoing.cancel(put), lambda: self._forget(put.peer, put.call))
        return put

    def get(self, key: Hashable, nowait: bool, timeout: float | None) -> Get:
        where = key_bytes(key)
        work = Get(self, self._getting, self._peer(where))
        return self._take(work, lambda id: frames.ChannelGet(id, where, nowait), timeout)

    def batch(self, key: Hashable, target: float, timeout: float | None) -> Get:
        where = key_bytes(key)
        work = Batch(self, f"get_batch() from channel {self._name!r}", self._peer(where))
        return self._take(work, lambda id: frames.ChannelBatch(id, where, target), timeout)

    def look(self, key: Hashable) -> tuple[int, bool]:
        where = key_bytes(key)
        size, full = self._ask(self._peer(where), lambda id: frames.ChannelLook(id, where)).wait()
        return size, full

    def show(self) -> tuple[bool, list[tuple[Any, int, list[Shown]]]]:
        asked = [self._ask(peer, frames.ChannelShow, opened) for peer in self._group.peers]
        answers = [work.wait() for work in asked]
        return any(closed for closed, _ in answers), [row for _, rows in answers for row in rows]

    def close(self) -> None:
        ended = True
        for work in [self._ask(peer, frames.ChannelClose) for peer in self._group.peers]:
            with contextlib.suppress(ChannelClosedError):  # it is
                ended &= work.wait()
        if ended:
            self._group.gone.wait()  # the hosts end by themselves; the name is free then

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
        found = end_of_channel(self._name, error)
        if found is not error:
            found.__cause__ = error
        return found

    def taken(self, peer: Peer, call: int) -> None:
        """What this get brought has reached the user's code."""
        under_way = len(peer.pending) - (call in peer.pending)  # the loop may not have taken it out yet
        if not under_way and not self._taken:
            peer.send(frames.ChannelAck([call]), now=True)
            return
        self._taken.append((peer, call))  # while more is under way, many go in one frame
        if not self._taken_due:
            self._taken_due = True
            self._runtime.io.call(self._acknowledge)

    def _acknowledge(self) -> None:
        """Say what was taken; what is sent next comes behind it. Any thread."""
        self._taken_due = False  # before we look: who comes later calls again
        calls: dict[Peer, list[int]] = {}
        with self._saying:
            for _ in range(len(self._taken)):
                peer, call = self._taken.popleft()
                calls.setdefault(peer, []).append(call)
            for peer, taken in calls.items():
                peer.send(frames.ChannelAck(taken))

    def give_back(self, peer: Peer, call: int, later: bool) -> None:
        """Nobody will take what this get brings."""
        if later:
            self._runtime.io.call(self._forget, peer, call)
        else:
            self._forget(peer, call)

    # --- inside ---

    def _take(self, work: Get, frame: Callable[[int], frames.AnyFrame], timeout: float | None) -> Get:
        peer = work.peer
        idle = not peer.pending
        call = work.call = peer.open(_Waits(self, weakref.ref(work)))
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
        self,
        peer: Peer,
        frame: Callable[[int], frames.AnyFrame],
        decode: Callable[[Vouched], Any] | None = None,
    ) -> AsyncWork[Any]:
        self._acknowledge()  # what was taken before is not to be seen as waiting
        work = Asked(f"a request to channel {self._name!r}", decode)
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


def end_of_channel(name: str, error: Exception) -> Exception:
    """Return what the users of a channel get for *error*, which says how its host ended.

    A host ends with exit code 0 only when its channel was closed and every item was taken. Every other end breaks the
    channel, so that nobody takes it for an orderly one.
    """
    if isinstance(error, WorkerDiedError) and error.exit_code == 0:
        return ChannelClosedError(f"channel {name!r} was closed")
    if isinstance(error, ConnectionLostError):
        return ConnectionLostError(
            f"{error}. Channel {name!r} and its items are there: an item that no get has returned comes again; a put "
            "that was under way may be in or not"
        )
    if isinstance(error, (WorkerDiedError, NodeLostError)):
        return ChannelBrokenError(
            f"channel {name!r} is broken: the host of channel {name!r} died, and its items: {error}", peer=name
        )
    if isinstance(error, GroupClosedError) or type(error) is RlinfActorsError:  # stopped, or this process has left
        return ChannelBrokenError(f"channel {name!r} is broken, and its items are gone: {error}", peer=name)
    return error


class _Waits:
    """What a peer keeps of a request: where its answer goes. It does not keep a get that nobody else has."""

    __slots__ = ("_channel", "_work")

    def __init__(self, channel: RemoteChannel, work: Callable[[], AsyncWork[Any] | None]) -> None:
        self._channel = channel
        self._work = work

    def answer(self, frame: frames.AnyFrame, parts: Vouched) -> bool:
        """The host answered. Loop thread."""
        work = self._work()
        if work is None:
            return True  # dropped: its destructor has told the host
        if type(frame) is frames.Raised:
            work.reject(self._channel.refusal(frame, work))
        else:
            work.resolve(parts)
        return True

    def fail(self, error: Exception) -> None:
        """The host is gone. Any thread."""
        work = self._work()
        if work is not None:
            work.reject(self._channel.gone(error))


def _done(ref: weakref.ref[AsyncWork[Any]]) -> bool:
    work = ref()
    return work is None or work.done()
