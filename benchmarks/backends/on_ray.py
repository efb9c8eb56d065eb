"""Ray on one node, without dashboard and usage reports. Runs in Ray's own environment."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.queue import Queue

from benchmarks.cases.queues import ROOM
from benchmarks.methods import Methods, each_timed, item, message, numbered, seen
from benchmarks.model import Case, Figures
from benchmarks.timing import clock

if TYPE_CHECKING:
    from benchmarks.hosts import TwoHosts

OBJECT_STORE_BYTES = 2 << 30
"""Size of the object store: several of the largest arrays of the echo. Memory is allocated when it is used."""


class BenchActor(Methods):
    def __init__(self, torch: bool = False) -> None:
        if torch:
            import torch as _torch  # noqa: F401 - an actor whose work needs it

    def send_and_receive(self, peer: Any, size: int, count: int) -> list[float]:
        value = message(size)
        return each_timed(count, lambda: ray.get(peer.echo.remote(value)))

    def give(self, peer: Any, size: int, count: int) -> list[float]:
        import torch

        tensor, taken = torch.ones(size, dtype=torch.uint8), []
        for n in range(count):
            numbered(tensor, n)
            start = clock()
            taken.append(ray.get(peer.take.remote(tensor, n)) - start)
        return taken

    def take(self, value: Any, n: int) -> float:
        return seen(value, n)

    def spread(self, peers: Sequence[Any], size: int, count: int) -> list[float]:
        import numpy as np

        array, taken = np.ones(size, np.uint8), []
        for n in range(count):
            numbered(array, n)
            start = clock()
            shared = ray.put(array)
            taken.append(max(ray.get([peer.take.remote(shared, n) for peer in peers])) - start)
        return taken

    def produce(self, queue: Queue, size: int, count: int, window: int) -> float:
        value, start, pending = item(size), clock(), collections.deque()
        for _ in range(count):
            if window == 1:
                queue.put(value)
                continue
            if len(pending) == window:
                ray.get(pending.popleft())
            pending.append(queue.actor.put.remote(value))
        ray.get(list(pending))
        return start

    def consume(self, queue: Queue, size: int, count: int, window: int) -> float:
        pending = collections.deque(queue.actor.get.remote() for _ in range(window if window > 1 else 0))
        for n in range(count):
            value = ray.get(pending.popleft()) if window > 1 else queue.get()
            if len(value) != size:
                raise RuntimeError(f"item {n} has {len(value)} bytes; {size} were put")
            if window > 1 and n + window < count:
                pending.append(queue.actor.get.remote())
        return clock()


class RayGroup:
    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def _submit(self, method: str, args: Sequence[object]) -> list[Any]:
        if args:  # once into the object store, as one does for many receivers; small calls have none
            args = [ray.put(arg) for arg in args] if len(self._actors) > 1 else args
        return [getattr(actor, method).remote(*args) for actor in self._actors]

    def call(self, method: str, *args: object) -> list[object]:
        return ray.get(self._submit(method, args))

    async def call_async(self, method: str, *args: object) -> list[object]:
        return [await reference for reference in self._submit(method, args)]

    def burst(self, method: str, count: int) -> None:
        ray.get([reference for _ in range(count) for reference in self._submit(method, ())])

    async def burst_async(self, method: str, count: int) -> None:
        for reference in [reference for _ in range(count) for reference in self._submit(method, ())]:
            await reference

    def exchange(self, size: int, count: int) -> list[float]:
        first, second = self._actors
        return ray.get(first.send_and_receive.remote(second, size, count))

    def transfer(self, kept: bool, size: int, count: int) -> list[float]:
        first, second = self._actors
        return ray.get(first.give.remote(second, size, count))

    def spread(self, size: int, count: int) -> list[float]:
        first, *others = self._actors
        return ray.get(first.spread.remote(others, size, count))

    def queue(self, size: int, count: int, window: int) -> float:
        queue = Queue(maxsize=ROOM * window)
        first, second = self._actors
        consuming = second.consume.remote(queue, size, count, window)
        start = ray.get(first.produce.remote(queue, size, count, window))
        end = ray.get(consuming)
        queue.shutdown()
        return count / (end - start)

    def release(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


class OnRay:
    IMPORT = "import ray"
    NAMES = "from ray import init, remote"

    def __init__(self) -> None:
        self._nodes = ["127.0.0.1"]
        self._other: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ray.init(
            "local",
            include_dashboard=False,
            logging_level="warning",
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=self._nodes[0],
            _temp_dir=os.path.join(tempfile.gettempdir(), "ray"),  # the runner removes it
        )

    def start_apart(self, hosts: TwoHosts) -> None:
        self._nodes = [hosts.here, hosts.other]
        self.start()
        head = ray.get_runtime_context().gcs_address
        ray_command = os.path.join(os.path.dirname(sys.executable), "ray")
        self._other = subprocess.Popen(
            [*hosts.prefix, ray_command, "start", f"--address={head}", f"--node-ip-address={hosts.other}",
             f"--object-store-memory={OBJECT_STORE_BYTES}", "--block"]
        )  # fmt: skip
        # an actor of the other node answers when that is there
        ray.get(ray.remote(BenchActor).options(resources={f"node:{hosts.other}": 0.001}).remote().noop.remote())

    def spawn(self, count: int, torch: bool = False) -> RayGroup:
        actor, nodes = ray.remote(BenchActor), self._nodes
        if len(nodes) == 1:
            return RayGroup([actor.remote(torch) for _ in range(count)])
        where = [{f"node:{nodes[rank % len(nodes)]}": 0.001} for rank in range(count)]
        return RayGroup([actor.options(resources=place).remote(torch) for place in where])

    def stop(self) -> None:
        if self._other is not None:
            self._other.terminate()
            self._other.wait()
        ray.shutdown()

    def measure(self, case: Case) -> Figures:
        return case.measure(self)


BACKEND = OnRay()
