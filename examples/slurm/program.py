"""A program for job.sbatch: one worker on each node reports its rank and its node."""

from __future__ import annotations

import asyncio

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Where(Worker):
    def node(self) -> tuple[int, int]:
        return self._rank, self._cluster_node_rank


async def main() -> None:
    async with Cluster.connect() as cluster:  # all nodes of the job
        group = await Where.create_group().launch(cluster, NodePlacementStrategy(list(range(cluster.num_nodes))))
        for rank, node in await group.node():
            print(f"rank {rank} runs on node {node}")


if __name__ == "__main__":
    asyncio.run(main())
