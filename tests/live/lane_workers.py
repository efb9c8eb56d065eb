"""Worker classes of the tests of lanes."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from message_workers import Talker, ended
from tensor_workers import TensorTalker

from rlinf_actors import RlinfActorsError
from rlinf_actors.messaging import process_groups


def sample() -> dict[str, Any]:
    """Every dtype, and shapes that are easily forgotten, large enough for a lane where they have a size."""
    dtypes = [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool,
        torch.complex64, torch.float8_e4m3fn,
    ]  # fmt: skip
    large = {str(dtype): (torch.arange(140_000) % 2).to(dtype) for dtype in dtypes}
    return {
        "large": large,
        "small": [torch.tensor(3), torch.zeros(0, 4), torch.zeros(3, 0, dtype=torch.bool), torch.ones(())],
        "deep": ({"view": torch.arange(100_000)[10:50_000]}, [torch.arange(90_000).view(300, 300).t()]),
        "parameter": torch.nn.Parameter(torch.ones(40_000)),
    }


def same(a: Any, b: Any) -> bool:
    """Whether two objects are equal, with their types, dtypes and shapes."""
    if isinstance(a, torch.Tensor):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return alike and torch.equal(a.detach().to(torch.complex64), b.detach().to(torch.complex64))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def kill_self_when_written(buffer: torch.Tensor) -> None:
    while not buffer.any():  # the back-end tells of the whole only
        pass
    os.kill(os.getpid(), signal.SIGKILL)


class KillsInSend:
    """A group that sends a first tensor, begins with a second, and ends the process."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sent = 0
        self.recv = group.recv

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        work = self._group.send(tensors, rank, tag)
        self._sent += 1
        if self._sent == 1:
            work.wait()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        return work


class NeverArrives:
    """A group whose process ends before it says that all has arrived, if it has not ended by then."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.recv = group.recv

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        if tag == process_groups.ARRIVED:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._group.send(tensors, rank, tag)


class LaneTalker(TensorTalker):
    """Tensors by lanes."""

    def say_sample(self, group: str, rank: int = 0) -> None:
        self.send(sample(), group, rank)

    def hear_sample(self, group: str, rank: int = 0) -> bool:
        return same(self.recv(group, rank), sample())

    def say_many(self, count: int, size: int, group: str) -> None:
        works = []
        for n in range(count):
            value = torch.full((size,), float(n)) if n % 3 else {"n": n, "t": [torch.full((size,), float(n))]}
            works.append(self.send(value, group, 0, async_op=True))
            works.append(self.send(n, group, 0, async_op=True))
        for work in works:
            work.wait()

    def hear_many(self, count: int, group: str) -> list[float]:
        heard = []
        for _ in range(count):
            value, n = self.recv(group, 0), self.recv(group, 0)
            tensor = value if isinstance(value, torch.Tensor) else value["t"][0]
            heard.append(tensor.min().item() if tensor.min() == tensor.max() == n else -1.0)
        return heard

    def swap_tensors(self, size: int, group: str, rank: int = 0, count: int = 1) -> bool:
        good = True
        for n in range(count):
            self.send(torch.full((size,), self._rank + n), group, rank)
            got = self.recv(group, rank)
            good = good and bool((got == got[0]).all())
        return good

    def lane_threads(self) -> int:
        return sum(thread.name.startswith("rlinf-actors-lane-") for thread in threading.enumerate())

    def lanes_left(self) -> int:
        """Wait for the threads of lanes that have ended; how many are there."""
        for thread in threading.enumerate():
            if thread.name.startswith("rlinf-actors-lane-"):
                thread.join(10)
        return self.lane_threads()

    def say_large(self, mib: int, group: str) -> str:
        return ended(self.send(torch.ones(mib << 18), group, 0, async_op=True))

    def hear_large(self, group: str) -> str:
        return ended(self.recv(group, 0, async_op=True))

    def kill_self_in_recv(self) -> None:
        """End this process by SIGKILL when bytes of its next tensor are here, before it says that all are."""

        def recv(wire: Any, buffers: Any) -> None:
            buffers[0].zero_()
            wire.group = NeverArrives(wire.group)
            threading.Thread(target=kill_self_when_written, args=(buffers[0],)).start()
            before(wire, buffers)

        before, process_groups.GlooWire.recv = process_groups.GlooWire.recv, recv  # type: ignore[method-assign]

    def kill_self_in_send(self) -> None:
        """End this process by SIGKILL in the middle of its next message's tensors."""

        def send(wire: Any, tensors: Any) -> None:
            wire.group = KillsInSend(wire.group)
            before(wire, tensors)

        before, process_groups.GlooWire.send = process_groups.GlooWire.send, send  # type: ignore[method-assign]

    def stop_self_in_recv(self) -> None:
        """Stop this process when its next tensor is about to come; later ones come as ever."""

        def recv(wire: Any, buffers: Any) -> None:
            process_groups.GlooWire.recv = before  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
            before(wire, buffers)

        before, process_groups.GlooWire.recv = process_groups.GlooWire.recv, recv  # type: ignore[method-assign]

    def hold_lanes(self) -> None:
        """Let no lane of this worker receive until `hear_late` lets it."""
        self.go_on, self.under_way = threading.Event(), threading.Event()

        def recv(wire: Any, buffers: Any) -> None:
            self.under_way.set()
            assert self.go_on.wait(60)
            before(wire, buffers)

        before, process_groups.GlooWire.recv = process_groups.GlooWire.recv, recv  # type: ignore[method-assign]

    def hear_late(self, group: str) -> list[Any]:
        """Time limits that end while a tensor is on its way; then that and what was sent behind it."""
        heard: list[Any] = []
        while True:
            heard = [ended(self.recv(group, 0, async_op=True, timeout=0.2))]
            if self.under_way.is_set():  # on a busy machine, the message may come before the first limit, or after it
                break
        try:
            self.recv(group, 0, timeout=0.1)
        except TimeoutError:
            heard.append("TimeoutError")
        self.go_on.set()
        return [*heard, self.recv(group, 0).sum().item(), self.recv(group, 0)]

    def give_sample(self, groups_: Any, count: int) -> list[bool]:
        """Broadcasts, with tensors and without, from the first rank of group a."""
        good = []
        for n in range(count):
            mine = [n, torch.full((50_000,), float(n)), sample()] if n % 2 else n
            got = self.broadcast(mine if self._worker_name == "a:0" else None, groups=groups_)
            good.append(same(got, mine))
        return good

    def give_large(self, groups_: Any) -> str:
        return ended(self.broadcast(torch.ones(64 << 18), groups=groups_, async_op=True))

    def give_what_cannot_be_sent(self, groups_: Any) -> str:
        mine = {"lock": threading.Lock(), "tensor": torch.ones(50_000)}
        try:
            self.broadcast(mine, groups=groups_)
        except Exception as error:  # noqa: BLE001 - its kind is the answer
            return type(error).__name__
        return ""

    def join_badly(self) -> None:
        """Fail to join the next lane; later ones are joined."""

        def wire(*args: Any, **options: Any) -> Any:
            process_groups.wire = before  # type: ignore[assignment]
            raise RuntimeError("the interface is down\nframe 1: some C++")

        before, process_groups.wire = process_groups.wire, wire  # type: ignore[assignment]

    def error_of_say(self, group: str) -> str:
        try:
            self.send(torch.ones(50_000), group, 0)
        except RlinfActorsError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def error_of_hear(self, group: str) -> str:
        try:
            self.recv(group, 0)
        except RlinfActorsError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def say_until_the_window_is_full(self, count: int, group: str) -> None:
        self.works = [self.send(torch.full((1 << 18,), float(n)), group, 0, async_op=True) for n in range(count)]

    def hear_all(self, count: int, group: str) -> list[torch.Tensor]:
        return [self.recv(group, 0)[:1] for _ in range(count)]

    def say_both(self, group: str) -> None:
        works = [self.send(value, group, 0, async_op=True) for value in (torch.ones(50_000), "behind")]
        for work in works:
            work.wait()

    def say_two(self, mib: int, group: str) -> str:
        return ended(self.send([torch.ones(mib << 17), torch.ones(mib << 17)], group, 0, async_op=True))

    def own_ports(self, count: int) -> list[int]:
        """Held for us: other programs on this machine ask for ports, too."""
        return [self.acquire_free_port() for _ in range(count)]

    def own_group(self, ports: list[int], rank: int, group: str) -> list[Any]:
        """A default group of the user's, made before lanes are in use, and one after; what is left at the end."""
        seen: list[Any] = [dist.is_initialized()]
        self.swap_tensors(50_000, group)
        seen.append(dist.is_initialized())
        for port in ports:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
            mine = torch.full((3,), float(rank + 1))
            dist.all_reduce(mine)
            seen.append(mine.tolist())
            self.swap_tensors(50_000, group)
            dist.all_reduce(mine)
            seen.append((mine.tolist(), dist.get_world_size(), dist.get_rank()))
            dist.destroy_process_group()
        self.swap_tensors(50_000, group)
        seen.append(dist.is_initialized())
        return seen


class Plain(Talker):
    """Without torch as long as nobody sends it a tensor."""
