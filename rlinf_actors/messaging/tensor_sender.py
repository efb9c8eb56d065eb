"""TensorSender: send to one worker messages whose accelerator tensors travel beside them.

The first such message asks the receiver which transfers it supports (Ask, answered by Facts). Later messages wait
behind it, in order. For each message the sender chooses a path for every tensor (`routes`), and posts the message to
the outbox with a header that describes the tensors.

Rules: no code touches an accelerator on the loop thread. Messages keep their order. Transfers are posted to a lane
under the outbox's lock, so their order is that of the messages.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import msgspec

from rlinf_actors import counters, exhaustion
from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.messaging import contents, cuda_ipc, process_groups, routes
from rlinf_actors.messaging.cuda_ipc import CudaError
from rlinf_actors.messaging.directory import peer_gone_error
from rlinf_actors.messaging.lane_store import BY_LINK, LaneStore
from rlinf_actors.messaging.lanes import Lane, Lanes, OpenLane
from rlinf_actors.messaging.outbox import Outbox, OutgoingMessage
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions, Wire
from rlinf_actors.messaging.tensor_transfer import (
    DetachedTensors,
    TransferEndpoint,
    as_bytes,
    header_of,
    own_stream,
    tensor_bytes,
)
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.arrays import bytes_of

log = logging.getLogger(__name__)

_BESIDE = (routes.IPC, routes.LANE, routes.LOCAL)
"""Paths whose bytes are in no message, and are counted here."""


class LentTensors(msgspec.Struct, frozen=True):
    """The tensors of one sent message that the receiver uses in the sender's memory. The sender keeps them alive.

    `tensors` has one entry for each tensor of the message: the memory to keep, or None if the tensor takes another
    path.
    """

    tensors: list[Any]
    detached: DetachedTensors
    event: Any


class _Plan(msgspec.Struct):
    """What is needed to send the tensors of one message, each by its own path.

    `lent` has one entry for each tensor: the object to keep alive while the receiver uses its memory, or None.
    """

    headers: list[frames.TensorHeader] = msgspec.field(default_factory=list)
    lent: list[Any] = msgspec.field(default_factory=list)
    staged: list[Buffer] = msgspec.field(default_factory=list)
    by_lane: list[Any] = msgspec.field(default_factory=list)
    event: Any = None
    device: Any = None


class LaneSend:
    """The sender's transfer of one message's tensors by a lane. All these tensors are on one device."""

    def __init__(self, message: OutgoingMessage, tensors: Sequence[Any]) -> None:
        self._message = message
        self._tensors = tensors

    def run(self, wire: Wire) -> None:
        device = self._tensors[0].device
        with own_stream(device):
            self._message.tensors.wait_ready(device)
            wire.send([as_bytes(tensor) for tensor in self._tensors])
        self._message.settle()

    def fail(self, error: Exception) -> None:
        self._message.settle(error)


class TensorSender:
    """Sends messages with accelerator tensors to one worker. Any thread may use it.

    From the first such message on, all messages to that worker pass through it, so that they keep their order.

    Attributes:
        id: number of this sender on the link to the receiver; 0 until `open` was called.
    """

    def __init__(self, endpoint: TransferEndpoint, peer: Peer, outbox: Outbox) -> None:
        self.peer = peer
        self.id = 0
        self._endpoint = endpoint
        self._outbox = outbox
        self._lock = threading.Lock()
        self._facts: frames.Facts | None = None
        self._waiting: list[OutgoingMessage] = []
        self._sending = False
        self._error: Exception | None = None
        self._numbers = itertools.count(1)
        self._lent: dict[int, LentTensors] = {}
        self._lanes = Lanes()
        self._lane_numbers = itertools.count(1)
        self._ccl_problems: dict[int, str] = {}  # by device; "" for none
        self._probe: cuda_ipc.IpcProbe | None = None

    def open(self) -> bool:
        """Ask the receiver which transfers it supports, without waiting.

        Return False if this was called before, else True.
        """
        with self._lock:
            if self.id:
                return False
            self.id = self.peer.listen(self._answered)
        self.peer.on_gone(self._fail)
        try:
            exhaustion.start(exhaustion.OwnThread(target=self._ask, name="rlinf-actors-ask", daemon=True))
        except RuntimeError as error:
            self._ask_without_device(error)
        return True

    def _ask(self) -> None:
        """Ask the receiver which transfers it supports.

        The question has a memory probe, which the receiver tries to open.

        May load torch and start CUDA: do not call it on the loop thread.
        """
        try:
            devices = self._endpoint.devices.get()
            ask = frames.Ask(self.id)
            if devices.driver is not None and devices.home is not None and not self._to_myself:
                probe = cuda_ipc.IpcProbe(devices.driver, devices.home)
                with self._lock:
                    self._probe = probe
                ask = frames.Ask(self.id, devices.uuid(devices.home), probe.memory, probe.event)
        except Exception as error:  # noqa: BLE001 - it is logged, and the question is sent
            self._ask_without_device(error)
        else:
            self.peer.send(ask)
        if self._error is not None:
            self._close_probe()

    def _ask_without_device(self, error: Exception) -> None:
        """Ask the receiver which transfers it supports, without a memory probe.

        Called if making the probe raised *error*. The answer then excludes shared device memory.
        """
        log.warning(
            "device memory cannot be shared with other workers, and is copied: %s: %s", type(error).__name__, error,
            exc_info=not isinstance(error, (CudaError, RuntimeError)),
        )  # fmt: skip
        self.peer.send(frames.Ask(self.id))

    def _close_probe(self) -> None:
        with self._lock:
            probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()

    @property
    def _to_myself(self) -> bool:
        return self.peer.worker_id == self._endpoint.worker_id

    @property
    def facts(self) -> frames.Facts | None:
        """The receiver's answer which transfers it supports; None before it has come."""
        return self._facts

    def lent(self, number: int) -> LentTensors:
        """Return the tensors that this worker keeps for the receiver of message *number*."""
        return self._lent[number]

    def post(self, message: OutgoingMessage) -> None:
        """Send *message* after the messages posted before."""
        with self._lock:
            error = self._error
            idle = self._facts is not None and not self._waiting and not self._sending
            at_once = idle and not (message.tensors.tensors and self._endpoint.io.inside())
            if error is None and not at_once:
                self._waiting.append(message)
                self._sending = self._sending or idle
        if error is not None:
            message.fail_for(self.peer, error)
        elif at_once:
            self._send(message)
        elif idle:
            self._start()

    # --- answers and end of the receiver ---

    def _answered(self, frame: frames.AnyFrame) -> None:
        """Handle a frame from the receiver. Loop thread only.

        Facts says which transfers the receiver supports. Released frees lent memory. LaneEnded reports a failed lane.
        LaneKey is for a lane's store.
        """
        if type(frame) is frames.Facts:
            with self._lock:
                self._facts = frame
                start = bool(self._waiting) and not self._sending
                self._sending = self._sending or start
            self._close_probe()
            if start:
                self._start()
        elif type(frame) is frames.Released:
            with self._lock:
                released = self._lent.pop(frame.n, None)
            del released  # not under the lock: it runs finalizers
        elif type(frame) is frames.LaneKey:
            self._lanes.key_arrived(frame.lane, frame.key, frame.value)
        elif type(frame) is frames.LaneEnded:
            self._lanes.other_end_closed(frame.lane, frame.text)

    def _fail(self, error: Exception) -> None:
        """Fail every message, current and future, and free lent memory, because the receiver is gone. Any thread."""
        with self._lock:
            self._error = self._error or error
            lost, self._waiting = self._waiting, []
            lent, self._lent = self._lent, {}
        self._close_probe()
        self._lanes.end_all(lambda: peer_gone_error(self.peer, error, f"a tensor's way to {self.peer.name}"))
        for message in lost:
            message.fail_for(self.peer, error)
        del lent

    # --- sending ---

    def _start(self) -> None:
        """Start a thread that sends the waiting messages. If no thread can be started, fail these messages.

        The caller has set `_sending` before.
        """
        try:
            exhaustion.start(exhaustion.OwnThread(target=self._send_waiting, name="rlinf-actors-tensors", daemon=True))
        except RuntimeError as error:
            with self._lock:
                self._sending = False
                lost, self._waiting = self._waiting, []
            for message in lost:
                self._cannot_send(message, error)

    def _send_waiting(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, []
                if not waiting:
                    self._sending = False
                    return
            for message in waiting:
                self._send(message)

    def _send(self, message: OutgoingMessage) -> None:
        try:
            if message.tensors.tensors:
                self._add_tensors(message)
        except Exception as error:  # noqa: BLE001 - torch's or CUDA's: it reaches the sender
            self._cannot_send(message, error)
        else:
            self._outbox.post(message)

    def _cannot_send(self, message: OutgoingMessage, error: Exception) -> None:
        """Fail a send. If a broadcast waits for the message, send the error in its place, to keep all in step."""
        message.settle(error)
        if message.stream:
            why = f"{self._endpoint.name} cannot send the tensors to {self.peer.name}: {type(error).__name__}: {error}"
            parts, borrowed = contents.encode_failure(RlinfActorsError(why))
            self._outbox.post(
                OutgoingMessage(message.stream, parts, borrowed, message.work, DetachedTensors(), span=message.span)
            )

    def _add_tensors(self, message: OutgoingMessage) -> None:
        """Choose a path for each tensor of a message.

        Add to the message a header that describes the tensors, and the bytes of those that are staged.
        """
        facts, detached = self._facts, message.tensors
        assert facts is not None
        plan = self._plan(detached, facts)
        transfer = frames.TensorTransfer(self.id, next(self._numbers), plan.headers)
        if plan.by_lane:
            message.pending = 2
            options = message.options or CollectiveGroupOptions()
            open_lane = self._lane(plan.by_lane[0], options, facts.host == self._endpoint.host)
            transfer = msgspec.structs.replace(transfer, **open_lane.header)
            job = LaneSend(message, plan.by_lane)
            message.on_sent = lambda: open_lane.lane.post(job)
        if any(kept is not None for kept in plan.lent):
            transfer.event = b"" if plan.event is None else plan.event.ipc_handle()
            with self._lock:
                if self._error is None:
                    self._lent[transfer.n] = LentTensors(plan.lent, detached, plan.event)
        # lent memory counts too: it is kept here until the receiver's user receives the message
        lent = [tensor for tensor, kept in zip(detached.tensors, plan.lent, strict=True) if kept is not None]
        message.parts = [*message.parts, *plan.staged]
        message.borrowed = True
        message.extra_bytes = sum(map(tensor_bytes, [*plan.by_lane, *lent]))
        message.transfer = transfer

    def _plan(self, detached: DetachedTensors, facts: frames.Facts) -> _Plan:
        """Choose the path of each tensor, and prepare what the path needs: exported memory, a staged copy or a lane.

        *facts* is the receiver's answer which transfers it supports.
        """
        plan = _Plan()
        for tensor, requires_grad in zip(detached.tensors, detached.requires_grad, strict=True):
            path = self._path(tensor, facts, plan) if tensor.numel() else ""
            lent, handle, offset = None, b"", 0
            if path == routes.IPC:
                detached.wait_ready(tensor.device)
                devices = self._endpoint.devices.get()
                assert devices.driver is not None
                handle, offset, lent = cuda_ipc.export(devices.driver, tensor)
                handle = devices.uuid(tensor.device.index).encode() + b"|" + handle
            elif path == routes.LOCAL:
                lent = tensor
            elif path == routes.STAGED:
                detached.wait_ready(tensor.device)
                plan.staged.append(bytes_of(tensor))
            elif path == routes.LANE:
                plan.by_lane.append(tensor)
            plan.headers.append(header_of(tensor, requires_grad, path, handle, offset))
            if path in _BESIDE:
                counters.sent(path, tensor.nbytes)
            plan.lent.append(lent)
        if any(header.path == routes.IPC for header in plan.headers):
            plan.event = cuda_ipc.event(plan.device.index)
        return plan

    def _path(self, tensor: Any, facts: frames.Facts, plan: _Plan) -> str:
        """Return the path of one tensor. Add to *plan* the device if the path is IPC or a lane.

        All tensors of a message that take IPC or a lane must be on one device; tensors of other devices are staged.
        """
        devices, backend = self._endpoint.devices.get(), self._backend(tensor)
        on_cpu = tensor.device.type == "cpu"
        same_node = facts.host == self._endpoint.host
        uuid = "" if on_cpu else devices.uuid(tensor.device.index)
        same_device = same_node and uuid in facts.devices
        ccl = backend in devices.backends and backend in facts.backends
        if ccl and not on_cpu:  # no CCL connects a device to itself, and `_ccl_fits` would warn of that
            alike = facts.accelerator == devices.accelerator.value
            ccl = alike and not same_device and self._ccl_fits(tensor, facts)
        pair = routes.Pair(self._to_myself, same_node, same_device, ccl, shared=facts.ipc)
        path = routes.choose(routes.CPU if on_cpu else routes.ACCELERATOR, pair, self._endpoint.overrides)
        if path == routes.LOCAL:
            return path
        if path in (routes.IPC, routes.LANE) and plan.device in (None, tensor.device):
            plan.device = tensor.device
            return path
        return routes.STAGED

    def _ccl_fits(self, tensor: Any, facts: frames.Facts) -> bool:
        """Return True if a process group of the tensor's device and the receiver's can work; else say why, once."""
        index = tensor.device.index
        problem = self._ccl_problems.get(index)
        if problem is None:
            ours = self._endpoint.devices.get().ccl_facts(index)
            theirs = routes.Ccl(facts.ccl_version, facts.model, facts.parent)
            problem = routes.ccl_problem(ours, theirs, facts.host == self._endpoint.host)
            self._ccl_problems[index] = problem
            if problem:
                log.warning("tensors for %s travel by the host's memory: %s", self.peer.name, problem)
        return not problem

    def _backend(self, tensor: Any) -> str:
        return "gloo" if tensor.device.type == "cpu" else self._endpoint.devices.get().ccl

    def _lane(self, tensor: Any, options: CollectiveGroupOptions, same_node: bool) -> OpenLane:
        """Return the lane for tensors on the device of *tensor* with these options; make the lane if there is none.

        Raises:
            OSError: the address for the lane's store is not an address of this machine.
            PeerDiedError: the receiver is gone.
        """
        backend = self._backend(tensor)
        return self._lanes.get(
            (backend, tensor.device, *astuple(options)), lambda: self._new_lane(backend, options, same_node)
        )

    def _new_lane(self, backend: str, options: CollectiveGroupOptions, same_node: bool) -> OpenLane:
        endpoint, number = self._endpoint, next(self._lane_numbers)
        ip, timeout_s = endpoint.ip(same_node), endpoint.timeout_s(backend)
        kept, close, address, client = self._new_store(backend, number, ip, timeout_s)

        def make() -> Wire:
            store = client()
            return process_groups.wire(
                backend, store, process_groups.SENDER, timeout_s=timeout_s, ip=ip, options=options, name=endpoint.job
            )

        def report(text: str) -> None:
            self.peer.send(frames.LaneEnded(self.id, number, endpoint.worker_id, text))

        lane = Lane(f"{endpoint.name} to {self.peer.name}", make, self._lanes.broke, close, endpoint.job_clock(backend))
        header = {"lane": number, "backend": backend, "store": address, "options": list(astuple(options))}
        return OpenLane(number, backend, lane, report, header, store=kept)

    def _new_store(
        self, backend: str, number: int, ip: str, timeout_s: float
    ) -> tuple[LaneStore | None, Callable[[], None], str, Callable[[], Any]]:
        """Return a lane's own store if there is one, the function that closes it, its address, and what makes torch's.

        gloo's store is the link to the receiver. NCCL calls its store on threads that must not wait for Python.
        """
        if backend == "gloo":
            kept = LaneStore(lambda key, value: self.peer.send(frames.LaneKey(self.id, number, key, value)), timeout_s)
            return kept, kept.close, f"{ip}:{BY_LINK}", kept.for_torch
        store = process_groups.GroupStore(ip, timeout_s)
        client = process_groups.join(store.endpoint, timeout_s)  # now: the lane's thread may come after `store.close`
        return None, store.close, store.endpoint, lambda: client
