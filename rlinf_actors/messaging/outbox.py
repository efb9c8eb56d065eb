"""The messages from this worker to one other worker: sent in order, within the window, each completed once.

Any thread may post. The outbox sends under its own lock, which keeps the order of the messages on the link. A send
completes at once if every part was copied. Otherwise the link reads the sender's own memory, and the send completes
when the receiver acknowledges by a Held frame that it holds the message.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import msgspec

from rlinf_actors.messaging.contents import size_of
from rlinf_actors.messaging.directory import peer_gone_error
from rlinf_actors.messaging.flow_control import OVERHEAD, Window
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions
from rlinf_actors.messaging.tensor_transfer import DetachedTensors
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.tracing import flows, recorder
from rlinf_actors.wire import frames


class OutgoingMessage(msgspec.Struct, eq=False):
    """A message on its way from this worker to another.

    Attributes:
        stream: "" for send and recv, else the stream of a broadcast tree.
        parts: contents of the message.
        borrowed: True if some parts are the sender's own memory, which must not change before `work` is done.
        work: the AsyncWork of the send.
        tensors: tensors that travel beside the message.
        options: options of the process group that carries these tensors; None for the defaults.
        now: True if a thread waits for the send, so that the link must not delay the message.
        transfer: header of the tensors beside the message; set by the tensor sender.
        extra_bytes: bytes of these tensors, which count in the window.
        on_sent: called with the outbox's lock held when the message is on the link.
        span: number of the send's span in the trace, 0 if this process is not traced.
        pending: number of operations that `work` waits for: the message itself, and the lane if tensors use a lane.
    """

    stream: str
    parts: Sequence[Buffer]
    borrowed: bool
    work: AsyncWork[None]
    tensors: DetachedTensors
    options: CollectiveGroupOptions | None = None
    now: bool = False
    transfer: frames.TensorTransfer | None = None
    extra_bytes: int = 0
    on_sent: Callable[[], None] | None = None
    pending: int = 1
    span: int = 0
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        """Bytes that the message takes up in the window until the receiver returns them as credit."""
        return size_of(self.parts) + OVERHEAD + self.extra_bytes

    def complete_one(self) -> None:
        """Count one of the `pending` operations as completed. When none is left, complete `work`."""
        with self._lock:
            self.pending -= 1
            last = self.pending == 0
        if last:
            self.work.resolve(None)

    def fail_for(self, peer: Peer, error: Exception) -> None:
        """Fail `work` because the receiver *peer* is gone; *error* says how the receiver ended."""
        self.work.reject(peer_gone_error(peer, error, self.work._what))


class Outbox:
    """Sends this worker's messages to the worker *peer*, with at most *limit* bytes in flight.

    *name* and *worker_id* are those of this worker.
    """

    def __init__(self, peer: Peer, name: str, worker_id: str, limit: int) -> None:
        self._peer = peer
        self._name = name
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._window: Window[OutgoingMessage] = Window(limit)
        self._unacknowledged: dict[int, OutgoingMessage] = {}
        self._numbers = itertools.count(1)
        self._sent = 0
        self._error: Exception | None = None
        self._id = peer.listen(self._acknowledged)
        peer.on_gone(self.fail)

    def post(self, message: OutgoingMessage) -> None:
        """Send *message* as soon as the window has room for it. Any thread."""
        size = message.size
        with self._lock:
            error = self._error
            sent = error is None and self._window.offer(size, message) and self._send(message, message.now)
        if error is not None:
            message.fail_for(self._peer, error)
        elif sent:
            message.complete_one()

    def _acknowledged(self, frame: frames.AnyFrame) -> None:
        """Handle the receiver's credit (Returned) or acknowledgement (Held). Loop thread only.

        Credit makes room in the window, so waiting messages are sent. An acknowledgement completes the send of its
        message.
        """
        done: list[OutgoingMessage] = []
        if type(frame) is frames.Returned:
            with self._lock:
                done = [message for message in self._window.returned(frame.size) if self._send(message, False)]
        elif type(frame) is frames.Held:
            with self._lock:
                held = self._unacknowledged.pop(frame.n, None)
            done = [held] if held is not None else []
        for message in done:
            message.complete_one()

    def fail(self, error: Exception) -> None:
        """Fail every message, current and future, because the receiver is gone or a message may be lost. Any thread."""
        with self._lock:
            self._error = self._error or error
            lost = [*self._unacknowledged.values(), *self._window.remove_waiting()]
            self._unacknowledged.clear()
        for message in lost:
            message.fail_for(self._peer, error)

    def _send(self, message: OutgoingMessage, now: bool) -> bool:
        """Put a message on the link. Return True if the send is complete then. Call with the lock held.

        If the result is False, the link reads the sender's memory, and the send completes when the receiver
        acknowledges it.
        """
        parts, number = message.parts, 0
        borrowed = message.borrowed
        if borrowed:
            # a copy in shared memory, if the receiver can be lent one: then the sender's memory is free at once
            parts, stored = self._peer.store(parts)
            borrowed = not stored
        if borrowed:
            number = next(self._numbers)
            self._unacknowledged[number] = message
        frame = frames.UserMessage(
            self._id, number, self._name, self._worker_id, message.stream, message.size, message.transfer
        )
        self._peer.send(frame, parts, now=now, alone=not message.stream)
        if message.on_sent is not None:
            message.on_sent()
        self._sent += 1
        if message.span and recorder.active is not None:
            recorder.active.flow_out(message.span, flows.of_message(self._worker_id, self._id, self._sent))
        return not borrowed
