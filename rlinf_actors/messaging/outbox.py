"""The messages from this worker to one other worker: sent in order, within the window, each settled once.

Theory of operation. A message takes four steps:

1. *Decide*: `messaging.messenger` decides whether tensors travel beside the message (`messaging.tensor_sender`, by the
   table of `messaging.routes`). Everything else travels in the message's parts. The window decides when the message is
   sent: at once, or when the receiver returns credit.
2. *Place*: large parts are copied into shared memory if the receiver can open that and there is room
   (`net.buffer_lending`). A large tensor of `send_tensor` gets its block before the message is sent, and is written
   afterwards, piece by piece (`messaging.pieces`). Otherwise the link reads the sender's own memory.
3. *Send*: the message goes to the link under the outbox's lock, which keeps the order.
4. *Settle*: `OutgoingMessage.settle` ends the send, at once if every part was copied, else when the receiver
   acknowledges by a Held frame that it holds the message. `fail` ends all sends when the receiver is gone. A block of
   shared memory belongs to the receiver from step 3 on: it is free again when the receiver reports by a Dropped frame
   that it no longer uses the block, or when the receiver's process has ended.

Any thread may post.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from rlinf_actors import counters, forks
from rlinf_actors.messaging import contents, pieces
from rlinf_actors.messaging.directory import peer_gone_error
from rlinf_actors.messaging.flow_control import OVERHEAD, Window
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.messaging.routes import INLINE
from rlinf_actors.messaging.tensor_transfer import DetachedTensors
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.held_signals import undisturbed
from rlinf_actors.net.shared_memory import SHARED_FROM
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames

_settling = forks.free_in_children(threading.Lock())
"""Guards `OutgoingMessage.pending` of messages of which a lane carries tensors; the others need no lock."""
Settle = Callable[[], object]
"""Ends a send of which everything else is done. Called once."""


class OutgoingMessage(msgspec.Struct, eq=False):
    """A message on its way from this worker to another.

    Attributes:
        stream: "" for send and recv, else the stream of a broadcast tree.
        parts: contents of the message.
        borrowed: True if some parts are the sender's own memory, which must not change before the send is done.
        work: the AsyncWork of the send; None as long as no code has to wait for it.
        tensors: tensors that travel beside the message.
        options: options of the process group that carries these tensors; None for the defaults.
        now: True if a thread waits for the send, so that the link must not delay the message.
        transfer: header of the tensors beside the message; set by the tensor sender.
        extra_bytes: bytes of these tensors, which count in the window.
        on_sent: called with the outbox's lock held when the message is on the link.
        span: number of the send's span in the trace, 0 if this process is not traced.
        pending: number of operations that `work` waits for: the message itself, and the lane if tensors use a lane.
        in_pieces: True to write a large last part while the receiver reads it (messaging.pieces).
        write: writes that part, which the receiver waits for; None if nothing is left to write.
    """

    stream: str
    parts: Sequence[Buffer]
    borrowed: bool
    work: AsyncWork[None] | None
    tensors: DetachedTensors
    options: CollectiveGroupOptions | None = None
    now: bool = False
    transfer: frames.TensorTransfer | None = None
    extra_bytes: int = 0
    on_sent: Callable[[], None] | None = None
    pending: int = 1
    span: int = 0
    in_pieces: bool = False
    write: Settle | None = None

    @property
    def size(self) -> int:
        """Bytes that the message takes up in the window until the receiver returns them as credit."""
        size = OVERHEAD + self.extra_bytes
        for part in self.parts:
            size += part.nbytes if type(part) is memoryview else len(part)
        return size

    def settle(self, error: Exception | None = None) -> None:
        """End one of the `pending` operations. The last one completes `work`, if any; *error* fails it at once."""
        last = self.pending == 1  # then no other thread settles this message
        if not last:
            with _settling:
                self.pending -= 1
                last = self.pending == 0
        if self.work is not None:
            if error is not None:
                self.work.reject(error)
            elif last:
                self.work.resolve(None)

    def waited_for(self, peer: Peer) -> AsyncWork[None]:
        """Return `work`, made now if there is none, since the send to *peer* is not done when it has been posted."""
        if self.work is None:
            self.work = AsyncWork(f"send() to {peer.name}")
        return self.work

    def fail_for(self, peer: Peer, error: Exception) -> None:
        """Fail the send because the receiver *peer* is gone; *error* says how the receiver ended."""
        self.settle(peer_gone_error(peer, error, self.waited_for(peer)._what))


class Outbox:
    """Sends this worker's messages to the worker *peer*, with at most *limit* bytes in flight.

    *name* and *worker_id* are those of this worker. `peer` is the receiver.
    """

    def __init__(self, peer: Peer, name: str, worker_id: str, limit: int) -> None:
        self.peer = peer
        self._name = name
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._window: Window[OutgoingMessage] = Window(limit)
        self._unacknowledged: dict[int, OutgoingMessage] = {}
        self._numbers = itertools.count(1)
        self._error: Exception | None = None
        self._id = peer.listen(self._acknowledged, anywhere=True)
        peer.on_gone(self.fail)

    @property
    def outstanding(self) -> int:
        """Bytes in flight. Any thread."""
        return max(0, self._window.outstanding)

    @property
    def waiting(self) -> int:
        """Number of messages that wait for credit. Any thread."""
        return self._window.waiting

    def post(self, message: OutgoingMessage) -> None:
        """Send *message* as soon as the window has room for it. Any thread.

        If the message has no `work` afterwards, the send is done.
        """
        try:
            settle = undisturbed(None, self._offer, message)  # or a message would count that was never sent
            if settle is not None:
                settle()
        except BaseException:  # a signal handler raised
            if message.write is not None:  # the receiver knows of the message, and waits for the rest
                message.write()
            raise

    def _offer(self, message: OutgoingMessage) -> Settle | None:
        size = message.size
        with self._lock:
            error = self._error
            if error is None:
                if self._window.offer(size, message):
                    return self._send(message, size, message.now, message.in_pieces)
                message.waited_for(self.peer)
                return None
        return partial(message.fail_for, self.peer, error)

    def _acknowledged(self, frame: frames.AnyFrame) -> None:
        """Handle the receiver's credit (Returned) or acknowledgement (Held). Any thread.

        Credit makes room in the window, so waiting messages are sent. An acknowledgement completes the send of its
        message.
        """
        settles: list[Settle | None] = []
        if type(frame) is frames.Returned:
            with self._lock:
                due = self._window.returned(frame.size)
                settles = [self._send(message, message.size, False, False) for message in due]
        elif type(frame) is frames.Held:
            with self._lock:
                held = self._unacknowledged.pop(frame.n, None)
            settles = [held.settle] if held is not None else []
        for settle in settles:
            if settle is not None:
                settle()

    def fail(self, error: Exception) -> None:
        """Fail every message, current and future, because the receiver is gone or a message may be lost. Any thread."""
        with self._lock:
            self._error = self._error or error
            lost = [*self._unacknowledged.values(), *self._window.remove_waiting()]
            self._unacknowledged.clear()
        for message in lost:
            message.fail_for(self.peer, error)

    def _send(self, message: OutgoingMessage, size: int, now: bool, in_pieces: bool) -> Settle | None:
        """Place the large parts of a message, and put the message on the link. Call with the lock held.

        Return what settles the send, to be called without the lock. None if no code waits for that, or if the link
        reads the sender's memory: then the receiver's Held settles the send.
        """
        parts, number, unwritten = message.parts, 0, 0
        settle: Settle | None = None if message.work is None else message.settle
        block = self._allocate(parts) if in_pieces else None
        if block is not None:
            number, unwritten = next(self._numbers), len(block)
            settle = message.write = partial(self._write, message, block, parts[-1], number)
            parts = [*parts[:-1], block]
        elif message.borrowed:
            # a copy in shared memory, if the receiver can be lent one: then the sender's memory is free at once
            parts, stored = self.peer.lending.store(parts)
            if not stored:
                number = next(self._numbers)
                message.waited_for(self.peer)
                self._unacknowledged[number] = message
                settle = None
        credit = size if message.stream else self._window.ask(size)
        active = recorder.active if message.span else None
        flow = active.new_flow() if active is not None else 0
        frame = frames.UserMessage(
            self._id, number, self._name, self._worker_id, message.stream, credit, message.transfer, unwritten, flow
        )
        self.peer.post(frames.encode(frame), parts, now=now, alone=not message.stream)
        if message.on_sent is not None:
            message.on_sent()
        counts = counters.mine.sent[INLINE]  # not counters.sent(): each small message comes here
        if len(parts) == 1:
            counts[0] += 1
            counts[1] += size - OVERHEAD
        elif small := [part for part in parts[1:] if memoryview(part).nbytes < SHARED_FROM]:
            # small buffers, as of arrays, travel in the message; large parts are counted where their path is chosen
            counts[0] += 1
            counts[1] += contents.size_of([parts[0], *small])
        if active is not None:
            active.flow_out(message.span, flow)
        return settle

    def _allocate(self, parts: Sequence[Buffer]) -> memoryview | None:
        """Return a block for the last part, to write in pieces; None if the part is too small, or cannot be lent."""
        size = memoryview(parts[-1]).nbytes if len(parts) == 2 else 0
        return self.peer.lending.allocate(size) if size >= pieces.FROM else None

    def _write(self, message: OutgoingMessage, block: memoryview, part: Buffer, number: int) -> None:
        """Write the last part of message *number* into its block, and tell the receiver after each piece."""

        def tell(size: int) -> None:
            self.peer.send(frames.Written(self._id, number, size), now=True)
            if size in (0, len(block)):
                message.write = None

        interrupt = pieces.write(block, part, tell)
        message.settle()
        if interrupt is not None:
            raise interrupt
