"""The code that both ends of a tensor transfer use: detached tensors, their headers, and TransferEndpoint.

A tensor that travels beside its message is detached from its object while the object is pickled. The tensor travels as
bytes (uint8), since not every path supports every dtype. The receiver views the bytes as the tensor again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rlinf_actors.hardware.interfaces import interface_of, ipv4_interfaces
from rlinf_actors.messaging import process_groups
from rlinf_actors.messaging.contents import LARGE
from rlinf_actors.messaging.cuda_ipc import LazyDevices
from rlinf_actors.model.accelerator_table import group_facts
from rlinf_actors.net.loop import IoThread
from rlinf_actors.wire import frames


class DetachedTensors:
    """The tensors that were detached from one object while it was pickled. They travel beside the object's message.

    A CPU tensor stays in the message, unless *cpu* is True and the tensor is large.

    Attributes:
        tensors: the tensors, contiguous, in the order of their numbers.
        requires_grad: for each tensor, True if it requires gradients.
        ready: for each device, an event after which the tensors on the device may be read.
    """

    def __init__(self, cpu: bool = False) -> None:
        self._cpu = cpu
        self.tensors: list[Any] = []
        self.requires_grad: list[bool] = []
        self.ready: dict[Any, Any] = {}

    def take(self, tensor: Any) -> int | None:
        """Detach a tensor from the object that is being pickled, and return its number.

        Return None if the tensor is to travel inside the message.
        """
        if tensor.device.type == "cpu" and (not self._cpu or tensor_bytes(tensor) < LARGE):
            return None
        self.tensors.append(tensor.detach().contiguous())
        self.requires_grad.append(bool(tensor.requires_grad))
        return len(self.tensors) - 1

    def clear(self) -> None:
        self.tensors.clear()
        self.requires_grad.clear()

    def record_ready(self) -> None:
        """Record an event on the current stream of each device that has tensors.

        `wait_ready` lets other streams wait for it.
        """
        for tensor in self.tensors:
            device = tensor.device
            if device.type != "cpu" and device not in self.ready:
                module = torch_module(device.type)
                event = self.ready[device] = module.Event()
                event.record(module.current_stream(device))

    def wait_ready(self, device: Any) -> None:
        """Make this thread's current stream of *device* wait until the tensors may be read."""
        event = self.ready.get(device)
        if event is not None:
            torch_module(device.type).current_stream(device).wait_event(event)


def tensor_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def header_of(tensor: Any, requires_grad: bool, path: str, handle: bytes = b"", offset: int = 0) -> frames.TensorHeader:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return frames.TensorHeader(dtype, list(tensor.shape), requires_grad, tensor.device.type, path, handle, offset)


def header_bytes(header: frames.TensorHeader) -> int:
    import torch

    return math.prod(header.shape) * int(getattr(torch, header.dtype).itemsize)


def as_bytes(tensor: Any) -> Any:
    """View a contiguous tensor as a one-dimensional uint8 tensor on the same memory."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def torch_module(kind: str) -> Any:
    import torch

    return getattr(torch, kind)


@contextlib.contextmanager
def own_stream(device: Any) -> Iterator[None]:
    """Run the ``with`` block on a new stream of *device*, then wait until the device has finished the block's work.

    On the CPU there are no streams, so the block just runs.
    """
    if device.type == "cpu":
        yield
        return
    module = torch_module(device.type)
    with module.device(device), module.stream(module.Stream(device=device)):
        yield
        done = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        done.record()
        done.synchronize()


class TransferEndpoint(msgspec.Struct, frozen=True):
    """What the tensor transfers of this worker need to know about the worker, its node and its settings.

    Attributes:
        host: host key of this worker; equal for processes that can use each other's memory.
        node_ip: address of this worker's node.
        overrides: path by kind of buffer; Settings.paths.
        net_devices: names of network interfaces, from RLINF_COMM_NET_DEVICES or GLOO_SOCKET_IFNAME.
        timeout_minutes: RLINF_TIMEOUT; None if not set.
        job: name that the job's members give their process groups; see security.job.job_name.
    """

    io: IoThread
    worker_id: str
    name: str
    host: str = ""
    node_ip: str = process_groups.LOOPBACK
    devices: LazyDevices = msgspec.field(default_factory=lambda: LazyDevices({}))
    overrides: Mapping[str, str] = msgspec.field(default_factory=dict)
    net_devices: str | None = None
    timeout_minutes: float | None = None
    job: str = process_groups.GROUP

    def timeout_s(self, backend: str) -> float:
        """Return the most seconds that one transfer by *backend* may take.

        This is RLINF_TIMEOUT if it is set, else torch.distributed's default for *backend*.
        """
        if self.timeout_minutes is not None:
            return self.timeout_minutes * 60.0
        return group_facts(backend).timeout_s

    def job_clock(
        self, backend: str, timeout_s: float | None = None
    ) -> Callable[[Callable[[], None]], Callable[[], None]] | None:
        """Return the function with which a Lane starts a timer for each transfer; None for gloo.

        *timeout_s* is the most seconds of a transfer; None for those that `timeout_s` returns.

        gloo has time-outs of its own. The function takes a function to call when the time is up, and returns a function
        that stops the timer.
        """
        if backend == "gloo":
            return None
        seconds = self.timeout_s(backend) if timeout_s is None else timeout_s

        def start(late: Callable[[], None]) -> Callable[[], None]:
            timers = []
            self.io.call(lambda: timers.append(self.io.loop.call_later(seconds, late)))
            return lambda: self.io.call(lambda: timers[0].cancel())

        return start

    def ip(self, same_node: bool) -> str:
        """Return the address at which the other worker can reach sockets of this worker."""
        holder = interface_of(self.node_ip)
        return process_groups.advertised_ip(same_node, self.node_ip, self.net_devices, ipv4_interfaces(), holder)
