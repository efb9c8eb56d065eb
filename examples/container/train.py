"""The program of compose.yaml: one worker on each node reports its node."""

from __future__ import annotations

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Where(Worker):
    def node(self) -> int:
        return self._cluster_node_rank


if __name__ == "__main__":
    cluster = Cluster()
    group = Where.create_group().launch(cluster, NodePlacementStrategy(list(range(cluster.num_nodes))))
    print(group.node().wait())
    cluster.shutdown()
