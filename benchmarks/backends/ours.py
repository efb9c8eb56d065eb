"""rlinf_actors, by its public API."""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import rlinf_actors
from benchmarks.cases.queues import ROOM
from benchmarks.methods import Methods, each_timed, item, message, numbered, seen
from benchmarks.model import Case, Figures
from benchmarks.timing import clock

if TYPE_CHECKING:
    from benchmarks.hosts import TwoHosts

_numbers = itertools.count()


class BenchWorker(rlinf_actors.Worker, Methods):  # type: ignore[misc]
    def __init__(self, torch: bool = False) -> None:
        super().__init__()
        if torch:
            import torch as _torch  # noqa: F401 - a worker whose work needs it

    def send_and_receive(self, size: int, count: int) -> list[float]:
        value, peer = message(size), self._group_name

        def there_and_back() -> None:
            self.send(value, peer, 1)
            self.recv(peer, 1)

        return each_timed(count, there_and_back)

    def give(self, kept: bool, size: int, count: int) -> list[float]:
        import torch

        tensor, peer, taken = torch.ones(size, dtype=torch.uint8), self._group_name, []
        for n in range(count):
            numbered(tensor, n)
            start = clock()
            (self.send_tensor if kept else self.send)(tensor, peer, 1)
            taken.append(self.recv(peer, 1) - start)
        return taken

    def take(self, kept: bool, size: int, count: int) -> None:
        import torch

        peer = self._group_name
        into = torch.ones(size, dtype=torch.uint8) if kept else None
        for n in range(count):
            if into is not None:
                self.recv_tensor(into, peer, 0)
            self.send(seen(into if into is not None else self.recv(peer, 0), n), peer, 0)

    def spread(self, size: int, count: int) -> list[float]:
        import numpy as np

        members, taken = [(self._group_name, list(range(self._world_size)))], []
        array = np.ones(size, np.uint8) if self._rank == 0 else None
        for n in range(count):
            if array is None:
                self.send(seen(self.broadcast(groups=members), n), self._group_name, 0)
                continue
            numbered(array, n)
            start = clock()
            self.broadcast(array, groups=members)
            taken.append(max(self.recv(self._group_name, rank) for rank in range(1, self._world_size)) - start)
        return taken

    def produce(self, channel: Any, size: int, count: int, window: int) -> float:
        value, start, works = item(size), clock(), collections.deque()
        for _ in range(count):
            if window == 1:
                channel.put(value)
                continue
            if len(works) == window:
                works.popleft().wait()
            works.append(channel.put(value, async_op=True))
        for work in works:
            work.wait()
        return start

    def consume(self, channel: Any, size: int, count: int, window: int) -> float:
        works = collections.deque(channel.get(async_op=True) for _ in range(window if window > 1 else 0))
        for n in range(count):
            value = works.popleft().wait() if window > 1 else channel.get()
            if len(value) != size:
                raise RuntimeError(f"item {n} has {len(value)} bytes; {size} were put")
            if window > 1 and n + window < count:
                works.append(channel.get(async_op=True))
        return clock()

    def send_back(self, count: int) -> None:
        for _ in range(count):
            self.send(self.recv(self._group_name, 0), self._group_name, 0)


class OurGroup:
    def __init__(self, group: Any) -> None:
        self._group = group

    def call(self, method: str, *args: object) -> list[object]:
        return getattr(self._group, method)(*args).wait()

    async def call_async(self, method: str, *args: object) -> list[object]:
        return await getattr(self._group, method)(*args)

    def burst(self, method: str, count: int) -> None:
        call = getattr(self._group, method)
        for result in [call() for _ in range(count)]:
            result.wait()

    async def burst_async(self, method: str, count: int) -> None:
        call = getattr(self._group, method)
        for result in [call() for _ in range(count)]:
            await result

    def exchange(self, size: int, count: int) -> list[float]:
        back = self._group.execute_on(1).send_back(count)
        taken = self._group.execute_on(0).send_and_receive(size, count).wait()[0]
        back.wait()
        return taken

    def transfer(self, kept: bool, size: int, count: int) -> list[float]:
        taking = self._group.execute_on(1).take(kept, size, count)
        taken = self._group.execute_on(0).give(kept, size, count).wait()[0]
        taking.wait()
        return taken

    def spread(self, size: int, count: int) -> list[float]:
        return self._group.spread(size, count).wait()[0]

    def queue(self, size: int, count: int, window: int) -> float:
        channel = rlinf_actors.Channel.create(f"queue_{next(_numbers)}", maxsize=ROOM * window)
        consuming = self._group.execute_on(1).consume(channel, size, count, window)
        start = self._group.execute_on(0).produce(channel, size, count, window).wait()[0]
        end = consuming.wait()[0]
        channel.close()
        return count / (end - start)

    def release(self) -> None:
        self._group.shutdown()


class Ours:
    IMPORT = "import rlinf_actors"
    NAMES = "from rlinf_actors import Cluster, Worker"

    def __init__(self) -> None:
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._cluster = rlinf_actors.Cluster(num_nodes=1)

    def start_apart(self, hosts: TwoHosts) -> None:
        """Start a cluster of two nodes without keys, since no other machine reaches the network."""
        os.environ["RLINF_ACTORS_INSECURE_TEST_NETWORK"] = "1"
        head = f"{hosts.here}:6380"
        for rank, role in enumerate((["--head", "--listen", head], [*hosts.prefix, "--connect", head])):
            prefix, role = (role[:-2], role[-2:]) if rank else ([], role)
            folder = tempfile.mkdtemp(prefix="n")
            command = [*prefix, sys.executable, "-m", "agentd", *role, "--node-rank", str(rank)]
            places = ["--run-dir", folder, "--state-dir", folder]  # a head's state is below /var/lib otherwise
            self._agents.append(subprocess.Popen([*command, *places, "--insecure-test-network"]))
        self._cluster = rlinf_actors.Cluster(num_nodes=2, head=head)

    def spawn(self, count: int, torch: bool = False) -> OurGroup:
        nodes = self._cluster.num_nodes
        return OurGroup(
            BenchWorker.create_group(torch).launch(
                self._cluster,
                placement_strategy=rlinf_actors.NodePlacementStrategy(sorted(rank % nodes for rank in range(count))),
                name=f"bench_{next(_numbers)}",
            )
        )

    def stop(self) -> None:
        self._cluster.shutdown()
        for agent in reversed(self._agents):
            agent.terminate()
            agent.wait()

    def measure(self, case: Case) -> Figures:
        return case.measure(self)


BACKEND = Ours()
