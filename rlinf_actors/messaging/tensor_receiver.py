"""Receive tensors that travel beside messages: answer the senders' questions, and put the tensors together.

Each worker has one `TensorReceiver`. It runs on the loop thread, where it never touches an accelerator. The answer to
Ask is made on a separate thread, each lane has its own thread, and `IncomingTensors.tensors` runs on the thread that
receives the message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlinf_actors import exhaustion
from rlinf_actors.errors import CallTimeoutError, PeerDiedError
from rlinf_actors.messaging import cuda_ipc, process_groups, routes
from rlinf_actors.messaging.directory import WorkerDirectory, peer_gone_error
from rlinf_actors.messaging.lane_store import BY_LINK, LaneStore
from rlinf_actors.messaging.lanes import Lane, Lanes, OpenLane, lane_error
from rlinf_actors.messaging.mailbox import Recent
from rlinf_actors.messaging.process_groups import CollectiveGroupOptions, Wire
from rlinf_actors.messaging.tensor_transfer import (
    DetachedTensors,
    TransferEndpoint,
    as_bytes,
    header_bytes,
    own_stream,
    torch_module,
)
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer, keepable
from rlinf_actors.runtime.future import Promise
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.payload import AuthenticatedParts

if TYPE_CHECKING:
    from rlinf_actors.messaging.tensor_sender import TensorSender

log = logging.getLogger(__name__)

TAKE_BACK_S = 5.0
"""Seconds that a receive which was withdrawn waits for a tensor that is arriving in its memory."""
Reply = Callable[[bytes, frames.AnyFrame], None]
"""Sends a frame on the link, named by its identity, on which a message arrived."""


class IncomingTensors(Promise[None]):
    """The tensors that travel beside one message. Done when the tensors sent by a lane have arrived or are lost.

    A receive may offer memory of its own for the tensor (`offer`), until it takes the memory back (`take_back`).

    Args:
        what: names the tensors in error texts.
        transfer: the header that describes the tensors.
        parts: parts of the message.
        receiver: the TensorReceiver of this worker.
        release: called when this worker no longer uses the sender's memory; tells the sender.

    Attributes:
        in_target: True if the tensor is in the memory that was offered.
        by_group: True if the tensors travel by the process group of a broadcast. Its tree then receives them by `run`.
    """

    def __init__(
        self,
        what: str,
        transfer: frames.TensorTransfer,
        parts: AuthenticatedParts,
        receiver: TensorReceiver,
        release: Callable[[], None],
    ) -> None:
        super().__init__(what)
        self.transfer = transfer
        headers = transfer.tensors
        staged = sum(header.path == routes.STAGED for header in headers)
        self.parts = parts.cut(0, len(parts) - staged)
        self._staged = iter(parts[len(parts) - staged :])
        self._receiver = receiver
        self._buffers: Iterator[Any] = iter(())
        self._forwarded: DetachedTensors | None = None
        lent = any(header.path in (routes.IPC, routes.LOCAL) for header in headers)
        self._lease = cuda_ipc.MemoryLease(release) if lent else None
        self.by_group = any(header.path == routes.GROUP for header in headers)
        self._by_lane = [header for header in headers if header.path in (routes.LANE, routes.GROUP)]
        self._guard = threading.Lock()
        self._running: threading.Event | None = None  # set when the lane is no longer writing
        self._target: DetachedTensors | None = None
        self._stop: Callable[[], None] = lambda: None
        self.in_target = False
        if not self._by_lane:
            self.resolve(None)

    def join(self, lane: OpenLane, broke: Callable[[Lane, Exception], None]) -> None:
        """Receive by *lane*. *broke* reports a failure of the lane. Loop thread only."""
        self._stop = lambda: broke(lane.lane, CallTimeoutError("the receiver has withdrawn its tensor"))
        lane.lane.post(self)

    def run(self, wire: Wire) -> None:
        """Receive the tensors of this message that come by the lane. Runs on the lane's thread."""
        import torch

        kind = self._by_lane[0].kind
        device = torch.device("cpu" if kind == "cpu" else f"{kind}:{self._receiver.devices.get().home}")
        ended = threading.Event()
        with self._guard:
            if self._target is not None and not (wire.can_abort and self._fits(self._target.tensors[0], device)):
                self._target = None
            self._running, target = ended, self._target
        try:
            with own_stream(device):
                if target is None:
                    buffers = [
                        torch.empty(header_bytes(one), dtype=torch.uint8, device=device) for one in self._by_lane
                    ]
                else:
                    target.wait_ready(device)
                    buffers = [as_bytes(target.tensors[0])]
                wire.recv(buffers)
            self._buffers = iter(buffers)
            self.in_target = target is not None
        finally:
            ended.set()
        self.resolve(None)

    def fail(self, error: Exception) -> None:
        """Fail the receive of this message, because its lane has ended. Any thread."""
        self.reject(error)

    def offer(self, target: DetachedTensors) -> None:
        """Let the lane receive into *target*, the one tensor of the message, if that fits. Any thread.

        If the lane has begun to receive, do nothing. `in_target` is True afterwards if the tensor is in *target*.
        """
        with self._guard:
            if self._running is None:
                self._target = target

    def take_back(self) -> None:
        """Stop writing to the target that was offered, before its user gets it back. Not on the loop thread.

        If the tensor is in the target, copy it, for another receive. If it is arriving, wait for it for TAKE_BACK_S;
        then end the lane, which fails this transfer and the later ones of the lane at both ends.
        """
        with self._guard:
            running, target = self._running, self._target
            if running is None:
                self._target = None
        if running is None or target is None:
            return
        if not running.wait(TAKE_BACK_S):
            self._stop()
            if not running.wait(TAKE_BACK_S):
                log.error("%s: its lane does not end, and may still write to the tensor of recv_tensor()", self._what)
        if self.in_target:
            with own_stream(target.tensors[0].device):
                self._buffers = iter([as_bytes(target.tensors[0]).clone()])
            self.in_target = False
        self._target = None

    def _fits(self, target: Any, device: Any) -> bool:
        """Return True if the only tensor of this message can be received into *target*, by a lane of *device*."""
        header = self.transfer.tensors[0]
        dtype = str(target.dtype).removeprefix("torch.")
        alike = (dtype, list(target.shape), target.device) == (header.dtype, list(header.shape), device)
        return alike and len(self.transfer.tensors) == 1

    def tensors(self) -> list[Any]:
        """Return the tensors in the order of their numbers, ready for use on this thread's current streams.

        Blocks until they have arrived; not on the loop thread.

        Raises:
            PeerDiedError: the sender died before all tensors arrived.
            CudaError: the sender's device memory cannot be opened.
        """
        forwarded = self._forwarded
        if forwarded is not None:  # opened on another thread, to be forwarded
            tensors = forwarded.tensors
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    forwarded.wait_ready(tensor.device)
                    tensor.record_stream(torch_module(tensor.device.type).current_stream(tensor.device))
        else:
            tensors = self._open()
        return [
            tensor.requires_grad_() if header.requires_grad else tensor
            for tensor, header in zip(tensors, self.transfer.tensors, strict=True)
        ]

    def forward(self) -> DetachedTensors:
        """Return the tensors in a form in which this worker can send them on, as a relay of a broadcast.

        A later call of `tensors` returns the same tensors. Raises the errors of `tensors`.
        """
        detached = DetachedTensors()
        detached.tensors = self._open()
        detached.requires_grad = [header.requires_grad for header in self.transfer.tensors]
        detached.record_ready()
        self._forwarded = detached
        return detached

    def _open(self) -> list[Any]:
        self.wait()
        try:
            return [self._tensor(number, header) for number, header in enumerate(self.transfer.tensors)]
        finally:
            self._lease = None  # the opened memory keeps it

    def _tensor(self, number: int, header: frames.TensorHeader) -> Any:
        import torch

        raw = self._bytes(number, header)
        tensor = raw.view(getattr(torch, header.dtype)).view(header.shape)
        if header.kind != "cpu" and tensor.device.type == "cpu" and self._receiver.devices.get().kind == header.kind:
            tensor = tensor.to(header.kind)
        return tensor

    def _bytes(self, number: int, header: frames.TensorHeader) -> Any:
        import torch

        if header.path == routes.LOCAL:
            lent = self._receiver.lent_here(self.transfer.sender, self.transfer.n)
            lent.detached.wait_ready(lent.tensors[number].device)
            return as_bytes(lent.tensors[number])
        if header.path == routes.IPC:
            devices = self._receiver.devices.get()
            uuid, _, handle = header.handle.partition(b"|")
            index = devices.seen[uuid.decode()]
            assert devices.driver is not None
            assert self._lease is not None
            tensor = cuda_ipc.opened(devices.driver, index, handle, header.offset, header_bytes(header), self._lease)
            if self.transfer.event:
                cuda_ipc.wait_for(index, self.transfer.event)
            return tensor
        if header.path == routes.STAGED:
            return torch.frombuffer(keepable(next(self._staged)), dtype=torch.uint8)
        if header.path in (routes.LANE, routes.GROUP):
            buffer = next(self._buffers)
            if buffer.device.type != "cpu":  # made on the lane's stream, used on the current one
                buffer.record_stream(torch_module(buffer.device.type).current_stream(buffer.device))
            return buffer
        return torch.empty(0, dtype=torch.uint8)


class TensorReceiver:
    """Receives the tensors that travel beside the messages to one worker, from all senders.

    *directory* finds senders, so that their end is noticed. *reply* sends a frame over the link on which a message
    came. *senders* are this worker's own tensor senders, for messages that the worker sends to itself.
    """

    def __init__(
        self,
        endpoint: TransferEndpoint,
        directory: WorkerDirectory,
        reply: Reply,
        senders: Mapping[Peer, TensorSender],
    ) -> None:
        self.devices = endpoint.devices
        self._endpoint = endpoint
        self._directory = directory
        self._reply = reply
        self._senders = senders
        self._lanes = Lanes()
        self._ended: Recent[Hashable, str] = Recent()  # lanes whose senders have said why they end

    def handle(self, link: bytes, frame: frames.AnyFrame, _parts: list[Buffer]) -> None:
        """Handle a sender's question which transfers are supported (Ask), its report of a failed lane (LaneEnded), or
        a key of a lane's store (LaneKey).

        Loop thread only.
        """
        if isinstance(frame, frames.Ask):
            self._asked(link, frame)
        elif isinstance(frame, frames.LaneKey):
            self._lanes.key_arrived((link, frame.id, frame.lane), frame.key, frame.value)
        elif isinstance(frame, frames.LaneEnded):
            key = (link, frame.id, frame.lane)
            self._ended[key] = frame.text
            if not self._lanes.other_end_closed(key, frame.text):
                # a lane that is not known here: its sender waits for the answer all the same
                self._reply(link, frames.LaneEnded(frame.id, frame.lane, self._endpoint.worker_id, frame.text))

    def _asked(self, link: bytes, ask: frames.Ask) -> None:
        def answer() -> None:  # may load torch and start CUDA: not on the loop's thread
            try:
                devices = self.devices.get()
                index, shared = devices.seen.get(ask.device), False
                if devices.driver is not None and index is not None and ask.memory:
                    shared = cuda_ipc.can_open(devices.driver, index, ask.memory, ask.event)
                accelerator = devices.accelerator.value
                ccl = devices.ccl_facts(devices.home)
                facts = frames.Facts(
                    ask.id, self._endpoint.host, accelerator, list(devices.own), devices.backends, shared,
                    ccl.version, ccl.model, ccl.parent,
                )  # fmt: skip
            except Exception:
                log.exception("torch or CUDA does not start: tensors arrive on the CPU")
                facts = frames.Facts(ask.id, self._endpoint.host, "NO_ACCEL", [], [], False)
            self._reply(link, facts)

        exhaustion.start(exhaustion.OwnThread(target=answer, name="rlinf-actors-facts", daemon=True))

    def arrived(self, link: bytes, frame: frames.UserMessage, parts: AuthenticatedParts) -> IncomingTensors:
        """Return the tensors beside a message that has arrived. `begin` then receives them. Loop thread only."""
        transfer = frame.transfer
        assert transfer is not None

        def release() -> None:
            self._reply(link, frames.Released(transfer.sender, transfer.n))

        return IncomingTensors(f"a tensor from {frame.src}", transfer, parts, self, release)

    def begin(self, link: bytes, frame: frames.UserMessage, incoming: IncomingTensors) -> None:
        """Begin to receive by a lane the tensors that `arrived` has returned, in the order of the messages.

        Loop thread only.
        """
        transfer = incoming.transfer
        if any(header.path == routes.LANE for header in transfer.tensors):
            why = self._ended.get((link, transfer.sender, transfer.lane))
            if why is None:
                incoming.join(self._lane(link, frame, transfer), self._lanes.broke)
            else:  # sent before our answer came: nobody would be at the other end of a new lane
                incoming.fail(lane_error(f"{frame.src} to {self._endpoint.name}", transfer.backend, why))

    def lent_here(self, sender_id: int, number: int) -> Any:
        """Return the tensors of a message that this worker sent to itself, which are used in place.

        *sender_id* is the id of the TensorSender, and *number* the number that it gave the message.
        """
        return next(one for one in list(self._senders.values()) if one.id == sender_id).lent(number)

    # --- lanes ---

    def _lane(self, link: bytes, frame: frames.UserMessage, transfer: frames.TensorTransfer) -> OpenLane:
        key = (link, transfer.sender, transfer.lane)
        found = self._lanes.find(key)
        if found is None:
            found = self._lanes.get(key, lambda: self._new_lane(link, frame.src, transfer))
            lane, sender = found, WorkerAddress.from_name(frame.src)
            self._directory.peer(sender, lambda peer: self._watch(lane, sender, frame.src_id, peer))
        return found

    def _new_lane(self, link: bytes, src: str, transfer: frames.TensorTransfer) -> OpenLane:
        endpoint, backend = self._endpoint, transfer.backend
        timeout_s = endpoint.timeout_s(backend)
        options = CollectiveGroupOptions(*transfer.options)  # type: ignore[arg-type]
        host, _, port = transfer.store.rpartition(":")
        ip, kept = endpoint.ip(host == process_groups.LOOPBACK), None
        if port == BY_LINK:

            def send(key: str, value: bytes) -> None:
                self._reply(link, frames.LaneKey(transfer.sender, transfer.lane, key, value))

            kept = LaneStore(send, timeout_s, begins=True)

        def make() -> Wire:
            store = process_groups.join(transfer.store, timeout_s) if kept is None else kept.for_torch()
            return process_groups.wire(
                backend, store, process_groups.RECEIVER, timeout_s=timeout_s, ip=ip, options=options, name=endpoint.job
            )

        def report(text: str) -> None:
            self._reply(link, frames.LaneEnded(transfer.sender, transfer.lane, endpoint.worker_id, text))

        release = kept.close if kept is not None else lambda: None
        lane = Lane(f"{src} to {endpoint.name}", make, self._lanes.broke, release, endpoint.job_clock(backend))
        return OpenLane((link, transfer.sender, transfer.lane), backend, lane, report, store=kept)

    def _watch(self, lane: OpenLane, sender: WorkerAddress, src_id: str, peer: Peer | Exception) -> None:
        """End *lane* if its sender is gone already; otherwise end it as soon as the sender is gone.

        *peer* is the outcome of the look-up of *sender*. *src_id* is the id of the worker that sends by the lane; a
        *peer* with another id belongs to a later launch.
        """
        if isinstance(peer, Exception) or peer.worker_id not in ("", src_id):
            name = sender.get_name()
            self._lanes.end(lane, lambda: PeerDiedError(f"{name}, which was sending a tensor, has ended", peer=name))
            return
        peer.on_gone(
            lambda error: self._lanes.end(lane, lambda: peer_gone_error(peer, error, f"a tensor from {peer.name}"))
        )
