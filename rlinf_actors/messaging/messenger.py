"""Messenger: send and receive the messages of one worker.

Sending: `send` pickles the object on the caller's thread (`contents`), looks up the receiver (`directory`) and posts
the message to the receiver's `Outbox`. The outbox puts the message on the link as soon as the window has room for it.
Small parts are copied at once, and large parts into shared memory if the receiver can open that. Otherwise the link
reads the sender's own memory, and the send completes when the receiver's Held frame says that it holds the message.

Receiving: the I/O thread calls `arrived`, which answers Held and gives the message to the `Mailbox`. The mailbox pairs
the nth message of a sender with the nth receive. `receive` posts a `PostedReceive`, and the caller's `PendingReceive`
unpickles the object on the thread that waits for it. When a message is received, its size returns to the sender as
credit (Returned frames), many messages in one frame.

Tensors on accelerators are detached from the object while it is pickled, and travel beside the message. A
`TensorSender` for each receiver chooses the path of each tensor (`routes`), and the `TensorReceiver` puts the tensors
together again. Once a receiver has a TensorSender, all messages to it pass through that TensorSender, which keeps their
order.

When a worker is gone, everything that waits for it fails: its Peer calls `on_gone` with an error that says how it
ended. A lost connection between living workers ends their exchange for good: a message may be missing (`link_lost`).

Rules: only code that holds `_lock` touches the mailbox. No work is completed and no frame is sent while the lock is
held. Finalizers run on any thread with any lock held, so they only append to `_unread`; the next access to the mailbox
moves these messages back into it. Objects are never pickled or unpickled on the loop thread.
Any thread may call the methods, unless they say otherwise.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf_actors.errors import (
    CallTimeoutError,
    ConnectionLostError,
    GroupNotFoundError,
    WorkerDiedError,
)
from rlinf_actors.messaging import addressing, contents
from rlinf_actors.messaging.blocking_receive import BlockingReceives
from rlinf_actors.messaging.directory import WorkerDirectory, peer_gone_error, prefixed
from rlinf_actors.messaging.flow_control import CreditAccumulator
from rlinf_actors.messaging.group_starts import GroupStarts
from rlinf_actors.messaging.mailbox import ArrivedMessage, Key, Mailbox, Recent
from rlinf_actors.messaging.outbox import Outbox, OutgoingMessage
from rlinf_actors.messaging.peer_watch import PeerWatch
from rlinf_actors.messaging.pieces import ArrivingParts
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.messaging.receive import PendingReceive, PostedReceive, traced
from rlinf_actors.messaging.receive_into import PartInPlace, ReceiveInto, in_place
from rlinf_actors.messaging.routes import CPU, LANE
from rlinf_actors.messaging.tensor_receiver import IncomingTensors, Reply, TensorReceiver
from rlinf_actors.messaging.tensor_sender import TensorSender
from rlinf_actors.messaging.tensor_transfer import DetachedTensors, TransferEndpoint
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import arrays, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.messaging.mailbox import Posted

log = logging.getLogger(__name__)

R = TypeVar("R", bound=PendingReceive)
_NO_TENSORS = DetachedTensors()


class Messenger:
    """Sends and receives the messages of one worker.

    Args:
        runtime: of this worker.
        connect: awaited on the loop; returns the runtime once it is in session with the head.
        reply: sends a frame on the link on which a message arrived.
        window: most bytes in flight to one worker.
        endpoint: this worker's name, id and devices, for tensor transfers.

    Attributes:
        when_read: `UnreadStreams.when_read`. Set by the owner of the server.
        peer_gone: called, on any thread, with each watched peer that is gone. Set by the Broadcaster.
    """

    def __init__(
        self,
        runtime: Runtime,
        connect: Callable[[], Awaitable[Runtime]],
        reply: Reply,
        window: int,
        endpoint: TransferEndpoint,
    ) -> None:
        self.directory = WorkerDirectory(runtime, connect)
        self.routed = PeerWatch(self.directory, runtime.io)
        self.starts = GroupStarts(self.directory)
        self.when_read: Callable[[str, Callable[[], object]], object] = lambda worker, callback: callback()
        self.peer_gone: Callable[[Peer], None] = lambda peer: None
        self._io = runtime.io
        self._reply = reply
        self._window = window
        self.endpoint = endpoint
        self._cpu_by_lane = endpoint.overrides.get(CPU) == LANE
        self._lock = threading.Lock()
        self._mailbox = Mailbox()
        self._credit = CreditAccumulator()
        self._outboxes: dict[Peer, Outbox] = {}
        self._receivers: dict[tuple[str, int], tuple[Outbox, RemoteGroup]] = {}  # found before, by group and rank
        self._tensor_senders: dict[Peer, TensorSender] = {}
        self._watched: set[Peer] = set()
        self._broken: Recent[str, Exception] = Recent()  # living workers to which a connection was lost, by id
        self._unread: collections.deque[tuple[Key, ArrivedMessage]] = collections.deque()
        self.blocking = BlockingReceives(self)
        self.late_targets: dict[Key, Callable[[], None]] = {}  # to be called when a receive of the key begins to wait
        self.arriving = ArrivingParts(self.directory, self)
        self.tensor_receiver = TensorReceiver(endpoint, self.directory, reply, self._tensor_senders)

    # --- sending ---

    def send(
        self,
        group: str,
        rank: int | Sequence[int],
        value: Any,
        piggyback: Any,
        *,
        now: bool,
        options: CollectiveGroupOptions | None = None,
        in_pieces: bool = False,
    ) -> AsyncWork[None] | None:
        """Send an object to the worker *group*:*rank*, together with *piggyback* unless that is None.

        Return an AsyncWork that is done when the message was sent within the window and the sender's buffers may be
        reused. *now* is True if a thread waits for that, so that the link must not delay the message; the result is
        then None if nothing is left to wait for.
        *in_pieces* is True if the receiver may be waiting with a tensor of its own (`messaging.pieces`).

        Raises:
            ValueError: a tensor in *value* is not contiguous. Nothing was sent.
            SerializationError: *value* or *piggyback* cannot be pickled. Nothing was sent.
        """
        box = self._known(group, rank)
        tensors, alone = _NO_TENSORS, piggyback is None
        plain = payload.encode_plain(value) if alone else None
        if plain is not None:
            parts, borrowed = plain, False
        elif alone and not self._cpu_by_lane and (array := arrays.encode(value)) is not None:
            parts, borrowed = contents.copy_small(array)
        else:
            contents.check_contiguous(value)
            tensors = self.detached_tensors()
            parts, borrowed = contents.encode(value, piggyback, tensors)
            tensors.record_ready()
        message = OutgoingMessage("", parts, borrowed, None, tensors, options, now, in_pieces=in_pieces)
        if box is not None and not tensors.tensors:
            if not now:
                message.waited_for(box.peer)
            box.post(message)
            return message.work
        to = addressing.address(group, rank)
        work = message.work = AsyncWork(f"send() to {to}")
        if (active := recorder.active) is not None:
            message.span = traced(active, work, f"send to {to}")

        def found(peer: Peer | Exception) -> None:
            try:
                if isinstance(peer, Exception):
                    raise peer
                self.post(peer, message)
                self._remember(to, peer)
            except Exception as error:  # noqa: BLE001 - it reaches the waiter
                work.reject(prefixed(error, work._what))

        self.directory.peer(to, found)
        return work

    def _known(self, group: str, rank: int | Sequence[int]) -> Outbox | None:
        """Return the outbox for messages without tensors; None to ask the directory, which answers in order."""
        if type(rank) is not int or recorder.active is not None or group in self.directory.waiting:
            return None
        found = self._receivers.get((group, rank))
        if found is None:
            return None
        box, remote = found
        peers = remote.peers
        if remote.closing or remote.gone._finished or rank >= len(peers) or peers[rank] is not box.peer:
            return None
        return None if box.peer in self._tensor_senders else box

    def _remember(self, to: WorkerAddress, peer: Peer) -> None:
        """Let `_known` find the outbox to the worker *to* from now on, unless a look-up of its group is under way."""
        remote, box = self.directory.known(to.root_group_name), self._outboxes.get(peer)
        if remote is not None and box is not None and len(to.rank_path) == 1:
            self._receivers[to.root_group_name, to.rank] = box, remote

    def detached_tensors(self) -> DetachedTensors:
        return DetachedTensors(self._cpu_by_lane)

    def post(self, peer: Peer, message: OutgoingMessage) -> None:
        """Send a message to the worker *peer*, after all messages posted to it before."""
        sender = self._tensor_senders.get(peer)
        if sender is None and message.tensors.tensors:
            sender = self.tensor_sender(peer)
        (sender or self._outbox(peer)).post(message)

    def tensor_sender(self, peer: Peer) -> TensorSender:
        """Return the TensorSender to *peer*. The first call asks which transfers *peer* supports, without waiting."""
        outbox = self._outbox(peer)
        with self._lock:
            sender = self._tensor_senders.get(peer)
            if sender is None:
                sender = self._tensor_senders[peer] = TensorSender(self.endpoint, peer, outbox)
        if sender.open():
            peer.on_gone(lambda _error: self._tensor_senders.pop(peer, None))
        return sender

    def _outbox(self, peer: Peer) -> Outbox:
        box = self._outboxes.get(peer)
        if box is None:
            self.watch(peer)
            with self._lock:
                box = self._outboxes.get(peer)
                if box is None:
                    box = Outbox(peer, self.endpoint.name, self.endpoint.worker_id, self._window)
                    if peer.error is None:  # else `_gone` has run already, and would not remove the outbox
                        self._outboxes[peer] = box
            broken = self._broken.get(peer.worker_id)
            if broken is not None:
                box.fail(broken)
        return box

    def in_flight(self) -> tuple[int, int]:
        """Return the bytes that receivers have not returned as credit, and the number of messages that wait for it."""
        boxes = list(self._outboxes.values())
        return sum(box.outstanding for box in boxes), sum(box.waiting for box in boxes)

    def error_of(self, peer: Peer) -> Exception | None:
        """Return the reason why messages can no longer be exchanged with the worker *peer*; None if they can."""
        return peer.error or self._broken.get(peer.worker_id)

    # --- receiving ---

    def receive(self, sender: WorkerAddress, convert: Callable[[Any], Any] = lambda value: value) -> PendingReceive:
        """Begin to receive the next object that *sender* sends, and return the PendingReceive.

        *convert* makes the result of the PendingReceive from the object.
        """
        return self._begin(PendingReceive(f"recv() from {sender}", self, sender, convert), sender)

    def receive_into(self, sender: WorkerAddress, target: Any) -> ReceiveInto:
        """Begin to receive into the tensor *target* the next tensor that *sender* sends. A thread must wait for it."""
        return self._begin(ReceiveInto(f"recv() from {sender}", self, sender, target), sender)

    def _begin(self, work: R, sender: WorkerAddress) -> R:
        if (active := recorder.active) is not None:
            work.span = traced(active, work, f"recv from {sender}")
        work.posted.enter()
        return work

    def post_receive(self, posted: PostedReceive, peer: Peer | Exception) -> None:
        """Let *posted* receive the next message of *peer*. If *peer* is an exception, fail the receive with it.

        If *peer* is a GroupNotFoundError, the receive still gets a message that the ended group has sent before.
        """
        if isinstance(peer, GroupNotFoundError):
            with self._lock:  # a group that even the head has forgotten may have sent messages before
                has_messages = self._mailbox.has_messages(posted.key)
            if has_messages:
                self._post_receive(posted, None)
                return
        if isinstance(peer, Exception):
            failure = peer
            self._fail([posted], lambda what: prefixed(failure, what))
            return
        self.watch(peer)
        self._post_receive(posted, peer)

    def _post_receive(self, posted: Posted, peer: Peer | None) -> None:
        posted.incarnation = "" if peer is None else peer.worker_id
        if self._unread:
            self._put_back()
        with self._lock:
            if posted.abandoned:
                return
            message, stale = self._mailbox.posted(posted.key, posted)
            dead = message is None and peer is not None and self.error_of(peer) is not None
            dead = dead and (peer not in self._watched or peer.error is None)  # else `_gone` is to come
            if dead:
                self._mailbox.withdraw(posted.key, posted)
        if stale:
            log.warning("dropped %s of an earlier %s, which has ended", counted(len(stale), "message"), posted.key[0])
        if message is not None:
            self._give(posted, message)
        elif dead:
            assert peer is not None
            self._fail_gone([posted], peer)

    def wait(self, work: PendingReceive, timeout: float | None) -> Any:
        """Wait for the object of *work* and return it.

        After *timeout* seconds withdraw the receive and raise CallTimeoutError.
        """
        try:
            return work.wait(timeout)
        except CallTimeoutError:
            if work.done() or not self.withdraw(work.posted):
                return work.wait()  # the message came at the last moment, or the work failed with this very error
        raise work.timed_out(timeout or 0.0)

    def withdraw(self, posted: Posted) -> bool:
        """Withdraw a receive, so that it gets no message.

        Return False if it has its message or error already, else True.
        """
        with self._lock:
            message, posted.loading = posted.loading, None
            if posted.closed and message is None:
                return False
            posted.closed = True
            self._mailbox.withdraw(posted.key, posted)
        if message is not None:  # its tensors are still on their way
            self._unread.append((posted.key, message))
            self._put_back()
        return True

    def arrives_anywhere(self, frame: frames.UserMessage) -> bool:
        """Return True if `arrived` may handle this message on any thread, False if only the loop thread may."""
        return frame.transfer is None and not frame.unwritten and recorder.active is None

    def arrived(self, link: bytes, frame: frames.UserMessage, parts: AuthenticatedParts) -> None:
        """Give a message that arrived to the receive that waits for it, else to the mailbox; acknowledge it.

        Loop thread, unless `arrives_anywhere` allows any.
        """
        if frame.n and not frame.unwritten:
            self._reply(link, frames.Held(frame.id, frame.n))
        tensors: Any = in_place(parts) if len(parts) > 1 else None
        if frame.transfer is not None:
            tensors = self.tensor_receiver.arrived(link, frame, parts)
        elif frame.unwritten:
            tensors = self.arriving.begin(link, frame, parts)
        message = ArrivedMessage(frame.src_id, frame.size, parts, link, frame.id, tensors)
        message.flow = frame.flow
        key = (frame.src, frame.stream)
        if self._unread:
            self._put_back()
        with self._lock:
            wanted = self._mailbox.wants(key, frame.src_id)
            posted = self._mailbox.arrived(key, message) if wanted else None
        if isinstance(tensors, PartInPlace):
            tensors.only_for(posted)
        if posted is not None:
            self._give(posted, message)
        elif not wanted:
            self._return_credit(message, message.size)
        if isinstance(tensors, IncomingTensors):
            self.tensor_receiver.begin(link, frame, tensors)  # last: the receive may have offered its tensor

    def _give(self, posted: Posted, message: ArrivedMessage) -> None:
        """Give *message* to the receive *posted*, as soon as the tensors beside the message are here.

        Then the credit for the message returns to its sender: the thread that waits for the message comes first. If the
        receive no longer wants the message, the message goes back to the mailbox.
        """
        size, message.size = message.size, 0  # a message that is put back must not be counted twice
        tensors = message.tensors
        with self._lock:
            work = posted.work() if not posted.closed else None
            posted.closed = True
            loading = work is not None and work.waits_for_tensors and tensors is not None and not tensors.done()
            posted.loading = message if loading else None
        if loading:
            assert work is not None
            work.begins(message)
            tensors._on_done(partial(self._loaded, posted))
        elif work is None or not work.take(message):
            self._unread.append((posted.key, message))
            self._put_back()
        self._return_credit(message, size)

    def _loaded(self, posted: Posted) -> None:
        """Give the message to the receive *posted*, after the tensors beside the message have arrived or are lost."""
        with self._lock:
            message, posted.loading = posted.loading, None
            work = posted.work()
        if message is not None and (work is None or not work.take(message)):
            self._unread.append((posted.key, message))
            self._put_back()

    def _return_credit(self, message: ArrivedMessage, size: int) -> None:
        with self._lock:
            due = self._credit.taken(message.link, message.outbox, size)
        if due:
            self._reply(message.link, frames.Returned(message.outbox, due))

    def unread(self, key: Key, message: ArrivedMessage) -> None:
        """Put a message that no caller has seen back into the mailbox. Any thread; a finalizer may call this."""
        self._unread.append((key, message))
        self._io.call(self._put_back)

    def _put_back(self) -> None:
        while self._unread:
            given = []
            with self._lock:
                unread = [self._unread.popleft() for _ in range(len(self._unread))]
                for key, message in sorted(unread, key=lambda pair: pair[1].order):
                    posted = self._mailbox.put_back(key, message)
                    if posted is not None:
                        given.append((posted, message))
            for posted, message in given:
                self._give(posted, message)

    # --- workers that are gone ---

    def watch(self, peer: Peer) -> None:
        """Fail all receives, sends and broadcasts that need the worker *peer* as soon as that worker is gone."""
        with self._lock:
            if peer in self._watched:
                return
            self._watched.add(peer)
        peer.on_gone(lambda error: self._died(peer, error))

    def link_lost(self, _link: bytes, worker_id: str) -> None:
        """End all exchange of messages with a worker whose connection was lost, because a message may be missing.

        *worker_id* is "" if the connection was not a worker's; then nothing ends. Loop thread only.
        """
        if not worker_id:
            return  # a driver sends no messages
        with self._lock:
            peers = [peer for peer in self._watched if peer.worker_id == worker_id]
            self._broken[worker_id] = ConnectionLostError(
                "the connection over which it sends was lost, and is there again: a message may be missing. "
                "It runs, but can exchange no more messages with this worker: launch one of the two groups again"
            )
        for peer in peers:
            self._gone(peer)

    def link_forgotten(self, link: bytes) -> None:
        """Stop returning credit over *link*, whose process has ended; fail what it was writing. Loop thread only."""
        with self._lock:
            self._credit.forget(link)
        self.arriving.forget(link)

    def _died(self, peer: Peer, error: Exception) -> None:
        if not isinstance(error, WorkerDiedError):
            self._gone(peer)
        elif self._io.inside():
            self.when_read(peer.worker_id, partial(self._gone, peer))
        else:
            self._io.call(self.when_read, peer.worker_id, partial(self._gone, peer))

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            if isinstance(peer.error, ConnectionLostError):  # for later messages, by another Peer of the same worker
                if peer.worker_id not in self._broken:
                    self._broken[peer.worker_id] = peer.error
            elif isinstance(peer.error, WorkerDiedError):
                self._broken.pop(peer.worker_id, None)  # from now on every Peer of it has this error
            lost = self._mailbox.sender_gone(peer.name, peer.worker_id)
            self._watched.discard(peer)
            box = self._outboxes.pop(peer, None)
            found_before = list(self._receivers.items())  # a list: other threads add to the dict
            self._receivers = {to: found for to, found in found_before if found[0] is not box}
            self.blocking.forget(peer)
        if box is not None and peer.error is None:
            box.fail(self._broken[peer.worker_id])
        self._fail_gone(lost, peer)
        self.arriving.fail(peer)
        self.peer_gone(peer)

    def _fail_gone(self, receives: list[Posted], peer: Peer) -> None:
        error = self.error_of(peer)
        assert error is not None
        self._fail(receives, lambda what: peer_gone_error(peer, error, what))

    def _fail(self, receives: list[Posted], error: Callable[[str], Exception]) -> None:
        for posted in receives:
            with self._lock:
                work = None if posted.closed else posted.work()
                posted.closed = True
            if work is not None:
                work.reject(error(work._what))

    def forget(self, key: Key) -> None:
        """Drop the messages in the queue *key*, and later ones too, for good. Their credit returns to the sender."""
        with self._lock:
            messages = self._mailbox.forget(key)
        for message in messages:
            self._return_credit(message, message.size)
