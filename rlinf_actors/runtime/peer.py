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

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Union

from rlinf_actors import version
from rlinf_actors.errors import (
    AuthenticationError,
    CallTimeoutError,
    InternalError,
    ProtocolMismatchError,
    RemoteWireError,
    RlinfActorsError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import Lending
from rlinf_actors.net.link import Link, Network, secret_identity
from rlinf_actors.runtime.future import Promise, call_all
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
_Answers = Union[frames.Ok, frames.Item, frames.Raised, frames.Runs]
_ANSWERS = (frames.Ok, frames.Item, frames.Raised, frames.Runs)


class Pending(Protocol):
    """A registered call that waits for its answer or answers."""

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """Handle an answer. Return True if no further answer will come. Loop thread."""

    def fail(self, error: Exception) -> None:
        """End the call with *error*, because the worker is gone. Any thread."""


@dataclass(eq=False, slots=True)
class Request:
    """A pending call with one answer.

    Attributes:
        answered: called with the answer. Loop thread.
        failed: called with the error if the worker is gone. Any thread.
    """

    answered: Callable[[frames.AnyFrame, AuthenticatedParts], object]
    failed: Callable[[Exception], object]

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self.answered(frame, parts)
        return True

    def fail(self, error: Exception) -> None:
        self.failed(error)


class Peer:
    """The connection of this process to one worker.

    Args:
        network: makes the link.
        identity: identity of this process; each link appends a number.
        name: name of the worker, ``group:rank``.
        rank: rank of the worker.
        node: node name of the worker, for error messages.
        needed: called once, when the first message waits for the link. Any thread.
        lost: called with this Peer when the connection was lost and re-established. Loop thread.
        me: worker id of this process, "" in a driver.

    Attributes:
        worker_id: id of the worker, "" while unknown.
        succeeds: identities of earlier links to this worker whose connections were lost.
        wanted: True if a message was sent, or the link is needed for another reason.
        received: number of messages that have arrived.
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
        self._identity = identity
        self._lock = threading.Lock()
        self._backlog: list[tuple[bytes, Sequence[Buffer], bool]] = []
        self._joined: Link | None = None  # the link, which may not be ready
        self._link: Link | None = None  # the link, once the backlog was sent
        self._first: Callable[[], tuple[frames.AnyFrame, Sequence[Buffer]] | None] = lambda: None
        self._lending = Lending(network.memory, network.soon, self._send_at_once, name)

    # --- the link ---

    @property
    def connected(self) -> bool:
        """True if the link was made. Messages may still wait for the worker's answer to the offer of shared memory."""
        return self._joined is not None

    @property
    def awaited(self) -> bool:
        """True if this process waits for the worker: it has pending calls, listeners or `on_gone` callbacks."""
        return self.error is None and bool(self.pending or self._listeners or self._watchers)

    def connect(
        self,
        endpoint: Endpoint,
        host: str,
        token: str,
        first: Callable[[], tuple[frames.AnyFrame, Sequence[Buffer]] | None],
    ) -> None:
        """Make the link; send the backlog when the link is ready. Fail this Peer if no link can be made. Loop thread.

        Args:
            endpoint: endpoint where the worker listens.
            host: host key of this process; ipc is used if the endpoint has the same host key.
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
        identity = secret_identity(f"{self._identity}#{next(_links)}")
        try:
            link = self._network.link(
                address,
                identity,
                self._received,
                token=token,
                on_rejected=self._rejected,
                on_reset=lambda: self._lost(self),
                on_failed=self._handler_failed,
            )
        except (OSError, RlinfActorsError) as error:  # no descriptor left, or an address that may not be used
            self.fail(RlinfActorsError(f"cannot connect to {self.name} on {self.node}: {error}"))
            return
        self.link_identity = identity
        join = frames.Join(
            OLDEST, version.VERSION, PYTHON, self._identity, token, self.worker_id, self.succeeds, self._me, PROTOCOL,
            sys.byteorder,
        )  # fmt: skip
        link.send(frames.encode(join))
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
                self._backlog.insert(0, (frames.encode(message[0]), message[1], False))
            for header, parts, alone in self._backlog:
                link.send(*self._lending.pack(header, parts, alone=alone))
            self._backlog.clear()
            self._link = link  # last: a thread that sees the link sends without the lock, and must not overtake

    def succeed(self, old: Peer) -> None:
        """Take over from *old*, the Peer of the same worker process whose connection was lost."""
        self.worker_id, self.wanted = old.worker_id, True
        # a link that brought nothing may never have joined: the worker may not know that its predecessors are lost
        self.succeeds = [*([] if old.received else old.succeeds), old.link_identity]

    def close(self) -> None:
        """Close the link. Loop thread; calling twice is harmless."""
        with self._lock:
            link, self._joined, self._link = self._joined, None, None
        self._lending.close()
        if link is not None:
            link.close()

    def soon(self, function: Callable[[], object]) -> None:
        self._network.soon(function)

    # --- calls ---

    def open(self, pending: Pending, call: int = 0) -> int:
        """Register a pending call and return its number. *call* is the number, 0 for a new number. Any thread.

        If the Peer has failed, the call fails at once.
        """
        call = call or new_call()
        self.pending[call] = pending
        if self.error is not None and self.pending.pop(call, None) is not None:
            pending.fail(self.error)
        return call

    def exception(self, frame: frames.Raised, parts: AuthenticatedParts) -> Exception:
        """Return the exception that the worker raised. Unpickles it, so not on the loop thread."""
        return failure.decode(frame, parts, worker=self.name, rank=self.rank, node=self.node)

    def forget(self, call: int) -> None:
        """Cancel a call here and at the worker. Any thread."""
        if self.pending.pop(call, None) is not None:
            self.send(frames.Cancel(call))

    def listen(self, listener: Callable[[frames.AnyFrame], object]) -> int:
        """Register a listener and return its number.

        The listener gets each frame of `_LISTENED` that carries the number. The registration ends when the worker is
        gone, or by `ignore`.
        """
        number = new_call()
        self._listeners[number] = listener
        return number

    def ignore(self, number: int) -> None:
        self._listeners.pop(number, None)

    def on_gone(self, callback: Callable[[Exception], object]) -> None:
        """Call *callback* with the error when the worker is gone; at once if it is already gone. Any thread."""
        with self._lock:
            if self.error is None:
                self._watchers.append(callback)
                return
        callback(self.error)

    def send(
        self, frame: frames.AnyFrame, parts: Sequence[Buffer] = (), *, now: bool = False, alone: bool = True
    ) -> None:
        """Send a message, or keep it in the backlog until the link is ready. Any thread.

        A failed Peer drops the message.

        Args:
            frame, parts: the message.
            now: True to hand the message to the socket on this thread if nothing is queued before it; saves a wake-up.
            alone: True if the parts are sent to no other worker; the worker may then write to lent parts.
        """
        self.post(frames.encode(frame), parts, now=now, alone=alone)

    def post(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False, alone: bool = True) -> None:
        """Send a message like `send`, with an already encoded header."""
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
            header, parts = self._lending.pack(header, parts, alone=alone)
        link.send(header, parts, now=now)

    def store(self, parts: Sequence[Buffer]) -> tuple[Sequence[Buffer], bool]:
        """Return *parts* with large parts copied into shared memory that this worker can open; see Lending.store."""
        return self._lending.store(parts)

    def fail(self, error: Exception) -> None:
        """Fail every pending and later call to the worker with *error*, because the worker is gone. Any thread."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._backlog.clear()
            watchers, self._watchers = self._watchers, []
        self._withheld = {}
        self._listeners.clear()
        self._lending.close()
        while self.pending:
            try:
                _, pending = self.pending.popitem()
            except KeyError:
                break  # another thread took the last one
            call_all([pending.fail], self.error)
        call_all(watchers, self.error)

    # --- the owner's side ---

    def constructing(self, create: int) -> None:
        """Withhold exceptions that answer calls, until `release`. *create* is the call number of the Create.

        Loop thread.

        If a worker's constructor raises, the worker answers the waiting calls with that exception, and then the Create
        too. The owner fails the calls with the error of the Create, so that the user gets one error, once.
        """
        self._create = create

    def release(self) -> None:
        """Deliver the withheld exceptions to their calls. Loop thread."""
        self._create = 0
        withheld, self._withheld = self._withheld, {}
        for frame, parts in withheld.values():
            self._answered(frame, parts)

    # --- what arrives; loop thread ---

    def _received(self, _peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        self.received += 1
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
        elif isinstance(frame, _LISTENED):
            listener = self._listeners.get(frame.id)
            if listener is not None:
                listener(frame)
        elif isinstance(frame, frames.Dropped):
            self._lending.dropped(frame)
        elif isinstance(frame, frames.Memory):
            self._lending.heard(frame)
            self._send_backlog()
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
        """Count a failed handshake.

        Fail the Peer if the link does not try again (*for_good*) or HANDSHAKES have failed.

        A worker that ends during a handshake causes the same event, but only once.
        """
        self._handshakes_failed += 1
        if for_good or (self._handshakes_failed >= HANDSHAKES and not self.received):
            self.fail(AuthenticationError(f"{self.name} on {self.node} refused: {why}"))

    def _handler_failed(self, _peer: bytes, error: InternalError) -> None:
        """Fail the call whose message could not be handled. If the message belongs to no call, fail the whole peer."""
        frame = self._handling
        if isinstance(frame, _ANSWERS):
            pending = self.pending.pop(frame.id, None)
            if pending is not None:
                pending.fail(error)
        else:
            self.fail(error)

    def _send_at_once(self, frame: frames.AnyFrame) -> None:
        """Send a frame about shared memory, before the backlog if the link is not ready. Loop thread."""
        if self._joined is not None:
            self._joined.send(frames.encode(frame))


ANSWER_S = 0.25
"""Seconds that late workers get to answer what they run, after a wait for them has timed out."""
MAX_ASKED = 16
"""Maximum number of late workers that are asked and named in one error message."""


class LateReport(Promise[None]):
    """Asks late workers what their user code is running. Ends when every connected worker has answered. Any thread."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        super().__init__("the answer of late workers")
        self._peers = peers
        asked = [peer for peer in peers[:MAX_ASKED] if peer.connected]
        self._left = len(asked) + 1
        self._runs: dict[Peer, frames.Runs] = {}
        requests = {peer: Request(partial(self._answered, peer), self._one_answered) for peer in asked}
        self._calls = {peer: peer.open(request) for peer, request in requests.items()}
        for peer, call in self._calls.items():
            peer.send(frames.WhatRuns(call), now=True)
        self._one_answered()

    def _answered(self, peer: Peer, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if isinstance(frame, frames.Runs):
            self._runs[peer] = frame
        self._one_answered()

    def _one_answered(self, _error: Exception | None = None) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self.resolve(None)

    def describe(self) -> str:
        """Return what each worker is running, as text for an error message. Withdraw the unanswered requests."""
        for peer, call in self._calls.items():
            peer.pending.pop(call, None)
        texts = [f"{peer.name} on {peer.node} {self._text(peer)}" for peer in self._peers[:MAX_ASKED]]
        more = len(self._peers) - len(texts)
        return "; ".join([*texts, *([f"and {more} more"] if more else [])])

    def _text(self, peer: Peer) -> str:
        if peer not in self._calls:
            return "is not up yet"
        runs = self._runs.get(peer)
        if runs is None:
            why = "its process is stopped, C code holds its interpreter's lock, or it is an older version"
            return f"does not answer: {why}"
        waiting = ", and 1 call waits there" if runs.waiting == 1 else ""
        if runs.waiting > 1:
            waiting = f", and {runs.waiting} calls wait there"
        if not runs.method:
            return f"runs nothing{waiting}"
        return f"has been running {runs.method}() for {runs.seconds:.1f} s{waiting}"


def late_text(peers: Sequence[Peer], timeout: float) -> str:
    """Ask the late workers in *peers* what they are running, and return the answers as text.

    Blocks for at most ANSWER_S, and for at most *timeout* seconds.
    """
    report = LateReport(peers)
    with contextlib.suppress(CallTimeoutError):
        report.wait(min(ANSWER_S, max(timeout, 0.01)))  # a caller that polls is not held up
    return report.describe()
