"""NodeInfo and NodeGroupInfo: nodes and node groups as plain values.

The driver makes them from the nodes' reports; users make them by hand to try a placement without a cluster. A node
group numbers its resources from 0: the resource ranks that placements use. A resource is a piece of the group's own
hardware type if the configuration gives it one; otherwise an accelerator, if any node of the group has one; otherwise a
node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from rlinf_actors.errors import PlacementError
from rlinf_actors.model.hardware import (
    AcceleratorInfo,
    AcceleratorType,
    HardwareInfo,
    HardwareResource,
    is_accelerator_type,
)

CLUSTER_GROUP = "cluster"
"""Label of the built-in node group of all nodes, which a placement uses if it names no group."""
NODE_GROUP = "node"
"""Label of the built-in node group of all nodes whose resources are the nodes, whatever hardware they have."""
RESERVED_LABELS = (CLUSTER_GROUP, NODE_GROUP)

ANY_ACCELERATOR = "Accelerator"
"""RLinf's type of a HardwareResource of accelerators. The type of each accelerator is then in its HardwareInfo."""


@dataclass(frozen=True)
class NodeEnvConfig:
    """Interpreter and environment variables for some nodes of a node group: an entry of ``env_configs``.

    ``node_ranks`` may be given as an int or a sequence, ``env_vars`` as a mapping or as the configuration's list of
    one-key mappings. The fields have RLinf's order.

    Attributes:
        node_ranks: cluster ranks of the nodes that the entry is for.
        env_vars: environment variables of the workers on these nodes, as one-key mappings; None if there are none.
        python_interpreter_path: interpreter of the workers on these nodes; None for the node's own.
        requirements: what the nodes install into an environment for these workers (codesync.requirements); None for no
            environment of their own.
    """

    node_ranks: list[int] = field(default_factory=list)
    env_vars: list[dict[str, str]] | None = None
    python_interpreter_path: str | None = None
    requirements: Any = None

    def __post_init__(self) -> None:
        ranks: int | Sequence[int] = self.node_ranks
        object.__setattr__(self, "node_ranks", [ranks] if isinstance(ranks, int) else list(ranks))
        given: Mapping[str, str] | Sequence[Mapping[str, str]] = self.env_vars or ()
        entries = [given] if isinstance(given, Mapping) else list(given)
        pairs = [{str(key): str(value)} for entry in entries for key, value in entry.items()]
        object.__setattr__(self, "env_vars", pairs or None)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables as one mapping."""
        return {key: value for entry in self.env_vars or () for key, value in entry.items()}


@dataclass(frozen=True)
class NodeInfo:
    """One node of the cluster.

    Attributes:
        node_labels: labels of the node groups that contain the node.
        node_rank: rank of the node in the cluster.
        ray_id: id of the node, under RLinf's name (see :attr:`node_id`).
        node_ip: IP address at which other nodes reach the node.
        num_cpus: number of logical CPUs.
        python_interpreter_path: interpreter of the node's workers, unless the configuration names another.
        default_env_vars: variables that count as set on the node when a worker's network variables are chosen. Empty on
            a real cluster.
        env_vars: variables of agentd's environment that choose devices and network interfaces.
        hardware_resources: the accelerators, and the hardware that node groups own, one entry for each type.
        profiler_backends: names of the profilers that agentd reports.
        interfaces: mapping of each network interface's name to its first IPv4 address.
        interface: name of the interface that has node_ip, "" if unknown.
        closed: why this job may not launch workers on the node, "" if it may. A placement that names no resources
            leaves such a node out.
    """

    node_labels: list[str] = field(default_factory=list)
    node_rank: int = 0
    ray_id: str = ""
    node_ip: str = "127.0.0.1"
    num_cpus: int = 1
    python_interpreter_path: str = ""
    default_env_vars: dict[str, str] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)
    hardware_resources: list[HardwareResource] = field(default_factory=list)
    profiler_backends: list[str] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    interface: str = ""
    closed: str = ""

    @property
    def node_id(self) -> str:
        """Id of the node, which stays the same when agentd restarts."""
        return self.ray_id

    @cached_property
    def accelerators(self) -> tuple[HardwareInfo, ...]:
        """The node's accelerators, in the order of their positions on the node."""
        return tuple(
            info for resource in self.hardware_resources if _is_accelerator(resource) for info in resource.infos
        )

    @property
    def num_accelerators(self) -> int:
        """Number of the node's accelerators."""
        return len(self.accelerators)

    @cached_property
    def accelerator_type(self) -> AcceleratorType:
        """Type of the node's first accelerator; NO_ACCEL if the node has none."""
        return self.accelerator_kinds[0] if self.accelerators else AcceleratorType.NO_ACCEL

    @property
    def accelerator_registered_by(self) -> str:
        """Module that registered the type of the node's first accelerator; "" if that type is built in."""
        with_infos = (found for found in self.hardware_resources if found.infos and _is_accelerator(found))
        return next((found.registered_by for found in with_infos), "")

    @property
    def accelerator_model(self) -> str:
        """Model of the node's first accelerator; "" if the node has none."""
        return self.accelerators[0].model if self.accelerators else ""

    @cached_property
    def accelerator_device_names(self) -> tuple[str, ...]:
        """The name of each accelerator in the visibility variable of its type, in the order of positions on the node.

        For the accelerators of a type, the names are their indices if no two indices are equal (they need not start at
        0), else UUIDs if all have one, else positions among the accelerators of that type. If one of them is a slice of
        a device, the names are UUIDs, because an index names the whole device. Accelerators of two types may have the
        same name.
        """
        names = {kind: iter(_device_names(self.accelerators_of_type(kind))) for kind in self.accelerator_types}
        return tuple(next(names[kind]) for kind in self.accelerator_kinds)

    @cached_property
    def accelerator_kinds(self) -> tuple[AcceleratorType, ...]:
        """Type of each accelerator, in the order of positions on the node."""
        return tuple(
            _kind(resource, info)
            for resource in self.hardware_resources
            if _is_accelerator(resource)
            for info in resource.infos
        )

    @property
    def accelerator_types(self) -> tuple[AcceleratorType, ...]:
        """The different types of the node's accelerators, in the order of positions on the node."""
        return tuple(dict.fromkeys(self.accelerator_kinds))

    def accelerators_of_type(self, kind: AcceleratorType) -> list[HardwareInfo]:
        """Return the node's accelerators of type *kind*, in the order of positions on the node."""
        return [info for info, found in zip(self.accelerators, self.accelerator_kinds, strict=True) if found is kind]

    def get_hardware_infos(self, hw_type: str) -> list[Any]:
        """Return the node's HardwareInfos of type *hw_type*, in the order of positions on the node."""
        if hw_type == ANY_ACCELERATOR:
            return list(self.accelerators)
        found = [info for resource in self.hardware_resources if resource.type == hw_type for info in resource.infos]
        return found or [info for info in self.accelerators if info.type == hw_type]

    def get_hw_resource_count(self, hw_type: str) -> int:
        """Return the number of the node's pieces of hardware type *hw_type*."""
        return len(self.get_hardware_infos(hw_type))


def _device_names(infos: Sequence[HardwareInfo]) -> list[str]:
    known = [info for info in infos if isinstance(info, AcceleratorInfo)]
    indices = {info.index: None for info in known if not info.parent_uuid}
    if len(indices) == len(infos):
        return list(map(str, indices))
    uuids = {info.uuid: None for info in known if info.uuid}
    return list(uuids) if len(uuids) == len(infos) else list(map(str, range(len(infos))))


def _is_accelerator(resource: HardwareResource) -> bool:
    return bool(resource.registered_by) or resource.type == ANY_ACCELERATOR or is_accelerator_type(resource.type)


def _kind(resource: HardwareResource, info: HardwareInfo) -> AcceleratorType:
    """Return the type of the accelerator *info* of *resource*.

    If both have RLinf's type ANY_ACCELERATOR, the type is in the model: ``NV_GPU:A100``.
    """
    for name in (info.type, resource.type):
        if is_accelerator_type(name):
            return AcceleratorType.named(name)
    in_model, colon, _ = info.model.partition(":")
    return AcceleratorType.named(in_model if colon else resource.type)


@dataclass
class NodeGroupInfo:
    """The nodes of one node group, and the ranks of the group's resources.

    Set a field to change it; the resource ranks are then counted again.

    Attributes:
        label: label of the group.
        nodes: nodes of the group; resource ranks run through the nodes in this order.
        hardware_type: the group's own hardware type; ``Accelerator`` if its resources are accelerators; None if they
            are nodes. If it is not given, it is ``Accelerator`` if a node has accelerators that the group uses.
        ignore_hardware: True if the resources are the nodes, whatever hardware they have.
        env_configs: interpreters and environment variables of the group's workers.
        visible: mapping of node ranks to the positions of the accelerators that env_configs lets workers use there, in
            the order of resource ranks. On a node without an entry, workers can use all accelerators.
    """

    DEFAULT_GROUP_LABEL: ClassVar[str] = CLUSTER_GROUP
    NODE_PLACEMENT_GROUP_LABEL: ClassVar[str] = NODE_GROUP
    RESERVED_LABELS: ClassVar[list[str]] = list(RESERVED_LABELS)

    label: str
    nodes: list[NodeInfo] = field(default_factory=list)
    hardware_type: str | None = None
    ignore_hardware: bool = False
    env_configs: Sequence[NodeEnvConfig] | None = None
    visible: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hardware_type is not None or self.ignore_hardware or self.label == NODE_GROUP:
            return
        if any(self.accelerators_of(node) for node in self.nodes):
            self.hardware_type = ANY_ACCELERATOR

    def __setattr__(self, name: str, value: object) -> None:
        for derived in _DERIVED:
            self.__dict__.pop(derived, None)
        super().__setattr__(name, value)

    @property
    def node_ranks(self) -> list[int]:
        """Cluster ranks of the group's nodes."""
        return [node.node_rank for node in self.nodes]

    @property
    def counts_nodes(self) -> bool:
        """True if the group's resources are nodes, not pieces of hardware."""
        return self.ignore_hardware or self.label == NODE_GROUP or self.hardware_type is None

    @property
    def hides_accelerators(self) -> bool:
        """True if the group's workers see no accelerators: those of a configured group with ``ignore_hardware``.

        Workers in the built-in group ``node`` see all accelerators of their nodes.
        """
        return self.ignore_hardware and self.label != NODE_GROUP

    @property
    def holds_accelerators(self) -> bool:
        """True if the group's resources are accelerators."""
        kind = self.hardware_type
        return not self.counts_nodes and kind is not None and (kind == ANY_ACCELERATOR or is_accelerator_type(kind))

    @cached_property
    def _node_by_rank(self) -> dict[int, NodeInfo]:
        return {node.node_rank: node for node in self.nodes}

    @cached_property
    def resources(self) -> list[tuple[NodeInfo, int]]:
        """Each resource, by resource rank, as a pair: its node, and its position on that node.

        If the resources are nodes, the position is 0.
        """
        if self.counts_nodes:
            return [(node, 0) for node in self.nodes]
        if self.holds_accelerators:
            return [(node, local) for node in self.nodes for local in self.accelerators_of(node)]
        return [(node, local) for node in self.nodes for local in range(len(self._infos(node)))]

    def accelerators_of(self, node: NodeInfo) -> Sequence[int]:
        """Return the positions on *node* of the accelerators that the group's workers can use, in the order of resource
        ranks.
        """
        return self.visible.get(node.node_rank, range(node.num_accelerators))

    def _infos(self, node: NodeInfo) -> list[HardwareInfo]:
        if self.counts_nodes:
            return []
        if self.holds_accelerators:
            return [node.accelerators[local] for local in self.accelerators_of(node)]
        return node.get_hardware_infos(str(self.hardware_type))

    @property
    def hardware_resource_count(self) -> int:
        """Number of the group's resources. Resource ranks are 0 to this number minus 1."""
        return len(self.resources)

    @property
    def local_hardware_ranks(self) -> list[int]:
        """Position of each resource on its node, by resource rank; -1 if the resources are nodes."""
        return [-1 if self.counts_nodes else local for _, local in self.resources]

    def get_hardware_infos(self, node_rank: int) -> list[HardwareInfo]:
        """Return the group's pieces of hardware on a node; [] if the group's resources are nodes.

        Raises:
            PlacementError: the node is not in the group.
        """
        return self._infos(self._node(node_rank))

    def group_ranks_to_global_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the cluster ranks of some of the group's nodes.

        Args:
            ranks: indices into ``nodes``.

        Raises:
            PlacementError: an index is not in the group.
        """
        for rank in ranks:
            if not 0 <= rank < len(self.nodes):
                raise PlacementError(
                    f"node {rank} is outside node group {self.label!r}, which has {self._span(len(self.nodes), 'node')}"
                )
        return [self.nodes[rank].node_rank for rank in ranks]

    def get_node_by_hardware_rank(self, rank: int) -> NodeInfo:
        """Return the node of the resource with rank *rank*.

        Raises:
            PlacementError: the group has no such resource.
        """
        return self._resource(rank)[0]

    def get_local_hardware_rank(self, rank: int) -> int:
        """Return the position on its node of the resource with rank *rank*; -1 if the group's resources are nodes.

        Raises:
            PlacementError: the group has no such resource.
        """
        return -1 if self.counts_nodes else self._resource(rank)[1]

    def get_node_env_vars(self, node_rank: int) -> dict[str, str]:
        """Return the environment variables that ``env_configs`` of this group sets on a node.

        Raises:
            PlacementError: the node is not in the group.
        """
        self._node(node_rank)
        chosen = [entry.variables for entry in self.env_configs or () if node_rank in entry.node_ranks]
        return {key: value for env_vars in chosen for key, value in env_vars.items()}

    def get_node_python_interpreter_path(self, node_rank: int) -> str:
        """Return the interpreter of this group's workers on a node: from ``env_configs``, else the node's own.

        Raises:
            PlacementError: the node is not in the group.
        """
        node = self._node(node_rank)
        for entry in self.env_configs or ():
            if node_rank in entry.node_ranks and entry.python_interpreter_path is not None:
                return entry.python_interpreter_path
        return node.python_interpreter_path

    @property
    def resource_name(self) -> str:
        """Name of one resource of the group, for messages: node, accelerator, or the group's own hardware type."""
        if self.counts_nodes:
            return "node"
        return "accelerator" if self.holds_accelerators else str(self.hardware_type)

    def _node(self, node_rank: int) -> NodeInfo:
        try:
            return self._node_by_rank[node_rank]
        except KeyError:
            raise PlacementError(
                f"node {node_rank} is not in node group {self.label!r}, whose nodes are {self.node_ranks}"
            ) from None

    def _resource(self, rank: int) -> tuple[NodeInfo, int]:
        if not 0 <= rank < len(self.resources):
            span = self._span(len(self.resources), self.resource_name)
            raise PlacementError(f"resource {rank} is outside node group {self.label!r}, which has {span}")
        return self.resources[rank]

    @staticmethod
    def _span(count: int, noun: str) -> str:
        if count == 0:
            return f"no {noun}"
        return f"one {noun}: 0" if count == 1 else f"{count} {noun}s: 0-{count - 1}"


_DERIVED = ("resources", "_node_by_rank")
"""The cached properties of a NodeGroupInfo."""
