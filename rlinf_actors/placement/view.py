"""What a placement needs to know of a cluster."""

from __future__ import annotations

from typing import Protocol

from rlinf_actors.errors import PlacementError
from rlinf_actors.model.node import CLUSTER_GROUP, NODE_GROUP, NodeGroupInfo, NodeInfo


class ClusterView(Protocol):
    """A cluster, real or described; the four members that placements use."""

    @property
    def num_nodes(self) -> int:
        """How many nodes it has."""

    @property
    def num_accelerators(self) -> int:
        """How many accelerators all nodes have together."""

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        """The group called *label*, None if there is none."""

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """The node of that rank."""


def find_group(cluster: ClusterView, label: str) -> NodeGroupInfo:
    """The group called *label*; the built-in ones are made from the nodes where the view lacks them.

    Raises:
        PlacementError: there is no such group; the message lists those that the nodes belong to.
    """
    group = cluster.get_node_group(label)
    if group is not None:
        return group
    nodes = [cluster.get_node_info(rank) for rank in range(cluster.num_nodes)]
    if label in (CLUSTER_GROUP, NODE_GROUP):
        return NodeGroupInfo(label=label, nodes=nodes)
    known = dict.fromkeys(label for node in nodes for label in node.node_labels)
    names = ", ".join([*known, *(name for name in (CLUSTER_GROUP, NODE_GROUP) if name not in known)])
    raise PlacementError(f"there is no node group {label!r} in this cluster; its groups are {names}")
