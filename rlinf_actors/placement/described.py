"""A cluster that exists only as a description, for trying placements without any node.

`rlinf-actors plan --describe` and tests use it; the older form of PlacementStrategy.get_placement makes a cluster of
identical nodes with it. A description in YAML (or as a mapping) is a list of node entries::

    nodes:
      - {count: 8, ip: 10.0.0.1, accelerator: {type: NV_GPU, model: A800, number: 8}}
      - {count: 2, ip: 10.0.1.1, cpus: 16, robots: [{type: Franka, number: 1}]}

An entry stands for ``count`` identical nodes; their addresses count up from ``ip``.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.config.config_values import load_yaml, plain, whole_number
from rlinf_actors.conversion import convert, nearest
from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType, HardwareInfo, HardwareResource
from rlinf_actors.model.node import CLUSTER_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.placement.node_groups import build_node_groups, with_configured_hardware
from rlinf_actors.plurals import counted


class _AcceleratorSpec(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(pattern=r"\S", description="a type of accelerator")] = "NV_GPU"
    model: Any = ""
    number: Any = 1


class _RobotSpec(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(pattern=r"\S", description="the name of a hardware type")]
    model: Any = ""
    number: Any = 1


_RobotEntry = Annotated[_RobotSpec, Meta(description="a mapping such as {type: Franka, number: 1}")]


class _NodeSpec(msgspec.Struct, forbid_unknown_fields=True):
    count: Any = 1
    ip: Annotated[str, Meta(pattern=r"\S", description="an IP address")] | None = None
    cpus: Any = 1
    accelerator: (
        Annotated[_AcceleratorSpec, Meta(description="a mapping such as {type: NV_GPU, model: A800, number: 8}")] | None
    ) = None
    robots: Annotated[list[_RobotEntry], Meta(description="a list such as [{type: Franka}]")] | None = None


_EXAMPLE = "{count: 2, accelerator: {type: NV_GPU, number: 8}}"
_NodeEntry = Annotated[_NodeSpec, Meta(description=f"a mapping such as {_EXAMPLE}")]


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    nodes: Annotated[list[_NodeEntry], Meta(description=f"a list such as [{_EXAMPLE}]")]


class DescribedCluster:
    """A cluster of nodes that exist only as a description, for trying placements.

    It has the members of ClusterView, so placement strategies take it like a Cluster.
    """

    def __init__(self, nodes: Sequence[NodeInfo], config: ClusterConfig | None = None) -> None:
        """Make a cluster of described nodes.

        Args:
            nodes: the nodes, with ranks 0 to N-1, each once.
            config: its node groups become the groups of the cluster; a node that lists no robots of a configured type
                gets the configured ones. If None, the cluster has only the built-in groups.

        Raises:
            ConfigError: node ranks are not 0 to N-1, or *config* needs a node that is missing.
        """
        ranked = sorted(nodes, key=lambda node: node.node_rank)
        if [node.node_rank for node in ranked] != list(range(len(ranked))):
            raise ConfigError(
                f"the described nodes have ranks {[node.node_rank for node in ranked]}; they must be "
                f"0-{len(ranked) - 1}, each once"
            )
        if config is not None:
            if len(ranked) < config.num_nodes:
                raise ConfigError(
                    f"is {config.num_nodes}, but the described cluster has {counted(len(ranked), 'node')}",
                    path="cluster.num_nodes",
                )
            ranked = with_configured_hardware(config, ranked[: config.num_nodes])
        self._groups = build_node_groups(config, ranked)
        self._nodes = self._groups[CLUSTER_GROUP].nodes

    @classmethod
    def identical(
        cls, num_nodes: int, num_accelerators: int, kind: str = "NV_GPU", model: str = ""
    ) -> DescribedCluster:
        return cls(
            [_node(rank, f"node-{rank}", 1, _accelerators(kind, model, num_accelerators)) for rank in range(num_nodes)]
        )

    @classmethod
    def from_any(cls, source: Any, config: ClusterConfig | None = None) -> DescribedCluster:
        """Return the cluster that *source* describes: a path of a YAML file, or a mapping or list of node entries.

        Raises:
            ConfigError: a key or value is wrong; ``path`` names it.
        """
        return cls(parse_description(source), config)

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        return sum(node.num_accelerators for node in self._nodes)

    @property
    def node_groups(self) -> dict[str, NodeGroupInfo]:
        return dict(self._groups)

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        return self._groups.get(str(label))

    def get_node_info(self, node_rank: int) -> NodeInfo:
        if not 0 <= node_rank < len(self._nodes):
            raise PlacementError(
                f"there is no node {node_rank}; the described cluster has {counted(len(self._nodes), 'node')}"
            )
        return self._nodes[node_rank]


def parse_description(source: Any) -> list[NodeInfo]:
    """Return the nodes that *source* describes: a path of a YAML file, or a mapping or list of node entries.

    Raise ConfigError if a key or value is wrong; ``path`` names it.
    """
    loaded = plain(load_yaml(source) if isinstance(source, (str, os.PathLike)) else source, "")
    description = convert({"nodes": loaded} if isinstance(loaded, list) else loaded, _Description, "")
    nodes: list[NodeInfo] = []
    for index, entry in enumerate(description.nodes):
        path = f"nodes[{index}]"
        count = whole_number(entry.count, f"{path}.count", least=1)
        cpus = whole_number(entry.cpus, f"{path}.cpus", least=1)
        resources = _resources(entry, path)
        for number in range(count):
            nodes.append(_node(len(nodes), _ip(entry.ip, number, len(nodes), f"{path}.ip"), cpus, resources))
    if not nodes:
        raise ConfigError("has no node", path="nodes")
    return nodes


def _node(rank: int, ip: str, cpus: int, resources: Sequence[HardwareResource]) -> NodeInfo:
    return NodeInfo(
        node_rank=rank, ray_id=f"node-{rank}", node_ip=ip, num_cpus=cpus, hardware_resources=list(resources)
    )


def _ip(first: str | None, number: int, rank: int, path: str) -> str:
    if first is None:
        return f"node-{rank}"
    try:
        return str(ipaddress.ip_address(first.strip()) + number)
    except ValueError as error:
        raise ConfigError(f"is {first!r}, which is no IP address", path=path) from error


def _resources(entry: _NodeSpec, path: str) -> list[HardwareResource]:
    found: list[HardwareResource] = []
    if entry.accelerator is not None:
        where, kind = f"{path}.accelerator", entry.accelerator.type
        known = [member.value for member in ACCELERATOR_TABLE if member is not AcceleratorType.NO_ACCEL]
        if kind not in known:
            raise ConfigError(
                f"there is no accelerator type {kind!r}; did you mean {nearest(kind, known)!r}? "
                f"Types: {', '.join(known)}",
                path=f"{where}.type",
            )
        number = whole_number(entry.accelerator.number, f"{where}.number")
        found += _accelerators(kind, str(entry.accelerator.model), number)
    for index, robot in enumerate(entry.robots or ()):
        number = whole_number(robot.number, f"{path}.robots[{index}].number", least=1)
        found.append(HardwareResource(robot.type, [HardwareInfo(robot.type, str(robot.model))] * number))
    return found


def _accelerators(kind: str, model: str, number: int) -> list[HardwareResource]:
    return [HardwareResource(kind, [AcceleratorInfo(kind, model, index=index) for index in range(number)])]
