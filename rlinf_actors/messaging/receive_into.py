"""Receive a tensor into a given tensor, the target, with as few copies as the tensor's path allows.

* From shared memory in pieces (`messaging.pieces`): the waiting thread copies each piece as soon as it is written.
* By a lane: the lane receives into the target, if the target is like the tensor that arrives.
* From another node by bulk streams (`net.bulk`): they receive, or decrypt, into the target, if the receive waits
  when the tensor begins to arrive, or soon after.
* By any other path: the tensor is copied into the target when it is complete.

The target belongs to its user again as soon as the receive has ended, also if the receive has failed, timed out or was
cancelled. Then nothing writes to it any more, and what it holds is undefined unless the tensor was refused because of
its shape or dtype. The message of such a receive goes to the next receive.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.messaging import contents
from rlinf_actors.messaging.mailbox import ArrivedMessage
from rlinf_actors.messaging.pieces import ArrivingPart
from rlinf_actors.messaging.receive import PendingReceive
from rlinf_actors.messaging.tensor_receiver import IncomingTensors
from rlinf_actors.messaging.tensor_transfer import DetachedTensors
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.bulk_transfers import GivenMemory
from rlinf_actors.runtime.future import Promise
from rlinf_actors.wire import arrays, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.messaging.mailbox import Posted
    from rlinf_actors.messaging.messenger import Messenger


class PartInPlace:
    """The last part of a message, which bulk streams have received into memory that a receive has given."""

    def __init__(self, parts: AuthenticatedParts, given: GivenMemory) -> None:
        self.given = given
        self._parts = parts

    @property
    def parts(self) -> AuthenticatedParts:
        return AuthenticatedParts([*self._parts[:-1], self.given.memory])

    def only_for(self, posted: Posted | None) -> None:
        """Take the memory back, unless the receive *posted* has given it."""
        work = None if posted is None else posted.work()
        if not isinstance(work, ReceiveInto) or work.given is not self.given:
            self.given.take_back()

    def done(self) -> bool:
        return True

    def tensors(self) -> list[Any]:
        return []


def in_place(parts: AuthenticatedParts) -> PartInPlace | None:
    """Return the last part of a message that has arrived, if it is in memory that a receive has given."""
    owner = getattr(parts[-1], "obj", None) if parts else None
    given = owner.given() if isinstance(owner, arrays.TensorMemory) and owner.given is not None else None
    return None if given is None else PartInPlace(parts, given)


def target_for(
    messenger: Messenger, frame: frames.UserMessage, parts: Sequence[Buffer], size: int, again: Callable[[], None]
) -> GivenMemory | None:
    """Return the memory of the tensor of the receive that gets a message; None if it has none that fits. Loop thread.

    The last of *parts* begins to arrive, and has *size* bytes. *again* is called on the loop when the next receive from
    this sender begins to wait.
    """
    if frame.transfer is not None or frame.unwritten or frame.stream:
        return None
    key = (frame.src, frame.stream)
    messenger.late_targets[key] = again  # first: a receive that this look-up does not see finds it
    with messenger._lock:
        posted = None if messenger._unread else messenger._mailbox.next_receive(key, frame.src_id)
    work = None if posted is None else posted.work()
    given = work.give(parts, size) if isinstance(work, ReceiveInto) else None
    if given is not None:
        messenger.late_targets.pop(key, None)
    return given


class ReceiveInto(PendingReceive):
    """A receive into a given tensor, on a thread that waits for it. That thread copies pieces while they are written.

    *target* is the tensor. Only the thread that calls `wait` uses the attributes below `_begun`.
    """

    def __init__(self, what: str, messenger: Messenger, sender: WorkerAddress, target: Any) -> None:
        super().__init__(what, messenger, sender, partial(contents.copy_into, target, sender=sender.get_name()))
        self._target = target
        self._arriving: ArrivingPart | None = None
        self._incoming: IncomingTensors | None = None  # to which the target was offered
        self._lone, self._offer = _offer(target)
        self._begun: Promise[None] = Promise(what)
        self._on_done(partial(self._begun.resolve, None))
        self._copied: ArrivingPart | None = None  # all of it is in the target
        self._giving = threading.Lock()
        self._waiting = False  # a thread waits, so the target may be given
        self.given: GivenMemory | None = None  # the target, for bulk streams

    def give(self, parts: Sequence[Buffer], size: int) -> GivenMemory | None:
        """Return the target's memory for a tensor of *size* bytes that begins to arrive, None if it does not fit.

        *parts* are those of the message; the last one is missing. Loop thread.
        """
        target = self._target
        with self._giving:
            if not self._waiting or self.given is not None or self.done():
                return None
            if type(target) is not sys.modules["torch"].Tensor or not contents.is_plain(target):
                return None
            array = arrays.encode(target)
            if array is None or len(parts) != 2 or memoryview(array[1]).nbytes != size:
                return None
            if bytes(parts[0]) != bytes(array[0]):  # another shape or dtype, or pickled
                return None
            memory = memoryview(array[1])
            self.given = GivenMemory(memory)
            owner: Any = memory.obj
            owner.given = weakref.ref(self.given)
            return self.given

    def begins(self, message: ArrivedMessage) -> None:
        tensors = message.tensors
        if isinstance(tensors, ArrivingPart):
            self._arriving = tensors
            self._begun.resolve(None)
        elif self._offer is not None and isinstance(tensors, IncomingTensors) and tensors.parts == self._lone:
            self._incoming = tensors
            tensors.offer(self._offer)

    def _wait(self, timeout: float | None) -> Any:
        self._waiting = True
        try:
            again = self._messenger.late_targets.pop(self.posted.key, None)
            if again is not None and not self.done():
                self._messenger._io.call(again)
            return self._wait_within(timeout)
        except BaseException:
            with self._giving:
                self._waiting, given = False, self.given
            if given is not None:
                given.take_back()
            if self._incoming is not None:
                self._incoming.take_back()
            raise

    def _wait_within(self, timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(CallTimeoutError):  # raised below
            self._begun.wait(timeout)
        arriving, self._arriving = self._arriving, None
        if arriving is not None and self._copy(arriving, deadline):
            self._copied = arriving
        return super()._wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _copy(self, arriving: ArrivingPart, deadline: float | None) -> bool:
        """Copy the pieces of *arriving* into the target as they are written. Return True if all were copied."""
        source = self._source(arriving)
        if source is None:
            return False
        reports: queue.SimpleQueue[int] = queue.SimpleQueue()
        arriving.follow(reports.put)
        start, target, done = source.data_ptr(), self._target.data_ptr(), 0
        while done < arriving.size:
            try:
                upto = reports.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if upto < 0:
                return False
            if upto > done:
                ctypes.memmove(target + done, start + done, upto - done)
                done = upto
        return True

    def _source(self, arriving: ArrivingPart) -> Any:
        """Return the tensor that arrives, over memory that is not written yet; None if it cannot be copied as bytes."""
        try:
            received = payload.decode(arriving.parts)
            contents.check_into(self._target, received, "")
        except Exception:  # noqa: BLE001 - raised again when the message is complete
            return None
        start = ctypes.addressof(ctypes.c_ubyte.from_buffer(arriving.parts[-1]))
        plain = contents.is_plain(self._target) and contents.is_plain(received)
        whole = received.data_ptr() == start and received.numel() * received.element_size() == arriving.size
        return received if plain and whole else None

    def _make_result(self, value: None) -> Any:
        message, incoming, given = self._message, self._incoming, self.given
        tensors = None if message is None else message.tensors
        received = incoming is not None and incoming.in_target and tensors is incoming
        if given is not None:
            received = isinstance(tensors, PartInPlace) and tensors.given is given and given.given
            if not received:  # another message came before
                given.take_back()
        if not received and (tensors is None or tensors is not self._copied):
            return super()._make_result(value)
        with self._guard:
            self._message = None
        self._copied = None
        return None


def _offer(target: Any) -> tuple[list[Any], DetachedTensors | None]:
    """Return the message of a lone tensor that travels beside its message, and *target* as such a tensor.

    The second is None if the bytes of a tensor cannot be received into *target*.
    """
    if not target.is_contiguous() or target.is_conj() or target.is_neg():
        return [], None
    detached = DetachedTensors(cpu=True)
    lone = payload.encode(target, copy=None, taker=detached)
    if not detached.tensors:  # too small, or of a kind that always travels inside its message
        return [], None
    detached.record_ready()
    return lone, detached
