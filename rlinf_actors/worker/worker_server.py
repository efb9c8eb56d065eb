"""The worker's listening side: who may talk to it, and their calls on the way to the executor.

I/O thread, unless a method says otherwise.

Ends of peers that no pidfd of ours can watch, on other machines or in other containers: the head tells them.

House rule: only who is served a stream, or has many peers, costs a session with the head; most workers never need one.

Peers that a socket rejects are counted and written to the worker's own log.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_actors import procfs, version
from rlinf_actors.errors import InternalError, RemoteWireError, RlinfActorsError
from rlinf_actors.exhaustion import explain
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import Lending
from rlinf_actors.net.link import Network, peer_name
from rlinf_actors.net.log_throttle import LogThrottle
from rlinf_actors.net.loop import Tasks
from rlinf_actors.runtime.future import call_all
from rlinf_actors.security.members import Gate
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import AuthenticatedParts, Copy
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL, agreed, spoken, what_to_upgrade
from rlinf_actors.worker.executors import Activity, Executor
from rlinf_actors.worker.invocation import Invocation

Watch = Callable[[str, Callable[[], None]], Callable[[], None]]
"""runtime.watched.watch: calls back when that client has ended; returns what ends the watch."""
MANY = 64
"""Clients that have joined and whose ends no session tells: beyond these there may be dead ones, so one is made."""


class RemotePeers:
    """Those whose ends we want to hear of. I/O thread.

    Args:
        watch: has the head tell us of an end, as long as there is a session with it.
        connected: makes the session; raises RlinfActorsError when the head does not answer.
        on_gone: called with each link of a client that has ended.
    """

    def __init__(
        self, watch: Watch, connected: Callable[[], Awaitable[object]], on_gone: Callable[[bytes], None]
    ) -> None:
        self._watch = watch
        self._connected = connected
        self._on_gone = on_gone
        self._links: dict[str, set[bytes]] = {}
        self._unwatch: dict[str, Callable[[], None]] = {}
        self._tasks = Tasks()
        self._connecting: asyncio.Task[None] | None = None
        self._in_session = False

    def met(self, peer: bytes) -> None:
        """This peer has joined. Its end is told if there is a session with the head, or once there is one."""
        client = client_of(peer)
        links = self._links.setdefault(client, set())
        if not links:
            self._unwatch[client] = self._watch(client, lambda: self._gone(client))
        links.add(peer)
        if len(self._links) > MANY:
            self._need_session()

    def serve(self, peer: bytes) -> None:
        """This peer is served a stream, which would wait for its credit for ever."""
        self.met(peer)
        self._need_session()

    def ended(self, peer: bytes) -> None:
        """This peer has ended, or its link has, as something else than the head told."""
        client = client_of(peer)
        links = self._links.get(client)
        if links is None:
            return
        links.discard(peer)
        if not links:
            del self._links[client]
            self._unwatch.pop(client)()

    def _need_session(self) -> None:
        if not self._in_session and (self._connecting is None or self._connecting.done()):
            self._connecting = self._tasks.start(self._connect(), "watching peers on other machines")

    async def _connect(self) -> None:
        try:
            await self._connected()
            self._in_session = True
        except RlinfActorsError as error:
            log.warning("ends of peers on other machines are not noticed: %s", error)

    def _gone(self, client: str) -> None:
        self._unwatch.pop(client, None)
        for peer in self._links.pop(client, ()):
            self._on_gone(peer)


def client_of(peer: bytes) -> str:
    """The incarnation of the client that a link is from: ``role:incarnation#link``."""
    return peer.decode(errors="replace").partition("#")[0].rpartition(":")[2]


log = logging.getLogger(__name__)

LinkLost = Callable[[bytes, str], object]
"""(identity of the link, id of the worker at its other end or ""), on the I/O thread."""
Handler = Callable[[bytes, Any, AuthenticatedParts], None]
"""(peer, a frame of the kinds that it serves, parts), on the I/O thread."""


_CHANNEL_REQUESTS = (
    frames.ChannelPut,
    frames.ChannelGet,
    frames.ChannelBatch,
    frames.ChannelLook,
    frames.ChannelShow,
    frames.ChannelClose,
    frames.ChannelWhere,
    frames.ChannelRelease,
)

NAME_CHARS = 60
"""Most characters of a rejected peer's name in the log."""
LATE_S = 10.0
"""Seconds after the end of a peer's process in which what it sent before is still taken."""
REMEMBERED = 1024
"""How many calls that ended are known, so that one that comes twice runs once: connections repeat nothing, and what
injects such a fault does it close by. 150 KiB."""


@dataclass(frozen=True)
class Creation:
    """A Create that arrived, for the main thread."""

    peer: bytes
    frame: frames.Create
    parts: AuthenticatedParts


class WorkerServer:
    """Accepts links of members of the job and takes their calls.

    Args:
        network: to listen with.
        worker_id: this worker's id; a Join for another one came to a recycled address.
        name: for messages.
        token: of the job.
        on_closed: called (by the executor) when the instance's `_close` has returned.
        gate: whom it lets in over TCP where the cluster has keys.
        rejected: counts the links that may not join.

    Attributes:
        far: who is told of drivers, and of peers that are served streams and are not on this machine; if set.
    """

    def __init__(
        self,
        network: Network,
        worker_id: str,
        name: str,
        token: str,
        on_closed: Callable[[], None] = lambda: None,
        gate: Gate | None = None,
        rejected: RejectedPeers | None = None,
    ) -> None:
        self.rejected = rejected or RejectedPeers()
        self._listener = network.listener(self._received, gate=gate, on_failed=self._failed)
        self._copy: Copy = bytes if network.memory is None else network.memory.copy
        self._worker_id = worker_id
        self._name = name
        self._token = token
        self._on_closed = on_closed
        self._network = network
        self._dropped = LogThrottle()
        self._members: dict[bytes, Lending] = {}
        self._workers: dict[bytes, str] = {}  # ids of the members that are workers
        self._handling: frames.AnyFrame | None = None
        self._calls: dict[tuple[bytes, int], Invocation] = {}
        self._newest: dict[bytes, int] = {}
        self._taken: collections.deque[tuple[bytes, int]] = collections.deque(maxlen=REMEMBERED)
        self._executor: Executor | None = None
        self._constructing = 0.0
        self._held: list[Invocation] = []
        self._asking: list[tuple[bytes, int]] = []  # who is to be told when the class is constructed
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._handlers: dict[type[frames.Frame], Handler] = {}
        self._near: set[bytes] = set()
        self._on_link_lost: list[LinkLost] = []
        self._on_forgotten: list[Callable[[bytes], object]] = []
        self.far: RemotePeers | None = None
        self._early: list[tuple[bytes, frames.AnyFrame, AuthenticatedParts]] = []
        self.creations: queue.SimpleQueue[Creation] = queue.SimpleQueue()

    def bind(self, endpoint: str) -> str:
        """Listen; returns the endpoint with the actual port."""
        return self._listener.bind(endpoint)

    def constructing(self) -> None:
        """The user's constructor begins. Main thread."""
        self._constructing = time.perf_counter()

    def activity(self) -> Activity:
        """What the user's code is doing. Any thread."""
        if self._executor is not None:
            return self._executor.activity()
        return Activity("__init__" if self._constructing else "", self._constructing, len(self._held))

    def open(self, executor: Executor) -> None:
        """The class is constructed: let the calls through, those that waited first. Main thread."""
        with self._lock:
            for invocation in self._held:
                executor.submit(invocation)
            self._held.clear()
            self._executor = executor
            asking, self._asking = self._asking, []
        for peer, id in asking:
            self.answer(peer, frames.Runs(id, ""))

    def serve(self, kinds: Iterable[type[frames.Frame]], handler: Handler) -> None:
        """Give frames of these kinds to *handler*, those first that came before it."""
        self._handlers.update(dict.fromkeys(kinds, handler))
        early, self._early = self._early, []
        for peer, frame, parts in early:
            self._other(peer, frame, parts)

    def on_link_lost(self, callback: LinkLost) -> None:
        """Call *callback* when the connection of a member's link was lost: what came by it may have gaps."""
        self._on_link_lost.append(callback)

    def on_forgotten(self, callback: Callable[[bytes], object]) -> None:
        """Call *callback* with a member's link when its process has ended and its last messages have been taken."""
        self._on_forgotten.append(callback)

    def send(self, peer: bytes, frame: frames.AnyFrame, parts: Sequence[Buffer] = (), *, alone: bool = True) -> None:
        """Send to a member, together with what else goes there in this turn of the loop. Any thread.

        Args:
            peer: the member.
            frame, parts: the message.
            alone: whether nobody else will be sent these parts; else what it changes in them is its own.
        """
        self._send(peer, frame, parts, False, alone)

    def close(self, linger_ms: int) -> None:
        """Listen no more; answers that are not read after *linger_ms* milliseconds are dropped. I/O thread."""
        self._listener.close(linger_ms)

    def refuse(self, error: BaseException) -> None:
        """The class could not be constructed: every call fails with that. Main thread."""
        self._constructing = 0.0
        with self._lock:
            self._failure = error
            held, self._held = self._held, []
            asking, self._asking = self._asking, []
        for invocation in held:
            invocation.fail(error)
        for peer, id in asking:
            self.answer(peer, *failure.encode(id, error))

    def answer(self, peer: bytes, frame: frames.AnyFrame, parts: Sequence[Buffer] = ()) -> None:
        """Send an answer that belongs to no invocation. Any thread."""
        self._send(peer, frame, parts, True)

    def _send(
        self, peer: bytes, frame: frames.AnyFrame, parts: Sequence[Buffer], now: bool, alone: bool = True
    ) -> None:
        header = frames.encode(frame)
        if len(parts) > 1:  # large parts come behind the first
            lending = self._members.get(peer)
            if lending is not None:
                header, parts = lending.pack(header, parts, alone=alone)
        self._listener.send(peer, header, parts, now=now)

    def _reply(self, invocation: Invocation, frame: frames.AnyFrame, parts: Sequence[Buffer]) -> None:
        """An invocation's answer. Executor's thread."""
        if type(frame) is not frames.Item:
            self._calls.pop((invocation.peer, invocation.id), None)
            if type(frame) is frames.Ok and invocation.method == "_close":
                self._on_closed()
        now = self._executor is None or self._executor.idle()
        self._send(invocation.peer, frame, parts, now)

    def _received(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        lending = self._members.get(peer)
        self._handling = None
        try:
            frame = self._handling = frames.decode(header if lending is None else lending.unpack(header, parts))
        except RemoteWireError as error:
            if self._dropped.note():
                whose = peer_name(peer)
                log.warning("dropped a message from %.60r (%d dropped by now): %s", whose, self._dropped.count, error)
            return
        if lending is None:
            self._join(peer, frame)
        else:
            self._said(peer, lending, frame, AuthenticatedParts(parts))  # it has joined: a member of this job

    def _failed(self, peer: bytes, error: InternalError) -> None:
        """Fail what a message belonged to whose handler raised.

        A call, a stream or a request to a channel gets the error as its answer. Where nothing waits for an answer, one
        of several messages is missing now: the link is of no use any more, and both ends hear that.
        """
        frame = self._handling
        if isinstance(frame, (frames.Call, frames.Stream, frames.Cancel, frames.Credit, frames.Create)):
            invocation = self._calls.pop((peer, frame.id), None)
            if invocation is not None:
                invocation.cancel()
            self.answer(peer, *failure.encode(frame.id, error))
        elif isinstance(frame, _CHANNEL_REQUESTS):
            self.answer(peer, frames.Raised(frame.id, "internal", type(error).__name__, str(error)))
        else:
            self.answer(peer, frames.Rejected("internal", str(error)))
            if peer in self._members:
                self._link_lost(peer, self._workers.get(peer, ""))

    def _said(self, peer: bytes, lending: Lending, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if type(frame) in self._handlers:
            self._handlers[type(frame)](peer, frame, parts)
        elif type(frame) is frames.Call:
            self._take(Invocation(peer, frame.id, frame.method, parts, self._reply, self._copy, frame.deadline_s, 0))
        elif type(frame) is frames.Stream:
            window = max(1, frame.window)
            if self.far is not None and peer not in self._near:
                self.far.serve(peer)
            self._take(Invocation(peer, frame.id, frame.method, parts, self._reply, self._copy, 0.0, window))
        elif type(frame) is frames.Cancel:
            invocation = self._calls.pop((peer, frame.id), None)
            if invocation is not None:
                invocation.cancel()
        elif type(frame) is frames.Credit:
            invocation = self._calls.get((peer, frame.id))
            if invocation is not None:
                invocation.credit(frame.n)
        elif type(frame) is frames.WhatRuns and frame.constructed:
            self._say_when_constructed(peer, frame.id)
        elif type(frame) is frames.WhatRuns:
            doing = self.activity()
            seconds = max(0.0, time.perf_counter() - doing.since) if doing.method else 0.0
            runs = frames.Runs(frame.id, doing.method[:NAME_CHARS], seconds, doing.waiting, PROTOCOL)
            self._send(peer, runs, (), True)
        elif type(frame) is frames.Dropped:
            lending.dropped(frame)
        elif type(frame) is frames.Memory:
            lending.heard(frame)
            if frame.pid:
                self._watch(peer, frame.pid)
        elif type(frame) is frames.Create:
            self.creations.put(Creation(peer, frame, parts))
        else:
            self._other(peer, frame, parts)

    def _say_when_constructed(self, peer: bytes, id: int) -> None:
        with self._lock:
            if self._executor is None and self._failure is None:
                self._asking.append((peer, id))
                return
        if self._failure is not None:
            self.answer(peer, *failure.encode(id, self._failure))
        else:
            self.answer(peer, frames.Runs(id, ""))

    def _other(self, peer: bytes, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        handler = self._handlers.get(type(frame))
        if handler is not None:
            handler(peer, frame, parts)
        elif self._executor is None and self._failure is None:
            self._early.append((peer, frame, parts))  # the class is being constructed, and may serve them
        else:
            log.warning("dropped a %s from %r", type(frame).__name__, peer_name(peer))

    def _watch(self, peer: bytes, pid: int) -> None:
        """Notice the end of a peer on this machine, which may hold parts of our memory and wait for answers."""
        try:
            fd = procfs.pidfd_of(pid)
        except ProcessLookupError:  # it has ended already
            self.peer_gone(peer)
            return
        except OSError as error:  # it lives, as far as we know: its end is told as that of one on another machine
            log.warning("the head alone tells when %.60r ends: %s", peer_name(peer), explain(error))
            if self.far is not None:
                self.far.serve(peer)
            return
        loop = asyncio.get_running_loop()
        self._near.add(peer)

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self.peer_gone(peer)

        loop.add_reader(fd, ended)

    def peer_gone(self, peer: bytes) -> None:
        """A member's process has ended."""
        if self.far is not None:
            self.far.ended(peer)
        lending = self._members.get(peer)
        if lending is not None:
            lending.borrower_gone()
        for key, invocation in list(self._calls.items()):
            if key[0] == peer and invocation.window:  # a stream would wait for credit; calls need nobody
                self._calls.pop(key, None)
                invocation.cancel()
        # its last messages may still be in the socket, and lie in its memory
        asyncio.get_running_loop().call_later(LATE_S, self._forget, peer)

    def _forget(self, peer: bytes) -> None:
        self._newest.pop(peer, None)
        self._workers.pop(peer, None)
        self._near.discard(peer)
        lending = self._members.pop(peer, None)
        if lending is not None:
            lending.close()
        call_all(self._on_forgotten, peer)

    def _take(self, invocation: Invocation) -> None:
        key = (invocation.peer, invocation.id)
        if invocation.id > self._newest.get(invocation.peer, 0):
            self._newest[invocation.peer] = invocation.id
        elif key in self._calls or key in self._taken:  # threads of one process may send theirs out of order
            log.warning("refused call %d of %r: it came before", invocation.id, peer_name(invocation.peer))
            return  # at most once: the first is, or will be, answered
        self._taken.append(key)
        self._calls[key] = invocation
        executor = self._executor
        if executor is None:
            with self._lock:
                if self._executor is None and self._failure is None:
                    self._held.append(invocation)
                    return
            if self._failure is not None:
                invocation.fail(self._failure)
                return
            executor = self._executor
            assert executor is not None
        executor.submit(invocation)

    def _join(self, peer: bytes, frame: frames.AnyFrame) -> None:
        if not isinstance(frame, frames.Join):
            if self._dropped.note():
                what, whose, count = type(frame).__name__, peer_name(peer), self._dropped.count
                log.warning("dropped a %s from %.60r, which has not joined (%d dropped by now)", what, whose, count)
        elif not agreed(frame.protocol, frame.newest):
            theirs, ours = spoken(frame.protocol, frame.newest), spoken(OLDEST, PROTOCOL)
            advice = what_to_upgrade(frame.protocol, frame.name, f"the node of {self._name}")
            text = (
                f"{frame.name} is rlinf-actors {frame.version} ({theirs}), {self._name} is {version.VERSION} ({ours}): "
                f"{advice}"
            )
            self._reject(peer, "protocol", text, f"it speaks {theirs}, not {ours}")
        elif not hmac.compare_digest(frame.token.encode(), self._token.encode()):
            text = f"{frame.name} is not a member of the job of {self._name}"
            self._reject(peer, "authentication", text, "it does not have its job's token")
        elif frame.worker_id != self._worker_id:
            text = f"{frame.name} looked for another worker at this address"
            self._reject(peer, "authentication", text, "it looked for another worker")
        elif frame.byte_order != sys.byteorder:
            text = (
                f"{frame.name} is on a {frame.byte_order[:6]}-endian machine, {self._name} on a {sys.byteorder}-endian "
                "one: tensors travel as they lie in memory, so all processes of a job need machines of one byte order"
            )
            self._reject(peer, "protocol", text, f"its machine is {frame.byte_order[:6]}-endian")
        else:
            self._members[peer] = Lending(
                self._network.memory, self._network.soon, lambda frame: self._send(peer, frame, (), False), frame.name
            )
            if frame.worker:
                self._workers[peer] = frame.worker
            if self.far is not None:
                self.far.met(peer)
            for link in frame.succeeds:
                if client_of(link) == client_of(peer):
                    self._link_lost(link, frame.worker)

    def _reject(self, peer: bytes, kind: str, text: str, why: str) -> None:
        self.rejected.add(f"the link {peer_name(peer)[:NAME_CHARS]!r}: {why}")
        self.answer(peer, frames.Rejected(kind, text))

    def _link_lost(self, link: bytes, worker: str) -> None:
        """Nobody waits at its other end any more."""
        log.warning("the connection of %r was lost, and there is another", peer_name(link))
        self.peer_gone(link)
        call_all(self._on_link_lost, link, worker)


class RejectedPeers:
    """Counts peers that the sockets of this worker reject, and writes them to the worker's log. Loop thread.

    Attributes:
        count: rejected connections and links so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, text: str, times: int = 1) -> None:
        """Count *times* rejections. Log the 1st, the 10th, the 100th, ...: a flood must not fill the log.

        Args:
            text: follows "refused" in the log line: the peer, and the reason.
            times: how many peers were rejected.
        """
        digits, self.count = len(str(self.count)) if self.count else 0, self.count + times
        if len(str(self.count)) > digits:
            log.warning("refused %s (%d so far)", text, self.count)
