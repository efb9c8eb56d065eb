"""Tensors beside a message: taken out of the object while it is pickled, and put together where it arrives.

Through a CCL they go as bytes, so that every dtype does.

What one worker's end of all paths is made of.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors.hardware.interfaces import interface_of, ipv4_interfaces
from rlinf_actors.messaging import cuda_ipc, process_groups, routes
from rlinf_actors.messaging.contents import LARGE
from rlinf_actors.messaging.cuda_ipc import Devices, LazyDevices
from rlinf_actors.messaging.process_groups import Wire
from rlinf_actors.model.accelerator_table import group_facts
from rlinf_actors.model.buffers import Buffer, keepable
from rlinf_actors.net.loop import IoThread
from rlinf_actors.runtime.future import Promise
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts


class Hold:
    """What was taken out of one object; see payload.Taker.

    Args:
        cpu: whether large tensors on the CPU are taken too.

    Attributes:
        tensors: contiguous, in the order of their numbers.
        wanted: whether each requires gradients.
        ready: device to an event of what its current stream was given before the tensors were taken.
    """

    def __init__(self, cpu: bool = False) -> None:
        self._cpu = cpu
        self.tensors: list[Any] = []
        self.wanted: list[bool] = []
        self.ready: dict[Any, Any] = {}

    def take(self, tensor: Any) -> int | None:
        """See payload.Taker."""
        on_cpu = tensor.device.type == "cpu"
        if on_cpu and (not self._cpu or size_of(tensor) < LARGE):
            return None
        self.tensors.append(tensor.detach().contiguous())
        self.wanted.append(bool(tensor.requires_grad))
        return len(self.tensors) - 1

    def clear(self) -> None:
        """See payload.Taker."""
        self.tensors.clear()
        self.wanted.clear()

    def seal(self) -> None:
        """Remember what the current streams have to do before the tensors may be read."""
        for tensor in self.tensors:
            device = tensor.device
            if device.type != "cpu" and device not in self.ready:
                module = _module(device.type)
                event = self.ready[device] = module.Event()
                event.record(module.current_stream(device))

    def let_wait(self, device: Any) -> None:
        """Let this thread's current stream of *device* wait for that."""
        event = self.ready.get(device)
        if event is not None:
            _module(device.type).current_stream(device).wait_event(event)

    def used_here(self) -> None:
        """The tensors are used on this thread's current streams from now on."""
        for tensor in self.tensors:
            if tensor.device.type != "cpu":
                self.let_wait(tensor.device)
                tensor.record_stream(_module(tensor.device.type).current_stream(tensor.device))


def size_of(tensor: Any) -> int:
    """Bytes of a tensor."""
    return int(tensor.numel() * tensor.element_size())


def crate_of(tensor: Any, wanted: bool, path: str, handle: bytes = b"", offset: int = 0) -> frames.TensorHeader:
    """What the header says of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return frames.TensorHeader(dtype, list(tensor.shape), wanted, tensor.device.type, path, handle, offset)


def crate_size(crate: frames.TensorHeader) -> int:
    """Bytes of the tensor that a crate tells of."""
    import torch

    return math.prod(crate.shape) * int(getattr(torch, crate.dtype).itemsize)


class Send:
    """A lane's job: the tensors of one message, all on one device.

    Args:
        hold: keeps them.
        tensors: of *hold*.
        done: called when they were read; on the lane's thread.
        failed: called when the lane ended before.
    """

    def __init__(
        self, hold: Hold, tensors: Sequence[Any], done: Callable[[], object], failed: Callable[[Exception], object]
    ) -> None:
        self._hold = hold
        self._tensors = tensors
        self._done = done
        self._failed = failed

    def run(self, wire: Wire) -> None:
        """See lanes.Job."""
        with _on_a_stream(self._tensors[0].device):
            self._hold.let_wait(self._tensors[0].device)
            wire.send([_as_bytes(tensor) for tensor in self._tensors])
        self._done()

    def fail(self, error: Exception) -> None:
        """See lanes.Job."""
        self._failed(error)


class Arriving(Promise[None]):
    """A message's cargo on its way. It ends when what comes by a lane is here.

    Args:
        what: for errors.
        cargo: what its header says.
        parts: of the message.
        devices: of this worker.
        local: gives the tensors of a cargo of this very process.
        release: tells the sender that its memory is not used any more.
    """

    def __init__(
        self,
        what: str,
        cargo: frames.Cargo,
        parts: AuthenticatedParts,
        devices: LazyDevices,
        local: Callable[[int, int], tuple[Hold, Sequence[Any]]],
        release: Callable[[], None],
    ) -> None:
        super().__init__(what)
        self.cargo = cargo
        staged = sum(crate.path == routes.STAGED for crate in cargo.crates)
        self.parts = parts.cut(0, len(parts) - staged)
        self._staged = iter(parts[len(parts) - staged :])
        self._devices = devices
        self._local = local
        self._buffers: Iterator[Any] = iter(())
        self._opened: Hold | None = None
        shared = any(crate.path in (routes.IPC, routes.LOCAL) for crate in cargo.crates)
        self._ticket = cuda_ipc.Ticket(release) if shared else None
        if not self.by_lane:
            self.resolve(None)

    @property
    def by_lane(self) -> bool:
        """Whether some of it comes by a lane."""
        return any(crate.path == routes.LANE for crate in self.cargo.crates)

    def run(self, wire: Wire) -> None:
        """Receive what comes by the lane; see lanes.Job."""
        import torch

        crates = [crate for crate in self.cargo.crates if crate.path == routes.LANE]
        kind = crates[0].kind
        device = torch.device("cpu" if kind == "cpu" else f"{kind}:{self._devices.get().home}")
        with _on_a_stream(device):
            buffers = [torch.empty(crate_size(crate), dtype=torch.uint8, device=device) for crate in crates]
            wire.recv(buffers)
        self._buffers = iter(buffers)
        self.resolve(None)

    def fail(self, error: Exception) -> None:
        """See lanes.Job."""
        self.reject(error)

    def tensors(self) -> list[Any]:
        """The tensors by number, ready for what the current streams are given next. Not on the loop's thread.

        Raises:
            PeerDiedError: the sender died before all of it was here.
            CudaError: the sender's device memory cannot be opened.
        """
        hold = self._opened
        if hold is not None:  # it was passed on, on another thread
            hold.used_here()
            tensors = hold.tensors
        else:
            tensors = self._open()
        wanted = [crate.requires_grad for crate in self.cargo.crates]
        return [tensor.requires_grad_() if want else tensor for tensor, want in zip(tensors, wanted, strict=True)]

    def hold(self) -> Hold:
        """The tensors, to be sent on; and whoever asks for `tensors` later has the same. Raises as that."""
        hold = Hold()
        hold.tensors = self._open()
        hold.wanted = [crate.requires_grad for crate in self.cargo.crates]
        hold.seal()
        self._opened = hold
        return hold

    def _open(self) -> list[Any]:
        self.wait()
        try:
            return [self._tensor(number, crate) for number, crate in enumerate(self.cargo.crates)]
        finally:
            self._ticket = None  # what was opened has it

    def _tensor(self, number: int, crate: frames.TensorHeader) -> Any:
        import torch

        dtype = getattr(torch, crate.dtype)
        raw = self._bytes(number, crate)
        tensor = raw.view(dtype).view(crate.shape)
        if crate.kind != "cpu" and tensor.device.type == "cpu":
            devices = self._devices.get()
            if devices.kind == crate.kind:
                tensor = tensor.to(crate.kind)
        return tensor

    def _bytes(self, number: int, crate: frames.TensorHeader) -> Any:
        import torch

        if crate.path == routes.LOCAL:
            hold, tensors = self._local(self.cargo.gate, self.cargo.n)
            hold.let_wait(tensors[number].device)
            return _as_bytes(tensors[number])
        if crate.path == routes.IPC:
            return self._shared(crate)
        if crate.path == routes.STAGED:
            part = next(self._staged)
            return torch.frombuffer(keepable(part), dtype=torch.uint8)
        if crate.path == routes.LANE:
            buffer = next(self._buffers)
            if buffer.device.type != "cpu":  # it was made on the lane's stream, and is to be used on this one
                buffer.record_stream(_module(buffer.device.type).current_stream(buffer.device))
            return buffer
        return torch.empty(0, dtype=torch.uint8)

    def _shared(self, crate: frames.TensorHeader) -> Any:
        devices = self._devices.get()
        uuid, _, handle = crate.handle.partition(b"|")
        index = devices.seen[uuid.decode()]
        assert devices.driver is not None
        assert self._ticket is not None
        tensor = cuda_ipc.opened(devices.driver, index, handle, crate.offset, crate_size(crate), self._ticket)
        if self.cargo.event:
            cuda_ipc.wait_for(index, self.cargo.event)
        return tensor


def ipc_crate(devices: Devices, tensor: Any, wanted: bool) -> tuple[frames.TensorHeader, Any]:
    """The crate of a tensor whose device memory the receiver opens, and what is to be kept for it."""
    assert devices.driver is not None
    handle, offset, kept = cuda_ipc.export(devices.driver, tensor)
    uuid = devices.uuid(tensor.device.index).encode()
    return crate_of(tensor, wanted, routes.IPC, uuid + b"|" + handle, offset), kept


def staged_part(hold: Hold, tensor: Any) -> Buffer:
    """A tensor's bytes on the host."""
    hold.let_wait(tensor.device)
    return payload.bytes_of(tensor)


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(-1).view(torch.uint8)


def _module(kind: str) -> Any:
    import torch

    return getattr(torch, kind)


@contextlib.contextmanager
def _on_a_stream(device: Any) -> Iterator[None]:
    """Run on a stream of its own, and leave when the device has done it; the CPU has none."""
    if device.type == "cpu":
        yield
        return
    module = _module(device.type)
    with module.device(device), module.stream(module.Stream(device=device)):
        yield
        done = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        done.record()
        done.synchronize()


@dataclass(frozen=True)
class Station:
    """This worker, for paths.

    Attributes:
        io: its loop.
        worker_id, name: its.
        host: its host key; equal for processes that can use each other's memory.
        node_ip: its node's address.
        devices: its accelerators.
        overrides: kind of buffer to path; Settings.paths.
        net_devices: names of interfaces, RLINF_COMM_NET_DEVICES or what was made of it.
        timeout_minutes: RLINF_TIMEOUT.
        job: what its members call their process groups; see security.job.job_name.
    """

    io: IoThread
    worker_id: str
    name: str
    host: str = ""
    node_ip: str = process_groups.LOOPBACK
    devices: LazyDevices = field(default_factory=lambda: LazyDevices({}))
    overrides: Mapping[str, str] = field(default_factory=dict)
    net_devices: str | None = None
    timeout_minutes: float | None = None
    job: str = process_groups.GROUP

    def timeout_s(self, backend: str) -> float:
        """How long a transfer may take: torch.distributed's own default unless RLINF_TIMEOUT is set."""
        if self.timeout_minutes is not None:
            return self.timeout_minutes * 60.0
        return group_facts(backend).timeout_s

    def limit(self, backend: str) -> Callable[[Callable[[], None]], Callable[[], None]] | None:
        """A clock for a lane's jobs; see Lane."""
        if backend == "gloo":
            return None

        def start(late: Callable[[], None]) -> Callable[[], None]:
            timers = []
            self.io.call(lambda: timers.append(self.io.loop.call_later(self.timeout_s(backend), late)))
            return lambda: self.io.call(lambda: timers[0].cancel())

        return start

    def ip(self, same_node: bool) -> str:
        """The address on which others reach a store or a socket of this worker."""
        holder = interface_of(self.node_ip)
        return process_groups.advertised_ip(same_node, self.node_ip, self.net_devices, ipv4_interfaces(), holder)
