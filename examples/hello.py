"""Run four greeters on this machine, with asyncio. The script starts its own cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Greeter(Worker):
    """A worker class. Each process of a group has one instance."""

    def __init__(self, greeting: str) -> None:
        super().__init__()
        self._greeting = greeting

    async def greet(self, name: str) -> str:
        return f"{self._greeting}, {name}! I am rank {self._rank} of {self._world_size}, process {os.getpid()}"

    async def count(self, upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    async def refuse(self) -> None:
        raise ValueError(f"rank {self._rank} would rather not")


async def main() -> None:
    # starts a private cluster of one node, which ends with this script
    async with Cluster.connect(num_nodes=1) as cluster:
        four_on_node_0 = NodePlacementStrategy([0, 0, 0, 0])
        async with Greeter.create_group("Hello").launch(cluster, four_on_node_0, name="greeters") as group:
            print(f"group {group.worker_group_name!r} runs {group.world_size} processes:")
            for line in await group.greet("world"):
                print(" ", line)

            first, *_ = await group.execute_on(2).greet("you")  # only rank 2
            print(" ", first)

            numbers = [(rank, number) async for rank, number in group.count(3)]  # all ranks stream
            print(f"  {len(numbers)} numbers streamed by ranks {sorted({rank for rank, _ in numbers})}")

            try:
                await group.execute_on(1).refuse()
            except ValueError as error:  # the worker's exception, with rank, node and traceback
                print("  a worker's ValueError, caught here:", str(error).splitlines()[0])


if __name__ == "__main__":
    asyncio.run(main())
