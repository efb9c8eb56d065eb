"""Worker classes and a driver of the tests of detached groups."""

from __future__ import annotations

import os
import sys
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Keeper(Worker):
    """Remembers what it is given."""

    def __init__(self, gate: str = "") -> None:
        super().__init__()
        self.kept: list[Any] = []
        if gate:
            with open(gate) as opened:  # a FIFO: until somebody opens it to write
                opened.read()

    def keep(self, value: Any) -> list[Any]:
        self.kept.append(value)
        return self.kept

    def pid(self) -> int:
        return os.getpid()

    def says(self, text: str) -> None:
        print(text, flush=True)


class Other(Worker):
    """Another class."""


class Maker(Worker):
    """A worker that launches groups."""

    def makes(self, name: str, **options: Any) -> list[int]:
        group = Keeper.create_group().launch(Cluster(), NodePlacementStrategy([0]), name=name, **options)
        return group.pid().wait()


class AsyncMaker(Worker):
    """The same in a running loop."""

    async def makes(self, name: str, **options: Any) -> list[int]:
        group = Keeper.create_group().launch(Cluster(), NodePlacementStrategy([0]), name=name, **options)
        await group
        return await group.pid()


def main() -> None:
    """A driver: HEAD NAME GATE NODE; launches group NAME and detaches it, says so, and lives until its stdin ends."""
    head, name, gate, node = sys.argv[1:]
    cluster = Cluster(num_nodes=2, head=head, namespace="standing")
    print("launching", flush=True)
    group = Keeper.create_group(gate).launch(cluster, NodePlacementStrategy([int(node)]), name=name, detached=True)
    group.keep("first").wait()
    print(group.pid().wait()[0], flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    import detached_workers

    detached_workers.main()
