"""Peer: the connection of this process to one worker, with the calls that wait for the worker's answers.

Theory of operation. `Peer.open` registers a pending call and returns its number. `send` and `post` send the message
that carries the number. Every frame with that number goes to `answer` of the pending call. A pending call ends exactly
once: by its last answer, by `forget` (the caller cancelled it), or by `fail`, when the head reports that the worker is
gone. Registrations that outlast a call do not count as pending: `listen` (frames that name a number, for messages and
channels) and `on_gone` (the worker's end). A peer with nothing pending is idle.

The link is made when it is first needed. Until then messages wait in `_backlog`, in order. `connect` opens the link,
sends a Join, and offers shared memory to a worker of the same machine. The backlog is sent when the worker has answered
that offer, because the answer decides how large parts travel. After that any thread sends without a lock.

A Peer that has failed is never used again. When the connection is lost, or the worker is restarted or dies, RemoteGroup
replaces the Peer by a new one and fails the old one, so that no call gets the answer to another call.

Threads: frames arrive on the loop thread of the I/O thread, or on a thread that waits (`net.reading`), if what they
belong to allows that (`anywhere`); each method names the threads it may be called on. No
method blocks, and no user code runs here: exceptions of workers are unpickled on the caller's thread.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from rlinf_actors import version
from rlinf_actors.errors import (
    AuthenticationError,
    ConnectionLostError,
    InternalError,
    RemoteWireError,
    RlinfActorsError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import MARK as LENT
from rlinf_actors.net.buffer_lending import Lending, own_header
from rlinf_actors.net.bulk import BulkLink
from rlinf_actors.net.link import Link, LinkOptions, Network, secret_identity
from rlinf_actors.net.relay_path import RelayPath
from rlinf_actors.runtime.future import call_all
from rlinf_actors.runtime.pending import (
    ANSWERS,
    LISTENED,
    RESULTS,
    SHARED,
    Answers,
    Listeners,
    Pending,
    Withheld,
    answer_several,
    any_thread,
    fail_unreadable,
)
from rlinf_actors.runtime.worker_ends import rejection
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import NO_PARTS, AuthenticatedParts
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint

log = logging.getLogger(__name__)

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HANDSHAKES = 5
"""Number of failed handshakes after which a process that has never answered is taken for a foreign process."""
PREDECESSORS = 100
"""Most earlier links that a Join names: a worker takes no long Join."""
_links = itertools.count(1)
new_call = itertools.count(1).__next__
"""Return the next call number. Numbers are unique in the process, so one header serves every rank of a group call."""

First = Callable[[], "tuple[bytes, Sequence[Buffer]] | None"]
"""Returns the first message of a link, an encoded header and parts; None for no message."""


class Peer:
    """The connection of this process to one worker, for calls, messages and channel requests.

    Args:
        network: makes the link.
        identity: identity of this process, ``role:incarnation`` (`own_identity`); each link appends a number.
        name: name of the worker, ``group:rank``.
        rank: rank of the worker.
        node: node name of the worker, for error messages.
        needed: called once with this Peer, on any thread, when the first message waits for `connect`.
        lost: called on the loop thread with this Peer, when the connection was lost and re-established.
        me: worker id of this process, "" in a driver.
        waits: the Peer adds itself when this process may begin to wait for the worker; None to keep no such set.

    Attributes:
        worker_id: id of the worker, "" while unknown.
        succeeds: identities of the earlier links to this worker whose connections were lost; the Join names them.
        wanted: True if the link is needed: a message was sent, or this Peer replaces one whose connection was lost.
        received: number of messages that have arrived from the worker.
        protocol: newest protocol of the worker, as it says to the process that constructs it; else 0.
        relay: the relay by which the link goes; None if it goes directly.
        sibling: the worker, for workers of its node; None if it is on this machine, or not connected by its group.
    """

    def __init__(
        self,
        network: Network,
        identity: str,
        name: str,
        rank: int,
        node: str,
        needed: Callable[[Peer], object] = lambda peer: None,
        lost: Callable[[Peer], None] = lambda peer: None,
        me: str = "",
        waits: set[Peer] | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.node = node
        self.worker_id, self.link_identity = "", b""
        self.succeeds: list[bytes] = []
        self.error: Exception | None = None
        self.sibling: frames.Sibling | None = None
        self.relay: RelayPath | None = None
        self.pending: dict[int, Pending] = {}
        self.wanted, self.received = False, 0
        self._carries = 0  # entries of `pending` that are no calls
        self._withheld = Withheld()
        self._handshakes_failed = 0
        self._handling: frames.AnyFrame | None = None
        self._needed = needed
        self._lost = lost
        self._me = me
        self._waits: set[Peer] = set() if waits is None else waits
        self._listeners = Listeners()
        self._watchers: list[Callable[[Exception], object]] = []
        self._network, self.soon = network, network.soon
        self.own_identity = identity
        self._lock = threading.Lock()
        self._backlog: list[tuple[bytes, Sequence[Buffer], bool]] = []
        self._joined: Link | None = None  # the link, which may not be ready
        self._link: Link | None = None  # the link, once the backlog was sent
        self._queue: Callable[[frames.Call, Sequence[Buffer]], None] | None = None  # of a link that joins calls
        self._first: First = lambda: None
        self._lending = Lending(network.memory, network.soon, self._send_at_once, name)
        self._bulk: BulkLink | None = None  # between nodes

    # --- the link ---

    @property
    def connected(self) -> bool:
        """True if `connect` has made the link. Messages may still wait in the backlog until the link is ready."""
        return self._joined is not None

    @property
    def awaited(self) -> bool:
        """True if this process waits for the worker: it has a pending call, a listener or an `on_gone` callback."""
        waits = len(self.pending) > self._carries or self._listeners or self._watchers
        return self.error is None and bool(waits)

    def connect(self, endpoint: Endpoint, host: str, token: str, first: First, relay: RelayPath | None = None) -> None:
        """Make the link to the worker, and send the backlog when it is ready. On failure, fail the Peer. Loop thread.

        Args:
            endpoint: endpoint where the worker listens.
            host: host key of this process; if the endpoint has the same key, the link is a unix socket, else TCP.
            token: token of the job.
            first: called when the link is ready; returns the message to send before all others, or None.
            relay: a relay on the worker's node, by which the link goes; None for a link of its own.
        """
        address = endpoint.ipc if endpoint.ipc and endpoint.host == host else endpoint.tcp
        if not address:
            self.fail(
                RlinfActorsError(
                    f"{self.name} on {self.node} listens on a unix socket only, since its node is on loopback, and "
                    "this process is on another machine or another user's: let the head listen on the network"
                )
            )
            return
        identity = secret_identity(f"{self.own_identity}#{next(_links)}")
        try:
            make, there = (self._network.link, address) if relay is None else (relay.link, endpoint.ipc)
            link = make(
                there, identity, self._received, LinkOptions(
                token=token, to=self.name, on_rejected=self._rejected, on_reset=partial(self._lost, self),
                on_failed=self._handler_failed, on_any_thread=self._received_anywhere),
            )  # fmt: skip
        except (OSError, RlinfActorsError) as error:  # no descriptor left, or an address that may not be used
            self.fail(RlinfActorsError(f"cannot connect to {self.name} on {self.node}: {error}"))
            return
        self.link_identity = identity
        join = frames.Join(
            PROTOCOL, version.VERSION, PYTHON, self.own_identity, token, self.worker_id, self.succeeds, self._me,
            sys.byteorder, bulk=self._may_use_bulk(address, endpoint),
        )  # fmt: skip
        link.send(frames.encode(join), now=True)  # alone: what follows may be longer than a stranger's may be
        self._joined, self.relay = link, relay
        self._first = first
        if address != endpoint.ipc or not self._lending.offer():
            self._send_backlog()

    def _send_backlog(self) -> None:
        link = self._joined
        if link is None or self._link is not None:
            return  # closed meanwhile
        message, self._first = self._first(), lambda: None
        with self._lock:
            if message is not None:
                self._backlog.insert(0, (*message, False))
            for header, parts, alone in self._backlog:
                link.send(*self._pack(header, parts, alone))
            self._backlog.clear()
            self._queue = getattr(link, "queue", None)
            self._link = link  # last: a thread that sees the link sends without the lock, and must not overtake

    def _may_use_bulk(self, address: str, endpoint: Endpoint) -> bool:
        """Prepare bulk streams if the link is TCP and both processes have them. Return True if so."""
        transport = self._network.bulk
        if transport is None or not transport.available or not endpoint.bulk or address != endpoint.tcp:
            return False
        host = endpoint.tcp.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        failed = partial(self._handler_failed, b"")
        self._bulk = BulkLink(transport, self.name, self._say, self._arrived, failed, (host, endpoint.bulk))
        return True

    def succeed(self, old: Peer) -> None:
        """Replace *old*, whose connection to the same worker process was lost. The Join tells the worker of it."""
        self.worker_id, self.wanted = old.worker_id, True
        self._lending.succeed(old._lending)
        # a link that brought nothing may never have joined: the worker may not know that its predecessors are lost
        self.succeeds = [*([] if old.received else old.succeeds[1 - PREDECESSORS :]), old.link_identity]

    def close(self) -> None:
        """Close the link. Loop thread; calling twice is harmless."""
        with self._lock:
            link, self._joined, self._link, self._queue = self._joined, None, None, None
        self._end_parts()
        if link is not None:
            link.close()

    def _end_parts(self) -> None:
        self._lending.close(lost=isinstance(self.error, ConnectionLostError))
        if self._bulk is not None:
            self._bulk.close()

    # --- calls ---

    def open(self, pending: Pending, call: int = 0) -> int:
        """Register a pending call, and return the number that the call's message must have. Any thread.

        If this Peer has failed, the call fails at once.

        Args:
            pending: gets the answers to the call, or the error.
            call: the number if the caller has one, such as for a call to several ranks; 0 for a new number.
        """
        call = call or new_call()
        self.pending[call] = pending
        self._waits.add(self)  # after `pending` has it: `RemoteGroup.awaited` removes it before it looks
        if self.error is not None and self.pending.pop(call, None) is not None:
            pending.fail(self.error)
        return call

    def carry(self, number: int, path: RelayPath) -> None:
        """Give the frames that carry *number*, and the end of this Peer, to *path*. This Peer is not awaited for it."""
        self._carries, self.pending[number] = 1, path
        if self.error is not None and self.pending.pop(number, None) is not None:
            path.fail(self.error)

    def exception(self, frame: frames.Raised, parts: AuthenticatedParts) -> Exception:
        """Unpickle the exception that the worker raised. Not on the loop thread, because this runs user code."""
        return failure.decode(frame, parts, worker=self.name, rank=self.rank, node=self.node)

    def forget(self, call: int) -> None:
        """Cancel the call with this number: ignore its answers, and ask the worker to cancel it. Any thread."""
        if self.pending.pop(call, None) is not None:
            self.send(frames.Cancel(call))

    def listen(self, listener: Callable[[frames.AnyFrame], object], *, anywhere: bool = False) -> int:
        """Choose a new number and return it. Call *listener* with each frame of `LISTENED` that carries the number.

        Messages and channels use this for answers that come after a call. The listener is removed by `ignore`, or when
        this Peer fails. *anywhere*: True if any thread may call it, one frame at a time, and not the loop thread alone.
        """
        number = new_call()
        self._listeners.add(number, listener, anywhere)
        self._waits.add(self)
        return number

    def ignore(self, number: int) -> None:
        self._listeners.remove(number)

    def on_gone(self, callback: Callable[[Exception], object]) -> None:
        """Call *callback* with the error when this Peer fails; at once if it has already failed. Any thread."""
        with self._lock:
            if self.error is None:
                self._watchers.append(callback)
                self._waits.add(self)
                return
        callback(self.error)

    def send(
        self,
        frame: frames.AnyFrame,
        parts: Sequence[Buffer] = (),
        *,
        now: bool = False,
        alone: bool = True,
        give: bool = False,
    ) -> None:
        """Send a message to the worker; until the link is ready, keep it in the backlog. Any thread.

        If this Peer has failed, the message is dropped.

        Args:
            frame, parts: the message.
            now: True to write to the socket on this thread if no message waits before this one, which is faster.
            alone: True if the parts are sent to no other worker. Parts in shared memory may then be writable there.
            give: True to hand the parts over, so that the worker can keep them without a copy (`net.further_arenas`).
        """
        self.post(frames.encode(frame), parts, now=now, alone=alone, give=give)

    def post(
        self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False, alone: bool = True, give: bool = False
    ) -> None:
        """Send a message like `send`, with an encoded header: a call to several ranks is encoded once. Any thread."""
        link = self._link
        if link is None:
            with self._lock:
                link = self._link
                if link is None:
                    if self.error is not None:
                        return
                    self._backlog.append((header, parts, alone))
                    first, self.wanted = not self.wanted, True
            if link is None:
                if first:
                    self._needed(self)
                return
        if len(parts) > 1:  # large parts come behind the first
            header, parts = self._pack(header, parts, alone, give)
        link.send(header, parts, now=now)

    def post_call(self, pending: Pending, call: frames.Call, parts: Sequence[Buffer]) -> None:
        """Open and send a call; with others if some are under way: calls that wait are one frame. Any thread."""
        idle = not self.pending
        self.pending[call.id] = pending
        self._waits.add(self)
        queue = self._queue
        if self.error is not None and self.pending.pop(call.id, None) is not None:
            pending.fail(self.error)
        elif queue is not None and not idle and len(parts) < 2:
            queue(call, parts)
        else:
            self.post(frames.encode(call), parts, now=idle)

    @property
    def lending(self) -> Lending:
        """Lends large parts to the worker in shared memory, once the worker can open that."""
        return self._lending

    def _pack(
        self, header: bytes, parts: Sequence[Buffer], alone: bool, give: bool = False
    ) -> tuple[bytes, Sequence[Buffer]]:
        if self._bulk is not None:
            return self._bulk.pack(header, parts)
        return self._lending.pack(header, parts, alone=alone, give=give)

    def fail(self, error: Exception) -> None:
        """Fail every pending and later call on this Peer with *error*, because the worker cannot answer. Any thread."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._backlog.clear()
            watchers, self._watchers = self._watchers, []
        self._withheld.end()
        self._listeners.clear()
        self._end_parts()
        while self.pending:
            try:
                _, pending = self.pending.popitem()
            except KeyError:
                break  # another thread took the last one
            call_all([pending.fail], self.error)
        call_all(watchers, self.error)

    # --- the owner's side ---

    def constructing(self, create: int) -> None:
        """Until `release`, withhold exceptions that answer calls (`Withheld`). Loop thread.

        *create* is the call number of the Create, the message that lets the worker construct its object.
        """
        self._withheld.create = create

    def release(self) -> None:
        """End what `constructing` began: fail the calls whose exceptions were withheld. Loop thread."""
        for frame, parts in self._withheld.end():
            self._answered(frame, parts)

    # --- what arrives; one message at a time, on the loop thread if not said otherwise ---

    def _received_anywhere(self, _peer: bytes, header: bytes, parts: list[Buffer]) -> bool:
        """Handle a message on any thread and return True, if its call or listener allows that; else return False."""
        if self._bulk is not None:
            return False  # it may have to wait for parts that come beside it
        lent = header[:1] == LENT
        try:
            frame = frames.decode(own_header(header) if lent else header)
        except RemoteWireError:
            return False
        if isinstance(frame, ANSWERS):
            safe = getattr(self.pending.get(frame.id), "anywhere", False) and not self._withheld.create
        elif isinstance(frame, LISTENED):
            safe = self._listeners.anywhere(frame.id)
        else:
            safe = type(frame) is frames.Dropped or (any_thread(self.pending, frame) and not self._withheld.create)
        if not safe:
            return False
        self._handling = frame
        if lent:
            try:
                self._lending.unpack(header, parts)
            except RemoteWireError:
                return False  # the loop drops it, and says so
        self.received += 1
        if isinstance(frame, ANSWERS):
            self._answered(frame, AuthenticatedParts(parts) if parts else NO_PARTS)
        else:
            self._arrived(header, parts, frame)
        return True

    def _received(self, _peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        self.received += 1
        if self._bulk is None or not self._bulk.takes(header, parts):
            self._arrived(header, parts)

    def _arrived(self, header: bytes, parts: list[Buffer], frame: frames.AnyFrame | None = None) -> None:
        """Handle a message. *frame* is its header if that is decoded, and what is lent with it is unpacked."""
        if frame is None:
            self._handling = None
            try:
                frame = self._handling = frames.decode(self._lending.unpack(header, parts) if parts else header)
            except RemoteWireError as error:
                log.warning("dropped a message from %s on %s: %s", self.name, self.node, error)
                fail_unreadable(self.pending, header, error)
                return
        if isinstance(frame, ANSWERS):
            answer = AuthenticatedParts(parts) if parts else NO_PARTS  # from the worker that the head named
            if not self._withheld.create or frame.id not in self.pending or not self._withheld.keeps(frame, answer):
                self._answered(frame, answer)
        elif isinstance(frame, (frames.Oks, *SHARED)):
            answer_several(self.pending, frame, parts)
        elif isinstance(frame, LISTENED):
            self._listeners.hear(frame.id, frame)
        elif isinstance(frame, frames.WantParts):
            wanted = getattr(self.pending.get(frame.id), "parts_wanted", None)
            if wanted is not None:
                wanted()
        elif isinstance(frame, frames.Dropped):
            self._lending.dropped(frame)
        elif isinstance(frame, frames.Memory):
            self._lending.heard(frame, parts)
            self._send_backlog()
        elif isinstance(frame, (frames.Shown, frames.Opened, frames.Hidden)):
            self._lending.heard_further(frame, parts)
        elif isinstance(frame, frames.Rejected):
            self.fail(rejection(frame, self.name, self.node))
        else:
            log.warning("dropped a %s from %s on %s", type(frame).__name__, self.name, self.node)

    def _answered(self, frame: Answers, parts: AuthenticatedParts) -> None:
        pending = self.pending.get(frame.id)
        if pending is not None and pending.answer(frame, parts):
            self.pending.pop(frame.id, None)

    def _rejected(self, why: str, for_good: bool) -> None:
        """Handle a failed handshake. Fail this Peer after HANDSHAKES failures, or if the link gives up (*for_good*).

        One failure is no proof of a foreign process, because a worker that ends during a handshake causes it too.
        """
        self._handshakes_failed += 1
        if for_good or (self._handshakes_failed >= HANDSHAKES and not self.received):
            self.fail(AuthenticationError(f"{self.name} on {self.node} refused: {why}"))

    def _handler_failed(self, _peer: bytes, error: InternalError) -> None:
        """A message could not be handled: fail its calls with *error*, or this whole Peer if it belongs to none."""
        frame = self._handling
        if not isinstance(frame, RESULTS):
            self.fail(error)
            return
        found = [self.pending.pop(id, None) for id in (frame.ids if isinstance(frame, frames.Oks) else (frame.id,))]
        call_all([pending.fail for pending in found if pending is not None], error)

    def _send_at_once(self, frame: frames.AnyFrame, parts: Sequence[Buffer] = ()) -> None:
        """Send a frame about shared memory without waiting until the link is ready. Loop thread."""
        self._say(frames.encode(frame), parts)

    def _say(self, header: bytes, parts: Sequence[Buffer]) -> None:
        if self._joined is not None:
            self._joined.send(header, parts)
