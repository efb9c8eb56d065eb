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

Threads: frames arrive on the loop thread of the I/O thread; each method names the threads it may be called on. No
method blocks, and no user code runs here: exceptions of workers are unpickled on the caller's thread.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, Union

import msgspec

from rlinf_actors import version
from rlinf_actors.errors import (
    AuthenticationError,
    ConnectionLostError,
    InternalError,
    ProtocolMismatchError,
    RemoteWireError,
    RlinfActorsError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import Lending
from rlinf_actors.net.bulk import BulkLink
from rlinf_actors.net.link import Link, Network, secret_identity
from rlinf_actors.runtime.future import call_all
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL
from rlinf_actors.wire.values import Endpoint

log = logging.getLogger(__name__)

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HANDSHAKES = 5
"""Number of failed handshakes after which a process that has never answered is taken for a foreign process."""
_links = itertools.count(1)
new_call = itertools.count(1).__next__
"""Return the next call number. Numbers are unique in the process, so one header serves every rank of a group call."""

_REJECTIONS: dict[str, type[RlinfActorsError]] = {"protocol": ProtocolMismatchError, "internal": InternalError}
_LISTENED = (
    frames.Held, frames.Returned, frames.Facts, frames.Released, frames.LaneEnded, frames.ChildIs, frames.ChildEnded,
)  # fmt: skip
"""Frames that go to the listener whose number they carry."""
_SHARED = (frames.ChannelAccepted, frames.ChannelItems)
"""Frames that answer several calls. Each call gets one of the parts, if there are any."""
_Answers = Union[frames.Ok, frames.Item, frames.Raised, frames.Runs]
_ANSWERS = (frames.Ok, frames.Item, frames.Raised, frames.Runs)


First = Callable[[], "tuple[bytes, Sequence[Buffer]] | None"]
"""Returns the first message of a link, an encoded header and parts; None for no message."""


class Pending(Protocol):
    """A call that waits for one or more answers of a worker; the Peer of the worker keeps it until the call ends."""

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Handle one answer of the worker. Return True if it was the last one. Called on the loop thread."""

    def fail(self, error: Exception) -> None:
        """End the call with *error*, because the worker has ended or cannot be reached. Called on any thread."""


class PendingRequest(msgspec.Struct, eq=False):
    """A pending call that has one answer and is handled by two callbacks; only one of them is called, once.

    Attributes:
        answered: called on the loop thread with the answer.
        failed: called on any thread with an error, if the worker has ended or cannot be reached.
    """

    answered: Callable[[frames.AnyFrame, AuthenticatedParts], object]
    failed: Callable[[Exception], object]

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self.answered(frame, parts)
        return True

    def fail(self, error: Exception) -> None:
        self.failed(error)


class Peer:
    """The connection of this process to one worker, for calls, messages and channel requests.

    Args:
        network: makes the link.
        identity: identity of this process, ``role:incarnation`` (`own_identity`); each link appends a number.
        name: name of the worker, ``group:rank``.
        rank: rank of the worker.
        node: node name of the worker, for error messages.
        needed: called once, on any thread, when the first message waits for the link; it leads to `connect`.
        lost: called on the loop thread with this Peer, when the connection was lost and re-established.
        me: worker id of this process, "" in a driver.

    Attributes:
        worker_id: id of the worker, "" while unknown.
        succeeds: identities of the earlier links to this worker whose connections were lost; the Join names them.
        wanted: True if the link is needed: a message was sent, or this Peer replaces one whose connection was lost.
        received: number of messages that have arrived from the worker.
        protocol: newest protocol of the worker, as it says to the process that constructs it; else 0.
        sibling: the worker, for workers of its node; None if it is on this machine, or not connected by its group.
    """

    def __init__(
        self,
        network: Network,
        identity: str,
        name: str,
        rank: int,
        node: str,
        needed: Callable[[], object] = lambda: None,
        lost: Callable[[Peer], None] = lambda peer: None,
        me: str = "",
    ) -> None:
        self.name = name
        self.rank = rank
        self.node = node
        self.worker_id = ""
        self.link_identity = b""
        self.succeeds: list[bytes] = []
        self.error: Exception | None = None
        self.protocol = 0
        self.sibling: frames.Sibling | None = None
        self.pending: dict[int, Pending] = {}
        self.wanted = False
        self.received = 0
        self._create = 0  # number of the Create that the worker has not answered
        self._withheld: dict[int, tuple[frames.Raised, AuthenticatedParts]] = {}
        self._handshakes_failed = 0
        self._handling: frames.AnyFrame | None = None
        self._needed = needed
        self._lost = lost
        self._me = me
        self._listeners: dict[int, Callable[[frames.AnyFrame], object]] = {}
        self._watchers: list[Callable[[Exception], object]] = []
        self._network = network
        self.own_identity = identity
        self._lock = threading.Lock()
        self._backlog: list[tuple[bytes, Sequence[Buffer], bool]] = []
        self._joined: Link | None = None  # the link, which may not be ready
        self._link: Link | None = None  # the link, once the backlog was sent
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
        return self.error is None and bool(self.pending or self._listeners or self._watchers)

    def connect(
        self,
        endpoint: Endpoint,
        host: str,
        token: str,
        first: First,
    ) -> None:
        """Make the link to the worker, and send the backlog when it is ready. On failure, fail the Peer. Loop thread.

        Args:
            endpoint: endpoint where the worker listens.
            host: host key of this process; if the endpoint has the same key, the link is a unix socket, else TCP.
            token: token of the job.
            first: called when the link is ready; returns the message to send before all others, or None.
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
            link = self._network.link(
                address, identity, self._received, token=token, to=self.name,
                on_rejected=self._rejected,
                on_reset=lambda: self._lost(self),
                on_failed=self._handler_failed,
            )  # fmt: skip
        except (OSError, RlinfActorsError) as error:  # no descriptor left, or an address that may not be used
            self.fail(RlinfActorsError(f"cannot connect to {self.name} on {self.node}: {error}"))
            return
        self.link_identity = identity
        join = frames.Join(
            OLDEST, version.VERSION, PYTHON, self.own_identity, token, self.worker_id, self.succeeds, self._me,
            PROTOCOL, sys.byteorder, bulk=self._may_use_bulk(address, endpoint),
        )  # fmt: skip
        link.send(frames.encode(join), now=True)  # alone: what follows may be longer than a stranger's may be
        self._joined = link
        self._first = first
        if address != endpoint.ipc or not self._lending.offer():
            self._send_backlog()

    def _send_backlog(self) -> None:
        link = self._joined
        if link is None or self._link is not None:
            return  # closed meanwhile
        message = self._first()
        with self._lock:
            if message is not None:
                self._backlog.insert(0, (*message, False))
            for header, parts, alone in self._backlog:
                link.send(*self._pack(header, parts, alone))
            self._backlog.clear()
            self._link = link  # last: a thread that sees the link sends without the lock, and must not overtake

    def _may_use_bulk(self, address: str, endpoint: Endpoint) -> bool:
        """Prepare bulk streams if the link is TCP and both processes have them. Return True if so."""
        transport = self._network.bulk
        if transport is None or not transport.available or not endpoint.bulk or address != endpoint.tcp:
            return False
        host = endpoint.tcp.removeprefix("tcp://").rpartition(":")[0].strip("[]")

        def send(header: bytes, parts: Sequence[Buffer]) -> None:
            if self._joined is not None:
                self._joined.send(header, parts)

        self._bulk = BulkLink(
            transport, self.name, send, self._arrived, partial(self._handler_failed, b""), (host, endpoint.bulk)
        )
        return True

    def succeed(self, old: Peer) -> None:
        """Replace *old*, whose connection to the same worker process was lost. The Join tells the worker of it."""
        self.worker_id, self.wanted = old.worker_id, True
        self._lending.succeed(old._lending)
        # a link that brought nothing may never have joined: the worker may not know that its predecessors are lost
        self.succeeds = [*([] if old.received else old.succeeds), old.link_identity]

    def close(self) -> None:
        """Close the link. Loop thread; calling twice is harmless."""
        with self._lock:
            link, self._joined, self._link = self._joined, None, None
        self._end_parts()
        if link is not None:
            link.close()

    def _end_parts(self) -> None:
        self._lending.close(lost=isinstance(self.error, ConnectionLostError))
        if self._bulk is not None:
            self._bulk.close()

    def soon(self, function: Callable[[], object]) -> None:
        self._network.soon(function)

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
        if self.error is not None and self.pending.pop(call, None) is not None:
            pending.fail(self.error)
        return call

    def exception(self, frame: frames.Raised, parts: AuthenticatedParts) -> Exception:
        """Unpickle the exception that the worker raised. Not on the loop thread, because this runs user code."""
        return failure.decode(frame, parts, worker=self.name, rank=self.rank, node=self.node)

    def forget(self, call: int) -> None:
        """Cancel the call with this number: ignore its answers, and ask the worker to cancel it. Any thread."""
        if self.pending.pop(call, None) is not None:
            self.send(frames.Cancel(call))

    def listen(self, listener: Callable[[frames.AnyFrame], object]) -> int:
        """Choose a new number and return it. Call *listener* with each frame of `_LISTENED` that carries the number.

        Messages and channels use this for answers that come after a call. The listener is removed by `ignore`, or when
        this Peer fails.
        """
        number = new_call()
        self._listeners[number] = listener
        return number

    def ignore(self, number: int) -> None:
        self._listeners.pop(number, None)

    def on_gone(self, callback: Callable[[Exception], object]) -> None:
        """Call *callback* with the error when this Peer fails; at once if it has already failed. Any thread."""
        with self._lock:
            if self.error is None:
                self._watchers.append(callback)
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
        self,
        header: bytes,
        parts: Sequence[Buffer] = (),
        *,
        now: bool = False,
        alone: bool = True,
        give: bool = False,
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
                    self._needed()
                return
        if len(parts) > 1:  # large parts come behind the first
            header, parts = self._pack(header, parts, alone, give)
        link.send(header, parts, now=now)

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
        self._withheld = {}
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
        """Until `release`, withhold exceptions that answer calls, because the worker is being constructed. Loop thread.

        If the constructor raises, the worker answers the waiting calls with that exception, and then the Create. The
        owner of the group fails these calls with the answer to the Create, so that the user gets one error, once.

        *create* is the call number of the Create, the message that lets the worker construct its object.
        """
        self._create = create

    def release(self) -> None:
        """End what `constructing` began: fail the calls whose exceptions were withheld. Loop thread."""
        self._create = 0
        withheld, self._withheld = self._withheld, {}
        for frame, parts in withheld.values():
            self._answered(frame, parts)

    # --- what arrives; loop thread ---

    def _received(self, _peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        self.received += 1
        if self._bulk is None or not self._bulk.takes(header, parts):
            self._arrived(header, parts)

    def _arrived(self, header: bytes, parts: list[Buffer]) -> None:
        self._handling = None
        try:
            frame = self._handling = frames.decode(self._lending.unpack(header, parts))
        except RemoteWireError as error:
            log.warning("dropped a message from %s on %s: %s", self.name, self.node, error)
            return
        if isinstance(frame, _ANSWERS):
            answer = AuthenticatedParts(parts)  # from the worker that the head named
            if not self._create or frame.id == self._create or type(frame) is not frames.Raised:
                self._answered(frame, answer)
            elif frame.id in self.pending:
                self._withheld[frame.id] = (frame, answer)
        elif isinstance(frame, _SHARED):
            each = [AuthenticatedParts((part,)) for part in parts] or [AuthenticatedParts()] * len(frame.ids)
            for id, own in zip(frame.ids, each, strict=False):
                pending = self.pending.pop(id, None)
                if pending is not None:
                    pending.answer(frame, own)
        elif isinstance(frame, _LISTENED):
            listener = self._listeners.get(frame.id)
            if listener is not None:
                listener(frame)
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
            kind = _REJECTIONS.get(frame.kind, AuthenticationError)
            self.fail(kind(f"{self.name} on {self.node}: {frame.text}"))
        else:
            log.warning("dropped a %s from %s on %s", type(frame).__name__, self.name, self.node)

    def _answered(self, frame: _Answers, parts: AuthenticatedParts) -> None:
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
        """A message could not be handled: fail its call with *error*, or this whole Peer if it belongs to no call."""
        frame = self._handling
        if isinstance(frame, _ANSWERS):
            pending = self.pending.pop(frame.id, None)
            if pending is not None:
                pending.fail(error)
        else:
            self.fail(error)

    def _send_at_once(self, frame: frames.AnyFrame, parts: Sequence[Buffer] = ()) -> None:
        """Send a frame about shared memory without waiting until the link is ready. Loop thread."""
        if self._joined is not None:
            self._joined.send(frames.encode(frame), parts)
