"""Make the node groups of a cluster from its configuration and its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.model.hardware import HardwareInfo, HardwareResource
from rlinf_actors.model.node import CLUSTER_GROUP, NODE_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.placement.environment import restricted

if TYPE_CHECKING:
    from rlinf_actors.config.cluster_config import ClusterConfig, NodeGroupConfig


def build_node_groups(config: ClusterConfig | None, nodes: Sequence[NodeInfo]) -> dict[str, NodeGroupInfo]:
    """Return the node groups by label: the configured ones in their order, then the built-in ``cluster`` and ``node``.

    Raise ConfigError if a configured group has a node that is not among *nodes*, or if a visibility variable in a
    group's env_configs does not fit the accelerators of a node.
    """
    configured = config.node_groups if config is not None else ()
    labels: dict[int, list[str]] = {}
    for group in configured:
        for rank in group.node_ranks:
            labels.setdefault(rank, []).append(group.label)
    labelled = [
        replace(node, node_labels=list(dict.fromkeys([*labels.get(node.node_rank, ()), *node.node_labels])))
        for node in sorted(nodes, key=lambda node: node.node_rank)
    ]
    by_rank = {node.node_rank: node for node in labelled}
    groups: dict[str, NodeGroupInfo] = {}
    for index, group in enumerate(configured):
        missing = [rank for rank in group.node_ranks if rank not in by_rank]
        if missing:
            raise ConfigError(
                f"group {group.label!r} has node {missing[0]}, but the cluster's nodes are {sorted(by_rank)}",
                path=f"cluster.node_groups[{index}].node_ranks",
            )
        groups[group.label] = NodeGroupInfo(
            label=group.label,
            nodes=[by_rank[rank] for rank in group.node_ranks],
            hardware_type=group.hardware.type if group.hardware is not None else None,
            ignore_hardware=group.ignore_hardware,
            env_configs=group.env_configs or None,
            visible=_visible(group, index, by_rank),
        )
    for label in (CLUSTER_GROUP, NODE_GROUP):
        groups[label] = NodeGroupInfo(label=label, nodes=labelled)
    return groups


def _visible(group: NodeGroupConfig, index: int, nodes: Mapping[int, NodeInfo]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for number, entry in enumerate(group.env_configs):
        path = f"cluster.node_groups[{index}].env_configs[{number}].env_vars"
        for rank in entry.node_ranks:
            left = restricted(entry.variables, nodes[rank], path)
            if left and group.ignore_hardware:
                names = [nodes[rank].accelerator_device_names[position] for position in left]
                raise ConfigError(
                    f"shows accelerators {', '.join(names)} of node {rank}, but group {group.label!r} has "
                    "ignore_hardware: true, which hides all of them; leave one of the two out",
                    path=path,
                )
            if left is not None:
                found[rank] = left
    return found


def with_configured_hardware(config: ClusterConfig, nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return copies of the described *nodes*, each with the robots that *config* has for it.

    Robots of a type that the node lists already are not added.
    """
    found: list[NodeInfo] = []
    for node in nodes:
        resources = list(node.hardware_resources)
        for kind, configs in config.get_hardware_configs(node.node_rank).items():
            if configs and not node.get_hw_resource_count(kind):
                resources.append(HardwareResource(kind, [HardwareInfo(kind, "") for _ in configs]))
        found.append(replace(node, hardware_resources=resources))
    return found


class ClusterView(Protocol):
    """The members of a cluster that placements use. Cluster and DescribedCluster have them."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the cluster."""

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators of all nodes together."""

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        """Return the node group called *label*; None if there is no such group."""

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """Return the node with rank *node_rank*."""


def find_group(cluster: ClusterView, label: str) -> NodeGroupInfo:
    """Return the node group called *label*. If *cluster* lacks a built-in group, make the group from its nodes.

    Raise PlacementError, which lists the groups, if there is no such group.
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
