"""Worker classes of the GPU tests. Each worker sees one GPU, as cuda:0; two groups share it."""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from rlinf_actors import (
    CallTimeoutError,
    Channel,
    CollectiveGroupOptions,
    PeerDiedError,
    RlinfActorsError,
    Worker,
    WorkerGroup,
)
from rlinf_actors.messaging import contents, process_groups
from rlinf_actors.messaging.broadcast_group import GroupWire
from rlinf_actors.messaging.cuda_ipc import Devices
from rlinf_actors.messaging.lanes import Lane
from rlinf_actors.messaging.routes import Ccl
from rlinf_actors.messaging.tensor_sender import TensorSender

MIB = 1 << 20
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def sample(device: str) -> dict[str, Any]:
    return {
        "dtypes": {str(dtype): (torch.arange(5000) % 2).to(dtype).to(device) for dtype in DTYPES},
        "shapes": [torch.tensor(3, device=device), torch.zeros(0, 4, device=device), torch.ones((), device=device)],
        "views": (torch.arange(1000, device=device)[10:500], [torch.arange(90, device=device).view(9, 10).t()]),
        "parameter": torch.nn.Parameter(torch.ones(100, device=device)),
        "cpu": [torch.arange(100_000), "text"],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        alike = (type(a), a.dtype, a.shape, a.device, a.requires_grad) == (
            type(b), b.dtype, b.shape, b.device, b.requires_grad,
        )  # fmt: skip
        return alike and torch.equal(a.detach().cpu().to(torch.complex64), b.detach().cpu().to(torch.complex64))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Gpu(Worker):
    """Sends and receives tensors on its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self._released = threading.Semaphore(0)
        self._gone = threading.Event()
        self._watch_senders()

    def _watch_senders(self) -> None:
        """Tell when a receiver has released memory, and when it was found to be gone."""
        answer, fail = TensorSender._answered, TensorSender._fail

        def answered(sender: TensorSender, frame: Any) -> None:
            answer(sender, frame)
            if type(frame).__name__ == "Released":
                self._released.release()

        def failed(sender: TensorSender, error: Exception) -> None:
            fail(sender, error)
            self._gone.set()

        TensorSender._answered, TensorSender._fail = answered, failed  # type: ignore[method-assign]

    def pid(self) -> int:
        return os.getpid()

    def lent(self) -> int:
        assert self._context is not None
        return sum(len(sender._lent) for sender in list(self._context.messenger._tensor_senders.values()))

    def wait_released(self, count: int = 1) -> int:
        for _ in range(count):
            assert self._released.acquire(timeout=20)
        return self.lent()

    # --- what is sent ---

    def say_sample(self, group: str) -> None:
        self.send(sample("cuda"), group, 0)

    def hear_sample(self, group: str, device: str = "cuda:0") -> bool:
        return same(self.recv(group, 0), sample(device))

    def say_fill(self, mib: int, value: float, group: str, keep: bool = False) -> None:
        tensor = torch.full((mib * MIB // 4,), value, device="cuda")
        self.send(tensor, group, 0)
        if keep:
            self.kept = tensor

    def hear_fill(self, group: str, keep: bool = False) -> tuple[float, float, str]:
        tensor = self.recv(group, 0)
        if keep:
            self.kept = tensor
        return tensor.min().item(), tensor.max().item(), str(tensor.device)

    def write_kept(self, value: float) -> None:
        self.kept.fill_(value)
        torch.cuda.synchronize()

    def read_kept(self) -> tuple[float, float]:
        return self.kept.min().item(), self.kept.max().item()

    def drop_kept(self) -> None:
        self.kept = None

    def hear_into(self, mib: int, group: str) -> tuple[bool, float, float]:
        target = torch.zeros(mib * MIB // 4, device="cuda")
        before = target.data_ptr()
        self.recv_tensor(target, group, 0)
        return target.data_ptr() == before, target.min().item(), target.max().item()

    def hear_by_lane(self, mib: int, group: str) -> tuple[float, int, int]:
        """Receive into a tensor: return its mean, the copies made into it, and the most bytes allocated beside it."""
        copies, copy_into = [], contents.copy_into
        contents.copy_into = lambda *args, **kwargs: (copies.append(1), copy_into(*args, **kwargs))  # type: ignore
        target = torch.zeros(mib * MIB // 4, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            self.recv_tensor(target, group, 0)
        finally:
            contents.copy_into = copy_into
        return target.mean().item(), len(copies), torch.cuda.max_memory_allocated() - before

    def hear_too_late(self, mib: int, group: str) -> bool:
        """Time out, and return True if the tensor is not written when the sender sends afterwards."""
        target = torch.zeros(mib * MIB // 4, device="cuda")
        try:
            self.recv_tensor(target, group, 0, timeout=0.5)
        except CallTimeoutError:
            self.send("now", group, 0)
            got = self.recv(group, 0)
            return bool((target == 0).all()) and bool((got == 3).all())
        return False

    def say_when_asked(self, mib: int, group: str) -> None:
        assert self.recv(group, 0) == "now"
        self.send_tensor(torch.full((mib * MIB // 4,), 3.0, device="cuda"), group, 0)

    def say_tensor(self, mib: int, value: float, group: str) -> None:
        self.send_tensor(torch.full((mib * MIB // 4,), value, device="cuda"), group, 0)

    def claim_other_nccl(self) -> None:
        """Answer the next questions of senders with another version of NCCL."""
        Devices.ccl_facts = lambda *_: Ccl("1.0.0", "", "")  # type: ignore[method-assign]

    def lanes(self) -> int:
        return sum(thread.name.startswith("rlinf-actors-lane") for thread in threading.enumerate())

    def ccl_facts(self) -> tuple[str, str, str]:
        found = Devices(os.environ).ccl_facts(0)
        return found.version, found.model, found.parent

    def contexts(self) -> int:
        """Return the number of GPUs on which this process has a context, without opening one."""
        cuda = ctypes.CDLL("libcuda.so.1")
        assert cuda.cuInit(0) == 0
        count, found = ctypes.c_int(), 0
        assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
        for index in range(count.value):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            assert cuda.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
            found += active.value
        return found

    def give_all(self, ranks: int, count: int, mib: int) -> tuple[list[float], int]:
        """Broadcast among the first *ranks*; return the means received, and the tensors that came by one group."""
        carried, run = [], GroupWire._broadcast
        GroupWire._broadcast = lambda wire, found: (carried.extend(found), run(wire, found))[1]  # type: ignore
        means = []
        for n in range(count):
            mine = torch.full((mib * MIB // 4,), float(n), device="cuda") if self._rank == 0 else None
            means.append(self.broadcast(mine, groups=[(self._group_name, list(range(ranks)))]).mean().item())
            self.broadcast(None, groups=[(self._group_name, list(range(ranks)))])  # until all are here
        GroupWire._broadcast = run  # type: ignore[method-assign]
        return means, len(carried)

    def give_then_die(self, ranks: int, dies: int) -> str:
        """Broadcast once, then again without the rank that kills itself. Return what the second raises."""
        groups = [(self._group_name, list(range(ranks)))]
        try:
            for _ in range(3):
                self.broadcast(torch.ones(MIB, device="cuda") if self._rank == 0 else None, groups=groups)
            if self._rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(3):
                self.broadcast(torch.ones(64 * MIB, device="cuda") if self._rank == 0 else None, groups=groups)
        except PeerDiedError:
            return "PeerDiedError"
        return ""

    def to_myself(self) -> bool:
        tensor = torch.arange(1000, device="cuda")
        self.send([tensor], self._group_name, 0)
        return bool(self.recv(self._group_name, 0)[0].data_ptr() == tensor.data_ptr())

    def say_late(self, group: str) -> bool:
        """Send what a stream has not computed yet; whether send() returned before it had."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(16 * MIB, device="cuda")
            torch.cuda._sleep(1_000_000_000)  # half a second of cycles
            tensor.fill_(7.0)
            self.send(tensor, group, 0)
        return not stream.query()

    def swap(self, count: int, group: str) -> bool:
        good = True
        for n in range(count):
            self.send(torch.full((MIB,), float(n), device="cuda"), group, 0)
            good = good and bool((self.recv(group, 0) == n).all())
        return good

    def give(self, groups_: Any) -> float:
        mine = torch.full((MIB,), 5.0, device="cuda") if self._rank == 0 and self._group_name == "a" else None
        got = self.broadcast({"w": mine}, groups=groups_)["w"]
        assert got.device.type == "cuda"
        return float(got.sum().item()) / MIB

    # --- calls and channels ---

    def total(self, tensor: Any) -> tuple[float, str]:
        return tensor.sum().item(), str(tensor.device)

    def call_other(self, group: str) -> list[Any]:
        other: Any = WorkerGroup.from_group_name(Gpu, group)
        return list(other.total(torch.ones(1000, device="cuda")).wait())

    def put(self, channel: Channel) -> None:
        channel.put({"obs": torch.arange(100_000, device="cuda"), "step": 3})

    def get(self, channel: Channel) -> tuple[str, bool, int]:
        item = channel.get()
        good = torch.equal(item["obs"].cpu(), torch.arange(100_000))
        return item["obs"].device.type, good, item["step"]

    # --- memory ---

    def memory(self) -> tuple[int, int]:
        """Bytes that torch's allocator has given out here, and bytes free on the device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    def wait_gone(self) -> int:
        assert self._gone.wait(20)
        return self.lent()

    def still_works(self) -> float:
        return torch.ones(1000, device="cuda").sum().item()

    # --- NCCL in one rank ---

    def nccl_alone(self, mib: int) -> dict[str, Any]:
        """A lane's group of one: NCCL's broadcast, and a send to itself, by a lane's thread."""
        store = process_groups.GroupStore(process_groups.LOOPBACK, 60)
        options = CollectiveGroupOptions(accel_max_ctas=8, accel_min_ctas=1, is_high_priority_stream=True)

        def make() -> process_groups.Wire:
            client = process_groups.join(store.endpoint, 60)
            return process_groups.Wire(
                process_groups.make("nccl", client, 0, 1, timeout_s=60, ip=process_groups.LOOPBACK, options=options)
            )

        job = Alone(mib)
        lane = Lane("alone", make, lambda _lane, error: job.fail(error), store.close)
        lane.post(job)
        assert job.ended.wait(60)
        lane.end(lambda: RlinfActorsError("the test is over"))
        if job.error is not None:
            raise job.error
        return {**job.figures, "initialized": dist.is_initialized()}

    def nccl_options(self) -> list[Any]:
        made = process_groups.group_options(
            "nccl",
            CollectiveGroupOptions(
                accel_cluster_size=2, accel_max_ctas=8, accel_min_ctas=2, is_high_priority_stream=True
            ),
        )
        config = made.config
        return [config.cga_cluster_size, config.max_ctas, config.min_ctas, made.is_high_priority_stream]

    # --- figures ---

    def ping(self, mib: int, group: str, count: int) -> list[float]:
        """Seconds from send() until the receiver has read a byte and said so; mib 0: a plain message."""
        tensor = torch.ones(max(mib * MIB // 4, 1), device="cuda")
        torch.cuda.synchronize()
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            self.send(tensor if mib else 1, group, 0)
            self.recv(group, 0)
            taken.append(time.perf_counter() - start)
        return taken

    def pong(self, group: str, count: int) -> None:
        for _ in range(count):
            got = self.recv(group, 0)
            if isinstance(got, torch.Tensor):
                got[:1].item()
            del got
            self.send(1, group, 0)

    def device_copy(self, mib: int) -> float:
        """Seconds that a copy of this size takes on the device."""
        source, target = (torch.empty(mib * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
        return median_of(lambda: target.copy_(source))

    def host_copy(self, mib: int) -> float:
        """Seconds from the device to page-locked memory."""
        source = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
        target = torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=True)
        return median_of(lambda: target.copy_(source))


class Alone:
    """What the only member of a group can do; see lanes.Job."""

    def __init__(self, mib: int) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.figures: dict[str, Any] = {}
        self._mib = mib

    def run(self, wire: process_groups.Wire) -> None:
        device = torch.device("cuda:0")
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device=device)):
            tensor = torch.full((self._mib * MIB,), 3, dtype=torch.uint8, device=device)
            target = torch.zeros_like(tensor)

            def broadcast() -> None:
                wire.group.broadcast([tensor]).wait()

            def to_myself() -> None:
                wire.group._start_coalescing()
                wire.group.send([tensor], 0, 0)
                wire.group.recv([target], 0, 0)
                wire.group._end_coalescing().wait()

            self.figures["broadcast_s"] = median_of(broadcast)
            self.figures["to_myself_s"] = median_of(to_myself)
            self.figures["copy_s"] = median_of(lambda: target.copy_(tensor))
            target.zero_()
            to_myself()
            torch.cuda.synchronize()
            self.figures["good"] = bool((target == 3).all()) and bool((tensor == 3).all())
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


def median_of(function: Any, count: int = 20) -> float:
    """Seconds of one call, the device's work included; the first three are not counted."""
    taken = []
    for n in range(count + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if n >= 3:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)
