"""What the head says of nodes, as the NodeInfo that placements and users work with. Pure.

What a Cluster says of its nodes: as they were when it started, without asking anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rlinf_actors.errors import PlacementError
from rlinf_actors.hardware.probe_report import holds_accelerators
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareInfo, HardwareResource, is_accelerator_type
from rlinf_actors.model.node import CLUSTER_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire.values import HardwareReport, NodeState

_ACCELERATOR_FIELDS = {field.name for field in fields(AcceleratorInfo)} - {"type", "model"}


def node_info(state: NodeState) -> NodeInfo:
    """One node."""
    report = state.report
    return NodeInfo(
        node_labels=list(report.labels),
        node_rank=state.rank,
        ray_id=report.node_id,
        node_ip=report.ip,
        num_cpus=report.num_cpus,
        python_interpreter_path=report.interpreter,
        default_env_vars={},
        env_vars=dict(report.env_vars),
        hardware_resources=[
            HardwareResource(
                resource.type,
                [_hardware(info, holds_accelerators(resource)) for info in resource.infos],
                resource.registered_by,
            )
            for resource in report.resources
        ],
        profiler_backends=list(report.profilers),
        interfaces=dict(report.interfaces),
        interface=report.interface,
    )


def node_infos(states: Sequence[NodeState]) -> list[NodeInfo]:
    """Nodes that have a rank, by rank."""
    return [node_info(state) for state in sorted(states, key=lambda state: state.rank) if state.rank >= 0]


def _hardware(report: HardwareReport, accelerator: bool) -> HardwareInfo:
    if accelerator or is_accelerator_type(report.type):
        known = {name: value for name, value in report.detail.items() if name in _ACCELERATOR_FIELDS}
        return AcceleratorInfo(report.type, report.model, **known)  # type: ignore[arg-type]
    info = HardwareInfo(report.type, report.model)
    info.__dict__.update(report.detail)
    return info


class ClusterView:
    """The nodes of a cluster by their ranks. Any thread."""

    runtime: Runtime
    _states: list[NodeState]
    _nodes: list[NodeInfo]
    _groups: dict[str, NodeGroupInfo]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    @property
    def num_accelerators(self) -> int:
        """Number of accelerators on all nodes."""
        return sum(node.num_accelerators for node in self._nodes)

    @property
    def accelerator_ranks(self) -> list[list[int]]:
        """For each node the ranks of its accelerators, counted through the cluster."""
        ranks, first = [], 0
        for node in self._nodes:
            ranks.append(list(range(first, first + node.num_accelerators)))
            first += node.num_accelerators
        return ranks

    def get_node_info(self, node_rank: int) -> NodeInfo:
        """The node of that rank. Raises PlacementError if there is none."""
        if not 0 <= node_rank < len(self._nodes):
            raise PlacementError(f"node {node_rank} is not in this cluster, which has nodes 0-{len(self._nodes) - 1}")
        return self._nodes[node_rank]

    def get_node_ip(self, node_rank: int) -> str:
        """Address of the node of that rank."""
        return self.get_node_info(node_rank).node_ip

    def node_name(self, node_rank: int) -> str:
        """How messages to people call the node of that rank."""
        for state in self._states:
            if state.rank == node_rank:
                return state.report.hostname
        return str(node_rank)

    def here(self) -> int:
        """Rank of the node whose machine this process runs on (the first, of several), 0 if it is none of them."""
        return min((state.rank for state in self._states if state.report.host == self.runtime.host), default=0)

    def get_node_group(self, label: str = CLUSTER_GROUP) -> NodeGroupInfo | None:
        """The node group of that label, None if there is none."""
        return self._groups.get(str(label))
