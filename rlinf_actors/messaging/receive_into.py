"""Receive a tensor into a given tensor, the target, with as few copies as the tensor's path allows.

* From shared memory in pieces (`messaging.pieces`): the waiting thread copies each piece as soon as it is written.
* By a lane: the lane receives into the target, if the target is like the tensor that arrives.
* By any other path: the tensor is copied into the target when it is complete.

The target belongs to its user again as soon as the receive has ended, also if the receive has failed, timed out or was
cancelled. Then nothing writes to it any more, and what it holds is undefined unless the tensor was refused because of
its shape or dtype. The message of such a receive goes to the next receive.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import time
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
from rlinf_actors.runtime.future import Promise
from rlinf_actors.wire import payload

if TYPE_CHECKING:
    from rlinf_actors.messaging.messenger import Messenger


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

    def begins(self, message: ArrivedMessage) -> None:
        tensors = message.tensors
        if isinstance(tensors, ArrivingPart):
            self._arriving = tensors
            self._begun.resolve(None)
        elif self._offer is not None and isinstance(tensors, IncomingTensors) and tensors.parts == self._lone:
            self._incoming = tensors
            tensors.offer(self._offer)

    def _wait(self, timeout: float | None) -> Any:
        try:
            return self._wait_within(timeout)
        except BaseException:
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
        message, incoming = self._message, self._incoming
        tensors = None if message is None else message.tensors
        received = incoming is not None and incoming.in_target and tensors is incoming
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
