"""rlinf_actors, through its public API."""

from __future__ import annotations

import itertools
from typing import Any

import rlinf_actors
from benchmarks.methods import Methods, each_timed, message
from benchmarks.model import Case, Figures


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

    def release(self) -> None:
        self._group.shutdown()


class Ours:
    IMPORT = "import rlinf_actors"
    NAMES = "from rlinf_actors import Cluster, Worker"

    def __init__(self) -> None:
        self._names = itertools.count()

    def start(self) -> None:
        self._cluster = rlinf_actors.Cluster(num_nodes=1)

    def spawn(self, count: int, torch: bool = False) -> OurGroup:
        return OurGroup(
            BenchWorker.create_group(torch).launch(
                self._cluster,
                placement_strategy=rlinf_actors.NodePlacementStrategy([0] * count),
                name=f"bench_{next(self._names)}",
            )
        )

    def stop(self) -> None:
        self._cluster.shutdown()

    def measure(self, case: Case) -> Figures:
        return case.measure(self)


BACKEND = Ours()
