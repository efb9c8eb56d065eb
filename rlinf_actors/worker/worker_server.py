"""The server of a worker process: it accepts links of peers, and hands their calls to the executor.

A link is a connection of a driver, another worker or a channel client to this worker. The server drops all frames of a
link until it has accepted the link's Join; from then on the link is a member. `opening.open_worker` makes one for
each worker and each child member. Calls wait here until the user's class is constructed (`open`), or its construction
has failed (`refuse`).

The server notices the end of a peer on this machine by a pidfd. The head reports the end of every other peer
(`RemotePeers`). That needs a session with the head, which the server opens only for a stream or for many peers.

Everything runs on the I/O thread, unless a docstring says otherwise. Calls and other frames of `_anywhere` are handled
on the thread that has read them, which may be an idle thread of the executor (`net.reading`). No method blocks, and
none runs user code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from rlinf_actors import procfs
from rlinf_actors.errors import InternalError, RemoteWireError
from rlinf_actors.exhaustion import explain
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.buffer_lending import MARK as LENT
from rlinf_actors.net.buffer_lending import Lending, own_header
from rlinf_actors.net.bulk import BulkLink
from rlinf_actors.net.bulk_transfers import GivenMemory
from rlinf_actors.net.link import LogThrottle, Network, peer_name
from rlinf_actors.runtime.future import call_all
from rlinf_actors.security.members import Gate
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import NO_PARTS, AuthenticatedParts, Copy
from rlinf_actors.worker import joining
from rlinf_actors.worker.calls import Calls
from rlinf_actors.worker.executors import Executor
from rlinf_actors.worker.invocation import Invocation, TracedInvocation
from rlinf_actors.worker.joining import RejectedPeers
from rlinf_actors.worker.remote_peers import RemotePeers, client_of
from rlinf_actors.worker.shared_calls import SharedCalls
from rlinf_actors.worker.stacks import worker_waits
from rlinf_actors.worker.unread_streams import UnreadStreams

log = logging.getLogger(__name__)

LinkLost = Callable[[bytes, str], object]
"""Called on the I/O thread with the identity of a lost link, and the id of the worker at its other end, "" for none."""
Handler = Callable[[bytes, Any, AuthenticatedParts], None]
"""Called on the I/O thread with the identity of the link, the frame, and the parts of the message."""

NAME_CHARS = 60
"""Most characters that are logged or sent of a rejected peer's name, or of a method's name."""
LATE_S = 10.0
"""Seconds after the end of a peer's process in which the server still accepts messages that the peer sent earlier."""
_CHANNEL_REQUESTS = (
    frames.ChannelPut, frames.ChannelGet, frames.ChannelBatch, frames.ChannelLook, frames.ChannelShow,
    frames.ChannelClose, frames.ChannelWhere, frames.ChannelRelease,
)  # fmt: skip
_ANSWERED = (frames.Call, frames.SharedCall, frames.Stream, frames.Cancel, frames.Credit, frames.Create)
"""Frames whose internal errors answer the call that they name."""


class Creation(msgspec.Struct, frozen=True):
    peer: bytes
    frame: frames.Create
    parts: AuthenticatedParts


class WorkerServer:
    """Accepts links of the job's members, and hands their calls to the executor.

    Args:
        worker_id: id of this worker. A Join for another id is rejected: an earlier worker listened at this address.
        name: name of this worker, for log lines and error texts.
        token: token of the job.
        on_closed: called on the executor's thread when `_close` of the user's instance has returned, with a function
            that answers the call. Any thread may call that later.
        gate: checks the keys of peers at the TCP socket; None in a cluster without keys.

    Attributes:
        constructing: notes that the user's constructor begins now. Main thread.
        activity: returns the call that runs now (`Calls.activity`). Any thread.
        remote_peers: watches peers on other machines. set by `opening.open_worker`; while None, they are not watched.
        creations: Create frames for the main thread.
        constructed: set when the owner's Create has its answer: the user's class is constructed.
    """

    def __init__(
        self,
        network: Network,
        worker_id: str,
        name: str,
        token: str,
        on_closed: Callable[[Callable[[], None]], None] = lambda answer: answer(),
        gate: Gate | None = None,
        rejected: RejectedPeers | None = None,
    ) -> None:
        self.rejected = rejected or RejectedPeers()
        self._listener = network.listener(
            self._received, gate=gate, on_failed=self._failed, on_any_thread=self._received_anywhere
        )
        self._queue: Callable[[bytes, frames.Ok, Sequence[Buffer]], None]
        self._queue = getattr(self._listener, "queue", self.send)
        self._made = Invocation if recorder.active is None else TracedInvocation
        self._copy: Copy = bytes if network.memory is None else network.memory.copy
        self._worker_id = worker_id
        self._name = name
        self._token = token
        self._on_closed = on_closed
        self._network = network
        self._dropped = LogThrottle()
        self._members: dict[bytes, Lending] = {}
        self._bulk: dict[bytes, BulkLink] = {}  # of the members on other nodes
        self._workers: dict[bytes, str] = {}  # ids of the members that are workers
        self._handling: frames.AnyFrame | None = None
        self._calls = Calls()
        self.constructing, self.activity = self._calls.constructing, self._calls.activity
        self._created = False  # the main thread has a Create
        self._handlers: dict[type[frames.Frame], Handler] = {}
        self._anywhere: dict[type[frames.Frame], Callable[[Any], bool]] = dict.fromkeys(
            (frames.Cancel, frames.Credit, frames.Dropped), lambda frame: True
        )
        self._near: set[bytes] = set()
        self._together: set[bytes] = set()  # members that read Oks
        self.target_for: Callable[
            [frames.UserMessage, Sequence[Buffer], int, Callable[[], None]], GivenMemory | None
        ] = lambda *_: None
        self._on_link_lost: list[LinkLost] = []
        self._on_forgotten: list[Callable[[bytes], object]] = []
        self.unread = UnreadStreams(self._listener, self._workers)
        self.remote_peers: RemotePeers | None = None
        self.shared_calls = SharedCalls(self._handle, self.send)
        self._early: list[tuple[bytes, frames.AnyFrame, AuthenticatedParts]] = []
        self.creations: queue.SimpleQueue[Creation] = queue.SimpleQueue()
        self.constructed = threading.Event()

    def trace_changed(self) -> None:
        """Show calls in the trace from now on if this process records one, else no longer."""
        self._made = Invocation if recorder.active is None else TracedInvocation

    @property
    def executor(self) -> Executor | None:
        """Runs the calls; None until the user's class is constructed."""
        return self._calls.executor

    def bind(self, endpoint: str) -> str:
        return self._listener.bind(endpoint)

    def open(self, executor: Executor) -> None:
        """Submit the calls that waited for the construction of the user's class, and every later call, to *executor*.

        Main thread, after the construction.
        """
        for peer, id in self._calls.open(executor):
            self.answer(peer, frames.Runs(id, ""))

    def serve(
        self, kinds: Iterable[type[frames.Frame]], handler: Handler, anywhere: Callable[[Any], bool] | None = None
    ) -> None:
        """Call *handler* for each frame of *kinds*, first for those that arrived before this call.

        *anywhere* returns True for a frame that *handler* may handle on any thread; None if it never may.
        """
        kinds = tuple(kinds)
        self._handlers.update(dict.fromkeys(kinds, handler))
        if anywhere is not None:
            self._anywhere.update(dict.fromkeys(kinds, anywhere))
        early, self._early = self._early, []
        for peer, frame, parts in early:
            self._handle(peer, frame, parts)

    def on_link_lost(self, callback: LinkLost) -> None:
        """Register *callback*, to be called when the connection of a member was lost and messages may be missing."""
        self._on_link_lost.append(callback)

    def worker_of(self, peer: bytes) -> str:
        """Return the id of the worker at the other end of the link *peer*, "" if that is a driver."""
        return self._workers.get(peer, "")

    def on_forgotten(self, callback: Callable[[bytes], object]) -> None:
        """Register *callback*, to be called LATE_S seconds after a member's end, with the identity of its link."""
        self._on_forgotten.append(callback)

    def send(
        self,
        peer: bytes,
        frame: frames.AnyFrame,
        parts: Sequence[Buffer] = (),
        *,
        now: bool = False,
        alone: bool = True,
    ) -> None:
        """Send a frame to the peer at the other end of a link. Any thread.

        *now*: True to send the frame at once, False to collect the frames for this peer until the end of the event
        loop's turn. *alone*: True if *parts* go only to this peer, False if other members get the same parts, so that
        no peer may change them.
        """
        header = frames.encode(frame)
        if len(parts) > 1:  # large parts come behind the first
            lending = self._members.get(peer)
            if lending is not None:
                bulk = self._bulk.get(peer)
                packed = lending.pack(header, parts, alone=alone) if bulk is None else bulk.pack(header, parts)
                header, parts = packed
        self._listener.send(peer, header, parts, now=now)

    def answer(self, peer: bytes, frame: frames.AnyFrame, parts: Sequence[Buffer] = ()) -> None:
        self.send(peer, frame, parts, now=True)

    def close(self, linger_ms: int) -> None:
        """Stop listening. Drop the answers that peers have not read after *linger_ms* milliseconds."""
        self._listener.close(linger_ms)

    def refuse(self, error: BaseException) -> None:
        """Fail every waiting and every later call with *error*, since there is no instance that could run calls."""
        waited = self._calls.refuse(error)
        for invocation in waited.calls:
            invocation.fail(error)
        for peer, id in waited.questions:
            self.answer(peer, *failure.encode(id, error))

    def _reply(self, invocation: Invocation, frame: frames.AnyFrame, parts: Sequence[Buffer]) -> None:
        """Send the answer of a call, or one item of a stream, to the caller. Runs on the executor's thread."""
        if type(frame) is not frames.Item:
            self._calls.answered(invocation.peer, invocation.id)
            if type(frame) is frames.Ok and invocation.method == "_close":
                self._on_closed(lambda: self.send(invocation.peer, frame, parts, now=True))
                return
        executor = self._calls.executor
        now = executor is None or not executor.waiting()  # else together with the next answer
        if now or type(frame) is not frames.Ok or len(parts) > 1 or invocation.peer not in self._together:
            self.send(invocation.peer, frame, parts, now=now)
        else:
            self._queue(invocation.peer, frame, parts)

    def _received_anywhere(self, peer: bytes, header: bytes, parts: list[Buffer]) -> bool:
        """Handle a message on the thread that reads, and return True, if its kind allows that. Any thread."""
        lending = self._members.get(peer)
        if lending is None or peer in self._bulk or peer in self.shared_calls.held:
            return False
        lent = header[:1] == LENT
        try:
            frame = frames.decode(own_header(header) if lent else header)
        except RemoteWireError:
            return False
        if type(frame) is not frames.Call and type(frame) is not frames.Calls:
            anywhere = self._anywhere.get(type(frame))
            if anywhere is None or not anywhere(frame):
                return False
        self._handling = frame
        if lent:
            try:
                lending.unpack(header, parts)
            except RemoteWireError:
                return False  # the loop drops it, and says so
        self._handle(peer, frame, AuthenticatedParts(parts) if parts else NO_PARTS)
        return True

    def _received(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        if not (self._bulk and peer in self._bulk and self._bulk[peer].takes(header, parts)):
            self._arrived(peer, header, parts)

    def _target_for(
        self, header: bytes, parts: Sequence[Buffer], size: int, again: Callable[[], None]
    ) -> GivenMemory | None:
        """Implement `net.bulk_transfers.TargetFor` for the messages to this worker."""
        with contextlib.suppress(RemoteWireError):
            frame = frames.decode(header)
            if type(frame) is frames.UserMessage:
                return self.target_for(frame, parts, size, again)
        return None

    def _arrived(self, peer: bytes, header: bytes, parts: list[Buffer]) -> None:
        lending = self._members.get(peer)
        self._handling = None
        try:
            if parts and lending is not None:
                header = lending.unpack(header, parts)
            frame = self._handling = frames.decode(header)
        except RemoteWireError as error:
            if self._dropped.note():
                count = self._dropped.count
                log.warning("dropped a message from %.60r (%d dropped by now): %s", peer_name(peer), count, error)
            number = None if lending is None else frames.number_of(header)
            if number is not None:  # its caller waits, if it is a call
                self.answer(peer, *failure.encode(number, error, "usage"))
            return
        if lending is None:
            self._join(peer, frame)
        else:  # a member of this job
            authenticated = AuthenticatedParts(parts) if parts else NO_PARTS
            if not self.shared_calls.held or not self.shared_calls.defers(peer, frame, authenticated):
                self._handle(peer, frame, authenticated)

    def _failed(self, peer: bytes, error: InternalError) -> None:
        """Report to the peer that the handler of its frame raised *error*.

        If the frame is a call, a stream or a channel request, the error is sent as its answer. Any other frame counts
        as a lost message: the peer is told, and this worker treats the link as lost.
        """
        frame = self._handling
        if isinstance(frame, (*_ANSWERED, frames.Calls)):
            for id in frame.ids if isinstance(frame, frames.Calls) else (frame.id,):
                self._calls.cancel(peer, id)
                self.answer(peer, *failure.encode(id, error))
        elif isinstance(frame, _CHANNEL_REQUESTS):
            self.answer(peer, frames.Raised(frame.id, "internal", type(error).__name__, str(error)))
        else:
            self.answer(peer, frames.Rejected("internal", str(error)))
            if peer in self._members:
                self._network.soon(partial(self._link_lost, peer, self._workers.get(peer, "")))

    def _handle(self, peer: bytes, frame: frames.AnyFrame, parts: AuthenticatedParts) -> None:
        if type(frame) is frames.Call:
            limit = time.monotonic() + frame.deadline_s if frame.deadline_s else 0.0
            self._submit(self._made(peer, frame.id, frame.method, parts, self._reply, self._copy, limit, 0))
            return
        if type(frame) is frames.Calls:
            self._submit_all(peer, frame, parts)
            return
        handler = self._handlers.get(type(frame))
        if handler is not None:
            handler(peer, frame, parts)
        elif type(frame) is frames.Stream:
            window = max(1, frame.window)
            if self.remote_peers is not None and peer not in self._near:
                self.remote_peers.add(peer, now=True)
            self._submit(self._made(peer, frame.id, frame.method, parts, self._reply, self._copy, 0.0, window))
        elif type(frame) is frames.Cancel:
            self._calls.cancel(peer, frame.id)
        elif type(frame) is frames.SharedCall:
            self.shared_calls.call(peer, frame, parts)
        elif type(frame) is frames.SharedParts:
            self.shared_calls.arrived(peer, frame, parts)
        elif type(frame) is frames.Credit:
            invocation = self._calls.get(peer, frame.id)
            if invocation is not None:
                invocation.credit(frame.n)
        elif type(frame) is frames.WhatRuns and frame.constructed:
            self._answer_when_constructed(peer, frame.id)
        elif type(frame) is frames.WhatRuns:
            doing = self.activity()
            seconds = max(0.0, time.perf_counter() - doing.since) if doing.method else 0.0
            waits = worker_waits(self.executor) if frame.waits else []
            runs = frames.Runs(frame.id, doing.method[:NAME_CHARS], seconds, doing.waiting, waits)
            self.answer(peer, runs)
        elif type(frame) is frames.Dropped:
            self._members[peer].dropped(frame)
        elif type(frame) is frames.Memory:
            self._members[peer].heard(frame, parts)
            if frame.pid:
                self._watch(peer, frame.pid)
        elif isinstance(frame, (frames.Shown, frames.Opened, frames.Hidden)):
            self._members[peer].heard_further(frame, parts)
        elif type(frame) is frames.Create and self._created:
            self._answer_when_constructed(peer, frame.id)  # the owner has lost the link by which it sent the first
        elif type(frame) is frames.Create:
            self.creations.put(Creation(peer, frame, parts))
            self._created = True
        elif self._calls.executor is None and self._calls.failure is None:
            self._early.append((peer, frame, parts))  # the class is being constructed, and may serve them
        else:
            log.warning("dropped a %s from %r", type(frame).__name__, peer_name(peer))

    def _answer_when_constructed(self, peer: bytes, id: int) -> None:
        if self._calls.keep((peer, id)):
            return
        if self._calls.failure is not None:
            self.answer(peer, *failure.encode(id, self._calls.failure))
        else:
            self.answer(peer, frames.Runs(id, ""))

    def _watch(self, peer: bytes, pid: int) -> None:
        """Watch the process *pid* of a peer on this machine by a pidfd, and call `peer_gone` when the process ends.

        If that is impossible, the head is asked to report the end of the peer.
        """
        try:
            fd = procfs.pidfd_of(pid)
        except ProcessLookupError:  # the peer has ended already
            self.peer_gone(peer)
            return
        except OSError as error:  # the peer lives: the head tells its end, as of a peer on another machine
            log.warning("the head alone tells when %.60r ends: %s", peer_name(peer), explain(error))
            if self.remote_peers is not None:
                self.remote_peers.add(peer, now=True)
            return
        loop = asyncio.get_running_loop()
        self._near.add(peer)

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self.peer_gone(peer)

        loop.add_reader(fd, ended)

    def peer_gone(self, peer: bytes) -> None:
        """Handle the end of a peer's process: take back the memory lent to it, cancel its streams, and drop its link.

        The link is dropped after LATE_S seconds, because the peer's last messages may still arrive.
        """
        if self.remote_peers is not None:
            self.remote_peers.remove(peer)
        lending = self._members.get(peer)
        if lending is not None:
            lending.borrower_gone()
        if peer in self._bulk:
            self._bulk[peer].forget_outgoing()
        self._calls.cancel_streams(peer)
        # last messages of the peer may still be in the socket, with parts in its memory
        asyncio.get_running_loop().call_later(LATE_S, self._forget, peer)

    def _forget(self, peer: bytes) -> None:
        self._calls.forget(peer)
        self.shared_calls.forget(peer)
        self._workers.pop(peer, None)
        self._near.discard(peer)
        self._together.discard(peer)
        lending = self._members.pop(peer, None)
        if lending is not None:
            lending.close()
        bulk = self._bulk.pop(peer, None)
        if bulk is not None:
            bulk.close()
        call_all(self._on_forgotten, peer)

    def _submit(self, invocation: Invocation) -> None:
        if not self._calls.submit(invocation):  # the first is, or will be, answered
            log.warning("refused call %d of %r: it came before", invocation.id, peer_name(invocation.peer))

    def _submit_all(self, peer: bytes, frame: frames.Calls, parts: AuthenticatedParts) -> None:
        """Submit several calls. Any thread, one at a time, as `_submit`."""
        self._together.add(peer)
        limit = time.monotonic() + frame.deadline_s if frame.deadline_s else 0.0
        make, method, reply, copy = self._made, frame.method, self._reply, self._copy
        each = (parts.cut(n, n + 1) for n in range(len(parts))) if parts else itertools.repeat(NO_PARTS)
        pairs = zip(frame.ids, each, strict=bool(parts))
        made = [make(peer, id, method, own, reply, copy, limit, 0) for id, own in pairs]
        if not self._calls.submit_all(peer, made):
            for invocation in made:
                self._submit(invocation)

    def _join(self, peer: bytes, frame: frames.AnyFrame) -> None:
        if not isinstance(frame, frames.Join):
            if self._dropped.note():
                what, whose, count = type(frame).__name__, peer_name(peer), self._dropped.count
                log.warning("dropped a %s from %.60r, which has not joined (%d dropped by now)", what, whose, count)
        elif (refusal := joining.refusal(frame, self._name, self._worker_id, self._token)) is not None:
            self.rejected.add(f"the link {peer_name(peer)[:NAME_CHARS]!r}: {refusal.why}")
            self.answer(peer, frames.Rejected(refusal.kind, refusal.text))
        else:
            memory, soon = self._network.memory, self._network.soon
            self._members[peer] = Lending(memory, soon, partial(self.send, peer), frame.name)
            self._listener.admit(peer)
            transport = self._network.bulk
            if frame.bulk and transport is not None:
                self._bulk[peer] = BulkLink(
                    transport, frame.name, partial(self._listener.send, peer), partial(self._arrived, peer),
                    partial(self._failed, peer), target_for=self._target_for,
                )  # fmt: skip
            if frame.worker:
                self._workers[peer] = frame.worker
            if self.remote_peers is not None:
                self.remote_peers.add(peer)
            for link in frame.succeeds:
                if client_of(link) == client_of(peer):
                    self._members[peer].succeed(self._members.get(link))
                    self._link_lost(link, frame.worker)

    def _link_lost(self, link: bytes, worker: str) -> None:
        """Treat *link* as ended, because its peer has opened another link in its place or a message of it was lost.

        Then call the callbacks of `on_link_lost` with *worker*, the id of the worker at the other end, "" for none.
        """
        log.warning("the connection of %r was lost, and there is another", peer_name(link))
        self._calls.lost.add(link)
        self.peer_gone(link)
        call_all(self._on_link_lost, link, worker)
