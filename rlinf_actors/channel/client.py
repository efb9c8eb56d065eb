"""RemoteChannel: the requests of this process to a channel whose items are in host processes.

All requests for one key go over the connection to one replica, so the requests of one process keep their order. Nothing
here blocks. If this process does not know yet which replica has a key, it asks replica 0, and the requests for that key
wait, in order, for the answer.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from rlinf_actors import forks
from rlinf_actors.channel.answers import description
from rlinf_actors.channel.key_encoding import key_of
from rlinf_actors.channel.put_window import Put, PutWindow
from rlinf_actors.channel.request_sender import RequestSender
from rlinf_actors.channel.requests import FrameMaker, Get, PendingAnswer, Query, Request, RequestMaker, reference
from rlinf_actors.channel.results import View, Withdrawable, not_processed, refusal
from rlinf_actors.errors import (
    ChannelBrokenError,
    ChannelClosedError,
    ConnectionLostError,
    GroupClosedError,
    NodeLostError,
    RlinfActorsError,
    WorkerDiedError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.held_signals import undisturbed
from rlinf_actors.runtime.future import AsyncWork, Future
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire import frames

T = TypeVar("T")


class JoinedWork(AsyncWork[T]):
    """An AsyncWork that is done when several others, *works*, are done.

    *make* makes the result from the list of *works*, on the first thread that asks for the result. If *works* is None,
    the caller passes the list to `join` later.
    """

    _lazy = True

    _by_loop = True

    def __init__(self, what: str, works: Sequence[AsyncWork[Any]] | None, make: Callable[..., T]) -> None:
        super().__init__(what)
        self._make = make
        self._works: Sequence[AsyncWork[Any]] = ()
        if works is not None:
            self.join(works)

    def join(self, works: Sequence[AsyncWork[Any]]) -> None:
        """Set the AsyncWorks to wait for. Called at most once."""
        self._works = works
        self._left = len(works)
        for work in works:
            work._on_done(self._one_done)

    def abandon(self) -> None:
        """Log no error of this work, nor of those that it waits for: no code will ask for the result."""
        for work in (self, *self._works):
            work._seen = True

    def _one_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._all_done()

    def _all_done(self) -> None:
        self._finish()

    def _make_result(self, value: Any) -> T:
        return self._make(self._works)


class ClosingChannel(JoinedWork[None]):
    """The AsyncWork of `Channel.close`, which closes all replicas of the channel.

    If all replicas are empty, the work is done when the host processes have ended and the channel's name is free.
    Otherwise it is done when all replicas have confirmed the close.
    """

    def __init__(self, name: str, hosts_gone: Future[None]) -> None:
        super().__init__(f"close() of channel {name!r}", None, lambda works: None)
        self._hosts_gone = hosts_gone

    def _all_done(self) -> None:
        empty, failed = True, None
        for work in self._works:
            try:
                empty &= work._outcome()
            except ChannelClosedError:
                continue  # this replica was closed before, and has ended
            except Exception as error:  # noqa: BLE001 - it reaches the waiter
                failed = failed or error
        if failed is not None:
            self.reject(failed)
        elif empty:
            self._hosts_gone._on_done(lambda: self.resolve(None))
        else:
            self.resolve(None)


class DeferredQuery(JoinedWork[T]):
    """A request to all replicas of a channel that has not been found yet.

    When the channel is found, *start* sends the request.
    """

    def __init__(self, what: str, start: Callable[[Any], AsyncWork[T]]) -> None:
        super().__init__(what, None, lambda works: works[0]._outcome())
        self.start = start


class RequestBuffer:
    """Keeps requests, in order, until the host that they go to is known. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[Callable[[], Any]] = collections.deque()
        self._over = False

    def add(self, request: Request | DeferredQuery[Any]) -> bool:
        """Keep a request and return True.

        Return False if the host is known or the search has failed, so nothing is kept.
        """
        with self._lock:
            if not self._over:
                self._waiting.append(reference(request))
            return not self._over

    def flush(self, send: Callable[[Any], object], then: Callable[[], object]) -> None:
        """Pass all kept requests to *send*, in order. Then call *then*, and keep no later request. Loop thread only."""
        while True:
            with self._lock:
                if not self._waiting:
                    then()  # under the lock: no later request may be sent before
                    self._over = True
                    return
                request = self._waiting.popleft()()
            if request is None or request.done():
                continue
            send(request)
            if isinstance(request, Get) and request.error is not None:  # another thread has just cancelled it
                request._give_back(False)

    def fail(self, error: BaseException) -> None:
        """Fail all kept requests with *error*, and keep no later request."""
        with self._lock:
            self._over = True
            waiting, self._waiting = self._waiting, collections.deque()
        for waits in waiting:
            request = waits()
            if request is not None:
                request.reject(error)


_unpack = msgspec.msgpack.Decoder().decode

_channels: weakref.WeakValueDictionary[int, RemoteChannel] = weakref.WeakValueDictionary()
_finding = forks.free_in_children(threading.Lock())


def remote_channel(runtime: Runtime, group: RemoteGroup, name: str, node_rank: int, taker: str) -> RemoteChannel:
    """Return the RemoteChannel through which this process uses the channel whose hosts are *group*.

    The first call makes it. All handles of a channel share one RemoteChannel, and so share one PutWindow.
    """
    with _finding:
        channel = _channels.get(id(group))  # the channel keeps the group, so its id is not used again
        if channel is None:
            channel = _channels[id(group)] = RemoteChannel(runtime, group, name, node_rank, taker)
        return channel


class RemoteChannel(RequestMaker):
    """The requests of this process to one channel.

    Args:
        runtime: of this process.
        group: the host processes, one for each replica.
        name: name of the channel.
        node_rank: rank of the replica that gets the keys that this process uses first.
        taker: name of this process; shown as the consumer of items that this process takes.
    """

    def __init__(self, runtime: Runtime, group: RemoteGroup, name: str, node_rank: int, taker: str) -> None:
        super().__init__(runtime.io, name, taker)
        self._group = group
        self._node_rank = node_rank
        self._homes: dict[bytes, int] = {}  # replica of each key
        self._placements: dict[bytes, _KeyPlacement] = {}
        self._placing = threading.Lock()
        self._senders: dict[int, RequestSender] = {}  # by rank of the replica
        self.put_window = PutWindow()

    @property
    def starting(self) -> bool:
        """True if a host process is not running yet, as far as this process knows."""
        return not all(map(self._group.serves, range(len(self._group.peers))))

    # --- requests to all replicas ---

    def show(self, what: str = "counts") -> AsyncWork[View]:
        def merge(works: list[Query]) -> View:
            for work in works:
                work._seen = True  # the first error is raised below; the others need no log
            answers = [work._outcome() for work in works]
            return (
                any(closed for closed, _, _ in answers),
                [row for _, rows, _ in answers for row in rows],
                {key: count for _, _, dead in answers for key, count in dead.items()},
            )

        queries = self._ask_all(lambda id: frames.ChannelShow(id, what), description)
        return JoinedWork(f"a look at channel {self._name!r}", queries, merge)

    def close(self) -> AsyncWork[None]:
        closing = ClosingChannel(self._name, self._group.gone)
        earlier = [placement.home for placement in list(self._placements.values())]
        if earlier:  # puts under these keys were requested before the close, and must arrive before it
            placed: JoinedWork[Any] = JoinedWork(closing._what, earlier, list)
            placed._on_done(lambda: self._io.call(lambda: closing.join(self._ask_all(frames.ChannelClose))))
        else:
            closing.join(self._ask_all(frames.ChannelClose))
        return closing

    def _ask_all(self, frame: FrameMaker, decode: Callable[..., Any] | None = None) -> list[Query]:
        queries = []
        for rank in range(len(self._group.peers)):
            query = Query(self._name, f"a request to channel {self._name!r}", b"", frame, decode)
            query.begin(self, self._sender(rank))
            queries.append(query)
        return queries

    # --- errors ---

    def refusal(self, raised: frames.Raised, work: AsyncWork[Any], parts: Sequence[Buffer] = ()) -> Exception:
        """Return the exception for the request *work*, which the host refused with the frame *raised*.

        *parts* follow the frame; they describe the item if the item became undeliverable.
        """
        if raised.kind in ("full", "empty", "closed", "cancelled"):
            return refusal(self._name, raised.kind, work._what, work.had_s if isinstance(work, Withdrawable) else 0.0)
        if raised.kind == "undeliverable":
            return not_processed(self._name, key_of(cast(Get, work).key), *_unpack(parts[0]))
        if raised.kind == "gone":
            return ConnectionLostError(
                f"the process that holds channel {self._name!r} lost the connection to this one, or heard of its end"
            )
        return RlinfActorsError(f"channel {self._name!r}: {raised.text}")

    def gone(self, error: Exception) -> Exception:
        """Return the exception for a request whose host process has ended; *error* says how that process ended."""
        found = end_of_channel(self._name, error)
        if found is not error:
            found.__cause__ = error
        return found

    # --- sending ---

    def give_back(self, sender: RequestSender, call: int, later: bool) -> None:
        """Cancel get number *call*, and tell the host to return an item that it may have delivered for the get.

        *later* is True in a destructor, whose thread may hold any lock: the I/O thread then does the work.
        """
        if later:
            self._io.call(self.give_back, sender, call, False)
            return
        sender.peer.pending.pop(call, None)
        sender.arrived.discard(call)
        # at once: who hears of the failure may ask for the item next
        sender.send(frames.ChannelCancel(call, True), now=True)

    def _undo(self, request: Put | Get) -> None:
        """Cancel a request, whether it was sent, waits to be sent, or was only registered."""
        for rank, peer in enumerate(self._group.peers):
            for call, pending in list(peer.pending.items()):
                if pending is request or (isinstance(pending, PendingAnswer) and pending() is request):
                    self.give_back(self._sender(rank), call, False)
        if isinstance(request, Put):
            self.put_window.give_up(request)

    def _sender(self, rank: int) -> RequestSender:
        """Return the RequestSender of the replica *rank*; a new one after its connection was lost."""
        peer, sender = self._group.peers[rank], self._senders.get(rank)
        if sender is None or sender.peer is not peer:
            with self._placing:
                sender = self._senders.get(rank)
                if sender is None or sender.peer is not peer:
                    sender = self._senders[rank] = RequestSender(peer, self._io.call, self.put_window.lock)
        return sender

    def _begin(self, request: Request) -> None:
        peers = self._group.peers
        home = 0 if len(peers) == 1 else self._homes.get(request.key)
        if home is not None:
            sender = self._senders.get(home)
            request.begin(self, sender if sender is not None and sender.peer is peers[home] else self._sender(home))
        else:
            undisturbed(None, self._place, request)

    def _place(self, request: Request) -> None:
        """Ask replica 0 which replica has the key of *request*, or keep the request until the answer is there."""
        with self._placing:
            placement = self._placements.get(request.key)
            first = placement is None and request.key not in self._homes
            if first:
                placement = self._placements[request.key] = _KeyPlacement(
                    self._name, request.key, self._node_rank, len(self._group.peers)
                )
        if placement is None or not placement.add(request):
            self._begin(request)  # the replica has just become known
        elif first:
            placement.home._on_done(functools.partial(self._placed, placement))
            placement.home.begin(self, self._sender(0))

    def _placed(self, placement: _KeyPlacement) -> None:
        """Send the requests that waited for the answer of replica 0, which says which replica has their key.

        If replica 0 did not answer, fail these requests. Any thread.
        """
        error = placement.home.error
        if error is None:
            self._io.call(self._flush, placement)
            return
        placement.home._seen = True
        with self._placing:
            self._placements.pop(placement.key, None)
        placement.fail(error)

    def _flush(self, placement: _KeyPlacement) -> None:
        home: int = placement.home._outcome()

        def placed() -> None:
            with self._placing:
                self._homes[placement.key] = home
                self._placements.pop(placement.key, None)

        placement.flush(lambda request: request.begin(self, self._sender(home)), placed)


class _KeyPlacement(RequestBuffer):
    """Keeps the requests for one key until it is known which replica has the key. `home` asks replica 0 for that."""

    def __init__(self, name: str, key: bytes, node_rank: int, replicas: int) -> None:
        super().__init__()
        self.key = key
        here = min(node_rank, replicas - 1)
        self.home = Query(name, f"a request to channel {name!r}", key, lambda id: frames.ChannelWhere(id, key, here))


def end_of_channel(name: str, error: Exception) -> Exception:
    """Return the exception that users of a channel get when its host has ended; *error* says how the host ended.

    If the exit code is 0, the channel was closed and every item was taken: the exception is ChannelClosedError. After
    any other end of the host it is ChannelBrokenError. If only the connection was lost, it is ConnectionLostError. Any
    other *error* is returned unchanged.
    """
    if isinstance(error, WorkerDiedError) and error.exit_code == 0:
        return ChannelClosedError(f"channel {name!r} was closed")
    if isinstance(error, ConnectionLostError):
        return ConnectionLostError(
            f"{error}. Channel {name!r} and its items still exist: an item that no get has returned is delivered "
            "again; a put that was under way may or may not have succeeded"
        )
    if isinstance(error, (WorkerDiedError, NodeLostError)):
        return ChannelBrokenError(
            f"channel {name!r} is broken, and its items are lost: the process that held it died: {error}", peer=name
        )
    if isinstance(error, GroupClosedError) or type(error) is RlinfActorsError:  # stopped, or this process has left
        return ChannelBrokenError(f"channel {name!r} is broken, and its items are gone: {error}", peer=name)
    return error
