"""A worker as this process reaches it: the link, the calls that wait for it, and its end.

Every pending call ends exactly once: by its answer, by `forget`, or by `fail` when the head says
that the worker is gone. What outlives a call is no call: `listen` and `on_gone` leave an idle peer idle.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rlinf_actors import version
from rlinf_actors.errors import (
    AuthenticationError,
    InternalError,
    ProtocolMismatchError,
    RemoteWireError,
    RlinfActorsError,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import Lending
from rlinf_actors.net.link import Link, Network, secret_identity
from rlinf_actors.runtime.future import call_all
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL
from rlinf_actors.wire.values import Endpoint

log = logging.getLogger(__name__)

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HANDSHAKES = 5
"""So many that fail, and none that does not: whoever listens there is not a worker of this job."""
_links = itertools.count(1)
new_call = itertools.count(1).__next__
"""The next call's number: unique in the process, so that one header serves every rank of a group call. Any thread."""


_REJECTIONS: dict[str, type[RlinfActorsError]] = {"protocol": ProtocolMismatchError, "internal": InternalError}

_HEARD = (
    frames.Held, frames.Returned, frames.Facts, frames.Released, frames.LaneEnded, frames.ChildIs, frames.ChildEnded,
)  # fmt: skip
"""What goes to whom `Peer.listen` gave a number."""


class Pending(Protocol):
    """Who waits for an answer."""

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        """An Ok, Item or Raised came; True if that was the last. Loop thread."""

    def fail(self, error: Exception) -> None:
        """The worker is gone. Any thread."""


class Peer:
    """One worker of one group.

    Args:
        network: where the link is made.
        identity: of this process; a number is added per link.
        name: of the worker, ``group:rank``.
        rank: its rank.
        node: its node, for messages to people.
        needed: called once, when the first message waits for the link. Any thread.
        lost: called with this peer when the connection of its link was lost and is there again. Loop thread.
        me: the worker id of this process, "" of a driver.
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
        self.succeeds: list[bytes] = []  # identities of earlier links to this worker, which were lost
        self.error: Exception | None = None
        self.pending: dict[int, Pending] = {}
        self.wanted = False  # whether there was something to send
        self.received = 0  # messages: whether anything comes at all is seen by a change
        self._create = 0  # the number of the Create that the worker has not answered
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
        self._joined: Link | None = None
        self._link: Link | None = None
        self._first: Callable[[], tuple[frames.AnyFrame, Sequence[Buffer]] | None] = lambda: None
        self._lending = Lending(network.memory, network.soon, self._tell, name)

    @property
    def connected(self) -> bool:
        """Whether the link was made; what is sent before it is ready waits here."""
        return self._joined is not None

    @property
    def awaited(self) -> bool:
        """Whether something here waits for this worker, or exchanges messages with it."""
        return self.error is None and bool(self.pending or self._listeners or self._watchers)

    def connect(
        self,
        endpoint: Endpoint,
        host: str,
        token: str,
        first: Callable[[], tuple[frames.AnyFrame, Sequence[Buffer]] | None],
    ) -> None:
        """Make the link and send what waited, after what *first* gives. Loop thread.

        To a worker that may be lent shared memory it goes out once each has opened the other's, or could not.

        Args:
            endpoint: where the worker listens.
            host: this process's host key; equal to the endpoint's where ipc can be used.
            token: of the job.
            first: makes the message that must arrive before all others, or None.
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
        link = self._network.link(
            address,
            identity,
            self._received,
            token=token,
            on_turned_away=self._turned_away,
            on_reset=lambda: self._lost(self),
            on_failed=self._failed,
        )
        self.link_identity = identity
        join = frames.Join(
            OLDEST, version.VERSION, PYTHON, self._identity, token, self.worker_id, self.succeeds, self._me, PROTOCOL,
            sys.byteorder,
        )  # fmt: skip
        link.send(frames.encode(join))
        self._joined = link
        self._first = first
        if address != endpoint.ipc or not self._lending.offer():
            self._ready()

    def _ready(self) -> None:
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
            self._link = link  # last: who sees it sends without the lock, and must not overtake what waited

    def soon(self, function: Callable[[], object]) -> None:
        """Run *function* on the loop soon. Any thread, destructors too."""
        self._network.soon(function)

    def open(self, pending: Pending, call: int = 0) -> int:
        """Register a call, by default under a new number; its answer goes to *pending*. Any thread.

        A dead peer fails it at once.
        """
        call = call or new_call()
        self.pending[call] = pending
        if self.error is not None and self.pending.pop(call, None) is not None:
            pending.fail(self.error)
        return call

    def listen(self, listener: Callable[[frames.AnyFrame], object]) -> int:
        """Give *listener* every frame of `_HEARD` that names the number returned, until the worker is gone."""
        number = new_call()
        self._listeners[number] = listener
        return number

    def ignore(self, number: int) -> None:
        """End what `listen` began."""
        self._listeners.pop(number, None)

    def on_gone(self, callback: Callable[[Exception], object]) -> None:
        """Call *callback* with the reason when the worker is gone; at once if it is. Any thread."""
        with self._lock:
            if self.error is None:
                self._watchers.append(callback)
                return
        callback(self.error)

    def send(
        self, frame: frames.AnyFrame, parts: Sequence[Buffer] = (), *, now: bool = False, alone: bool = True
    ) -> None:
        """Send, or keep until the link is there. Any thread.

        Args:
            frame, parts: the message.
            now: see net.link.Listener.send.
            alone: whether nobody else is sent these parts.
        """
        self.post(frames.encode(frame), parts, now=now, alone=alone)

    def post(self, header: bytes, parts: Sequence[Buffer] = (), *, now: bool = False, alone: bool = True) -> None:
        """As `send`, with a header that is encoded already."""
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
        """Large parts in memory that this worker can be lent; see Lending.store. Any thread."""
        return self._lending.store(parts)

    def forget(self, call: int) -> None:
        """Nobody waits for this call any more; the worker is told. Any thread."""
        if self.pending.pop(call, None) is not None:
            self.send(frames.Cancel(call))

    def fail(self, error: Exception) -> None:
        """The worker is gone: end every call to it, now and later. Any thread."""
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

    def constructing(self, create: int) -> None:
        """Withhold exceptions that answer calls until `release`. Loop thread.

        A worker whose constructor raised answers the calls that waited for it with that exception, and then the
        Create, number *create*, too. The owner ends the calls by the error of the Create: one error, which is
        reported, and seen, once. An exception of a method that ran already waits for the Create's answer.
        """
        self._create = create

    def release(self) -> None:
        """Give what was withheld to its calls. Loop thread."""
        self._create = 0
        withheld, self._withheld = self._withheld, {}
        for frame, parts in withheld.values():
            self._answered(frame, parts)

    def close(self) -> None:
        """Drop the link. Loop thread; twice is fine."""
        with self._lock:
            link, self._joined, self._link = self._joined, None, None
        self._lending.close()
        if link is not None:
            link.close()

    def _turned_away(self, why: str, for_good: bool) -> None:
        """It is tried again, unless it is for good. A worker that ends in a handshake looks the same, but only once."""
        self._handshakes_failed += 1
        if for_good or (self._handshakes_failed >= HANDSHAKES and not self.received):
            self.fail(AuthenticationError(f"{self.name} on {self.node} refused: {why}"))

    def _tell(self, frame: frames.AnyFrame) -> None:
        """Send what concerns the link itself. Loop thread."""
        if self._joined is not None:
            self._joined.send(frames.encode(frame))

    def _received(self, _peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        self.received += 1
        self._handling = None
        try:
            frame = self._handling = frames.decode(self._lending.unpack(header, parts))
        except RemoteWireError as error:
            log.warning("dropped a message from %s on %s: %s", self.name, self.node, error)
            return
        if isinstance(frame, frames.Rejected):
            kind = _REJECTIONS.get(frame.kind, AuthenticationError)
            self.fail(kind(f"{self.name} on {self.node}: {frame.text}"))
            return
        if isinstance(frame, _HEARD):
            listener = self._listeners.get(frame.id)
            if listener is not None:
                listener(frame)
            return
        if isinstance(frame, (frames.Ok, frames.Item, frames.Raised, frames.Runs)):
            said = AuthenticatedParts(parts)  # of the worker that the head named
            if not self._create or frame.id == self._create or type(frame) is not frames.Raised:
                self._answered(frame, said)
            elif frame.id in self.pending:
                self._withheld[frame.id] = (frame, said)
            return
        if isinstance(frame, frames.Dropped):
            self._lending.dropped(frame)
            return
        if isinstance(frame, frames.Memory):
            self._lending.heard(frame)
            self._ready()
            return
        log.warning("dropped a %s from %s on %s", type(frame).__name__, self.name, self.node)

    def _answered(
        self, frame: frames.Ok | frames.Item | frames.Raised | frames.Runs, parts: AuthenticatedParts
    ) -> None:
        pending = self.pending.get(frame.id)
        if pending is not None and pending.answer(frame, parts):
            self.pending.pop(frame.id, None)

    def _failed(self, _peer: bytes, error: InternalError) -> None:
        """Fail what a message belonged to whose handler raised: its call, or, where there is none, the whole link."""
        frame = self._handling
        if isinstance(frame, (frames.Ok, frames.Item, frames.Raised, frames.Runs)):
            pending = self.pending.pop(frame.id, None)
            if pending is not None:
                pending.fail(error)
            return
        self.fail(error)


ANSWER_S = 0.25
"""How long a wait whose time is up asks the late workers what they are doing. Their I/O threads answer in some ms."""
MAX_ASKED = 16
"""Late workers that are asked and named; a message with a thousand would not be read."""


class _Doing:
    """One worker's answer to WhatRuns."""

    def __init__(self, told: Callable[[], object]) -> None:
        self.runs: frames.Runs | None = None
        self._told = told

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        if isinstance(frame, frames.Runs):
            self.runs = frame
        self._told()
        return True

    def fail(self, error: Exception) -> None:
        self._told()


class Late:
    """Asks workers that are late what their user code is doing. Any thread.

    Args:
        peers: the late ones.
        told: called once, on any thread, when all that can be asked have answered.
    """

    def __init__(self, peers: Sequence[Peer], told: Callable[[], object]) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        self._told = told
        asked = [peer for peer in peers[:MAX_ASKED] if peer.connected]
        self._left = len(asked) + 1
        self._doing = {peer: _Doing(self._one) for peer in asked}
        self._calls = []
        for peer, doing in self._doing.items():
            call = peer.open(doing)
            self._calls.append((peer, call))
            peer.send(frames.WhatRuns(call), now=True)
        self._one()

    def _one(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._told()

    def describe(self) -> str:
        """Return what each is doing, for people. Ends the question."""
        for peer, call in self._calls:
            peer.pending.pop(call, None)
        said = [f"{peer.name} on {peer.node} {self._said(peer)}" for peer in self._peers[:MAX_ASKED]]
        more = len(self._peers) - len(said)
        return "; ".join([*said, *([f"and {more} more"] if more else [])])

    def _said(self, peer: Peer) -> str:
        doing = self._doing.get(peer)
        if doing is None:
            return "is not up yet"
        if doing.runs is None:
            why = "its process is stopped, C code holds its interpreter's lock, or it is an older version"
            return f"does not answer: {why}"
        waiting = ", and 1 call waits there" if doing.runs.waiting == 1 else ""
        if doing.runs.waiting > 1:
            waiting = f", and {doing.runs.waiting} calls wait there"
        if not doing.runs.method:
            return f"runs nothing{waiting}"
        return f"has been running {doing.runs.method}() for {doing.runs.seconds:.1f} s{waiting}"
