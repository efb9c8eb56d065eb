"""A channel as any process of the job reaches it: requests to its host, and their ends.

House rules: everything is sent by the link to one replica, so that one process's requests for a key
keep their order; a put's bytes count until the host has accepted it, and what would be too many
waits here, in order, as the producer's own objects. Nothing here blocks: requests for a key whose
replica is not known yet wait, in order, for the answer to that question.

Requests that wait until it is known where they go, and works that are made of several.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from rlinf_actors import forks
from rlinf_actors.channel.backend import View, not_processed
from rlinf_actors.channel.gets import Asked, Frame, Get, Request, Requests, opened
from rlinf_actors.channel.key_encoding import key_of
from rlinf_actors.channel.puts import Outgoing
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
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork, Future
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

T = TypeVar("T")


class Joint(AsyncWork[T]):
    """A work that is done when others are. *make* makes its value of them, on the thread that waits.

    Args:
        what: for messages.
        works: the others; None if `join` will tell.
        make: gets the works.
    """

    def __init__(self, what: str, works: Sequence[AsyncWork[Any]] | None, make: Callable[..., T]) -> None:
        super().__init__(what)
        self._make = make
        self._works: Sequence[AsyncWork[Any]] = ()
        if works is not None:
            self.join(works)

    def join(self, works: Sequence[AsyncWork[Any]]) -> None:
        """These are the others. Once."""
        self._works = works
        self._left = len(works)
        for work in works:
            work._on_done(self._one)

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._all()

    def _all(self) -> None:
        self.resolve(None)  # type: ignore[arg-type]  # `_outcome` makes the value

    def _outcome(self) -> T:
        super()._outcome()
        return self._make(self._works)


class Closing(Joint[None]):
    """A close under way, of every replica. If all are drained it ends when the hosts have: the name is free then."""

    def __init__(self, name: str, gone: Future[None]) -> None:
        super().__init__(f"close() of channel {name!r}", None, lambda works: None)
        self._gone = gone

    def _all(self) -> None:
        ended, failed = True, None
        for work in self._works:
            try:
                ended &= work._outcome()
            except ChannelClosedError:
                continue  # it is
            except Exception as error:  # noqa: BLE001 - it reaches the waiter
                failed = failed or error
        if failed is not None:
            self.reject(failed)
        elif ended:
            self._gone._on_done(lambda: self.resolve(None))
        else:
            self.resolve(None)


class Later(Joint[T]):
    """What is asked of all replicas, before the channel is found. *start* asks it."""

    def __init__(self, what: str, start: Callable[[Any], AsyncWork[T]]) -> None:
        super().__init__(what, None, lambda works: works[0]._outcome())
        self.start = start

    def held(self) -> Callable[[], Later[T]]:
        """What keeps it while it waits."""
        return lambda: self


class Kept:
    """Requests that wait, in order, until it is known where they go. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[Callable[[], Any]] = collections.deque()
        self._over = False

    def add(self, request: Request | Later[Any]) -> bool:
        """Keep it; False if that is over."""
        with self._lock:
            if not self._over:
                self._waiting.append(request.held())
            return not self._over

    def begin(self, send: Callable[[Any], object], then: Callable[[], object]) -> None:
        """Send all of them; call *then* before later ones, which are not kept any more, can be sent. Loop thread."""
        while True:
            with self._lock:
                if not self._waiting:
                    then()
                    self._over = True
                    return
                request = self._waiting.popleft()()
            if request is None or request.done():
                continue
            send(request)
            if isinstance(request, Get) and request.error is not None:  # cancelled in this moment, by another thread
                request._give_back(False)

    def fail(self, error: BaseException) -> None:
        """It will not be known."""
        with self._lock:
            self._over = True
            waiting, self._waiting = self._waiting, collections.deque()
        for held in waiting:
            request = held()
            if request is not None:
                request.reject(error)


_unpack = msgspec.msgpack.Decoder().decode

_channels: weakref.WeakValueDictionary[int, RemoteChannel] = weakref.WeakValueDictionary()
_finding = forks.free_in_children(threading.Lock())


def remote_channel(runtime: Runtime, group: RemoteGroup, name: str, node_rank: int, taker: str = "") -> RemoteChannel:
    """The one of this process for the hosts in *group*: handles share it, so that their puts are bounded together."""
    with _finding:
        channel = _channels.get(id(group))  # it keeps the group: nothing else gets that id
        if channel is None:
            channel = _channels[id(group)] = RemoteChannel(runtime, group, name, node_rank, taker)
        return channel


class RemoteChannel(Requests):
    """The requests of this process to one channel.

    Args:
        runtime: this process's.
        group: the host processes, one per replica.
        name: for messages.
        node_rank: which replica new keys should live on.
        taker: this process, for people.
    """

    def __init__(self, runtime: Runtime, group: RemoteGroup, name: str, node_rank: int, taker: str = "") -> None:
        super().__init__(runtime.io, name, taker or f"{runtime.identity}")
        self._group = group
        self._node_rank = node_rank
        self._homes: dict[bytes, int] = {}
        self._asking: dict[bytes, _Asking] = {}
        self._placing = threading.Lock()
        self._taken: collections.deque[tuple[Peer, int]] = collections.deque()
        self._taken_due = False
        self._saying = threading.Lock()
        self.outgoing = Outgoing(self)

    # --- requests to all replicas ---

    def show(self) -> AsyncWork[View]:
        def merge(works: list[Asked]) -> View:
            answers = [work._outcome() for work in works]
            rows = [row for _, found, _ in answers for row in found]
            return (
                any(closed for closed, _, _ in answers),
                rows,
                {k: n for _, _, dead in answers for k, n in dead.items()},
            )

        return Joint(
            f"a look at channel {self._name!r}",
            self._ask_all(lambda id: frames.ChannelShow(id, "counts"), lambda peer, parts: opened(parts)),
            merge,
        )

    def close(self) -> AsyncWork[None]:
        closing = Closing(self._name, self._group.gone)
        before = [asking.home for asking in list(self._asking.values())]
        if before:  # puts of these keys were asked for earlier
            placed: Joint[Any] = Joint(closing._what, before, list)
            placed._on_done(lambda: self._io.call(lambda: closing.join(self._ask_all(frames.ChannelClose))))
        else:
            closing.join(self._ask_all(frames.ChannelClose))
        return closing

    def _ask_all(self, frame: Frame, decode: Callable[..., Any] | None = None) -> list[Asked]:
        asked = []
        for peer in self._group.peers:
            work = Asked(self._name, f"a request to channel {self._name!r}", b"", frame, decode)
            work.begin(self, peer)
            asked.append(work)
        return asked

    # --- ends ---

    def refusal(self, raised: frames.Raised, work: AsyncWork[Any], parts: Sequence[Buffer] = ()) -> Exception:
        """The exception that a host's refusal stands for."""
        if raised.kind == "full":
            return asyncio.QueueFull(f"channel {self._name!r} is full")
        if raised.kind == "empty":
            return asyncio.QueueEmpty(f"channel {self._name!r} is empty")
        if raised.kind == "closed":
            return ChannelClosedError(f"channel {self._name!r} was closed")
        if raised.kind == "undeliverable":
            return not_processed(self._name, key_of(cast(Get, work).key), *_unpack(parts[0]))
        if raised.kind == "gone":
            return ConnectionLostError(
                f"channel {self._name!r} was told meanwhile that this process had ended, or lost the connection to it"
            )
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
            self._io.call(self.acknowledge)

    def acknowledge(self) -> None:
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
            self._io.call(self._forget, peer, call)
        else:
            self._forget(peer, call)

    # --- inside ---

    def ask(self, work: Get | Asked, peer: Peer) -> None:
        """Send a request to one replica. Any thread."""
        question = isinstance(work, Asked)
        if question:
            self.acknowledge()  # what was taken before is not to be seen as waiting
        now = question or not peer.pending
        call = work.call = peer.open(_Waits(self, work.held()))
        if not work.done():
            peer.send(work.frame(call), now=now)

    def _begin(self, request: Request) -> None:
        peers = self._group.peers
        if len(peers) == 1:
            request.begin(self, peers[0])
            return
        home = self._homes.get(request.key)
        if home is not None:
            request.begin(self, peers[home])
            return
        with self._placing:
            asking = self._asking.get(request.key)
            first = asking is None and request.key not in self._homes
            if first:
                asking = self._asking[request.key] = _Asking(self._name, request.key, self._node_rank, len(peers))
        if asking is None or not asking.add(request):
            self._begin(request)  # it became known in this moment
        elif first:
            asking.home._on_done(functools.partial(self._placed, asking))
            asking.home.begin(self, peers[0])

    def _placed(self, asking: _Asking) -> None:
        """It is known which replica has a key, or cannot be known. Any thread."""
        error = asking.home.error
        if error is None:
            self._io.call(self._begin_kept, asking)
            return
        asking.home._seen = True
        with self._placing:
            self._asking.pop(asking.key, None)
        asking.fail(error)

    def _begin_kept(self, asking: _Asking) -> None:
        home: int = asking.home._outcome()

        def placed() -> None:
            with self._placing:
                self._homes[asking.key] = home
                self._asking.pop(asking.key, None)

        asking.begin(lambda request: request.begin(self, self._group.peers[home]), placed)

    def _forget(self, peer: Peer, call: int) -> None:
        """Nobody waits for it any more, whatever becomes of it. Any thread."""
        peer.pending.pop(call, None)
        peer.send(frames.ChannelCancel(call, True))


class _Asking(Kept):
    """Requests of a key whose replica is being asked for. `home` is that question."""

    def __init__(self, name: str, key: bytes, node_rank: int, replicas: int) -> None:
        super().__init__()
        self.key = key
        here = min(node_rank, replicas - 1)
        self.home = Asked(name, f"a request to channel {name!r}", key, lambda id: frames.ChannelWhere(id, key, here))


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

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """The host answered. Loop thread."""
        work = self._work()
        if work is None:
            return True  # dropped: its destructor has told the host
        if type(frame) is frames.Raised:
            work.reject(self._channel.refusal(frame, work, parts))
        else:
            work.resolve(parts)
        return True

    def fail(self, error: Exception) -> None:
        """The host is gone. Any thread."""
        work = self._work()
        if work is not None:
            work.reject(self._channel.gone(error))
