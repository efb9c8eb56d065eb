"""Plan: where a configuration would run each worker, computed before anything runs (`rlinf-actors plan conf.yaml`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from rlinf_actors.config.cluster_config import spell_ranks
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.component import ComponentPlacement, PlacementMode
from rlinf_actors.placement.environment import GroupLayout, worker_environment
from rlinf_actors.placement.node_groups import ClusterView, find_group
from rlinf_actors.plurals import counted
from rlinf_actors.shown import html_table

_HEADINGS = ("NODE", "ADDRESS", "RANKS", "RESOURCES", "INTERPRETER")


class PlannedComponent(msgspec.Struct, frozen=True):
    """Where the workers of one component of a configuration would run."""

    name: str
    node_groups: tuple[str, ...]  # labels of the node groups that its rule names
    placement: str  # placement string of its rule
    hardware_ranks: list[int]  # ranks of the resources that it uses
    placements: list[Placement]  # of its workers, by rank
    groups: dict[str, NodeGroupInfo]  # the node groups of its rule, by label


class Plan(msgspec.Struct, frozen=True):
    """The result of `plan`: where the components of a configuration would run on a cluster."""

    nodes: list[NodeInfo]  # by rank
    components: list[PlannedComponent]  # in the order of the configuration
    placement_mode: PlacementMode

    def render(self) -> str:
        """Return the plan as text: a table for each component, with a line for each node that the component uses."""
        accelerators = sum(node.num_accelerators for node in self.nodes)
        machines = f"{counted(len(self.nodes), 'node')}, {counted(accelerators, 'accelerator')}"
        head = f"{machines}; {self.placement_mode.value}"
        return "\n\n".join([head, *(_render(component, self.nodes) for component in self.components)]) + "\n"

    def _repr_html_(self) -> str:
        rows = [
            (component.name, component.placement, len(component.placements), ", ".join(component.node_groups))
            for component in self.components
        ]
        title = f"plan on {counted(len(self.nodes), 'node')}, {self.placement_mode.value}"
        return html_table(title, ("component", "placement", "workers", "node groups"), rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values. Keys are stable; later versions may add keys."""
        return {
            "num_nodes": len(self.nodes),
            "num_accelerators": sum(node.num_accelerators for node in self.nodes),
            "placement_mode": self.placement_mode.value,
            "nodes": [_node_dict(node) for node in self.nodes],
            "components": [_component_dict(component, self.nodes) for component in self.components],
        }

    def environment(self, component: str, rank: int, group_name: str | None = None) -> dict[str, str]:
        """Return the environment variables that a worker of the plan would get, without MASTER_ADDR and MASTER_PORT.

        Args:
            component: name of the component.
            rank: rank of the worker.
            group_name: name of the worker's group; None for the component's name.

        Raises:
            KeyError: there is no such component.
            IndexError: there is no such rank.
        """
        planned = {entry.name: entry for entry in self.components}[component]
        placement = planned.placements[rank]
        return worker_environment(
            group_name or component,
            placement,
            GroupLayout.of(planned.placements),
            self.nodes[placement.cluster_node_rank],
            planned.groups[placement.node_group_label],
            "",
        )

    @property
    def closed(self) -> list[str]:
        """Why the head would refuse the launch, one text for each node that does not admit this job's workers."""
        used = {one.cluster_node_rank for entry in self.components for one in entry.placements}
        return [node.closed for node in self.nodes if node.node_rank in used and node.closed]


def plan(config: Any, cluster: ClusterView) -> Plan:
    """Return where the components of a configuration would run on a cluster, without starting anything.

    Args:
        config: a whole configuration or its ``cluster:`` section: a mapping, an OmegaConf DictConfig, the path of a
            YAML file, or a ClusterConfig.
        cluster: the cluster: a Cluster or a DescribedCluster.

    Raises:
        ConfigError: the configuration has a fault.
        PlacementError: a placement breaks a rule or does not fit the cluster.
    """
    placement = ComponentPlacement(config, cluster)
    components: list[PlannedComponent] = []
    for name in placement.components:
        rule = placement.get_rule(name)
        components.append(
            PlannedComponent(
                name=name,
                node_groups=rule.node_groups,
                placement=rule.placement,
                hardware_ranks=placement.get_hardware_ranks(name),
                placements=placement.get_strategy(name).get_placement(cluster),
                groups={label: find_group(cluster, label) for label in rule.node_groups},
            )
        )
    nodes = [cluster.get_node_info(rank) for rank in range(cluster.num_nodes)]
    return Plan(nodes, components, placement.placement_mode)


def _render(component: PlannedComponent, nodes: Sequence[NodeInfo]) -> str:
    title = (
        f"{component.name}: {counted(len(component.placements), 'process')} on {', '.join(component.node_groups)} "
        f"({component.placement})"
    )
    rows = [_HEADINGS]
    for (node_rank, label), run in groupby(
        component.placements, lambda one: (one.cluster_node_rank, one.node_group_label)
    ):
        placements = list(run)
        group = component.groups[label]
        rows.append(
            (
                str(node_rank),
                nodes[node_rank].node_ip,
                spell_ranks([placement.rank for placement in placements]),
                _resources(placements, group),
                group.get_node_python_interpreter_path(node_rank) or "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _resources(placements: Sequence[Placement], group: NodeGroupInfo) -> str:
    if group.counts_nodes:
        return "the node" if len(placements) == 1 else f"the node, shared by {len(placements)}"
    users = Counter(rank for placement in placements for rank in placement.local_hardware_ranks)
    first = placements[0]
    name = first.accelerator_type.value if group.holds_accelerators else group.resource_name
    each = len(first.local_hardware_ranks)
    if len(placements) == 1:
        how = ""
    elif max(users.values()) > 1:
        how = f", {max(users.values())} processes on each"
    else:
        how = f", {each} each"
    return f"{name} {spell_ranks(sorted(users))}{how}"


def _node_dict(node: NodeInfo) -> dict[str, Any]:
    return {
        "rank": node.node_rank,
        "id": node.node_id,
        "ip": node.node_ip,
        "labels": list(node.node_labels),
        "accelerator_type": node.accelerator_type.value,
        "accelerator_model": node.accelerator_model,
        "num_accelerators": node.num_accelerators,
        "closed": node.closed,
        "hardware": {resource.type: resource.count for resource in node.hardware_resources},
    }


def _component_dict(component: PlannedComponent, nodes: Sequence[NodeInfo]) -> dict[str, Any]:
    return {
        "name": component.name,
        "node_groups": list(component.node_groups),
        "placement": component.placement,
        "world_size": len(component.placements),
        "hardware_ranks": component.hardware_ranks,
        "workers": [
            {
                "rank": placement.rank,
                "cluster_node_rank": placement.cluster_node_rank,
                "node_ip": nodes[placement.cluster_node_rank].node_ip,
                "placement_node_rank": placement.placement_node_rank,
                "node_group_label": placement.node_group_label,
                "local_hardware_ranks": list(placement.local_hardware_ranks),
                "accelerator_type": AcceleratorType.named(placement.accelerator_type).value,
                "local_accelerator_rank": placement.local_accelerator_rank,
                "visible_accelerators": list(placement.visible_accelerators),
                "isolate_accelerator": placement.isolate_accelerator,
                "local_rank": placement.local_rank,
                "local_world_size": placement.local_world_size,
                "python_interpreter_path": component.groups[
                    placement.node_group_label
                ].get_node_python_interpreter_path(placement.cluster_node_rank),
                "env_vars": component.groups[placement.node_group_label].get_node_env_vars(placement.cluster_node_rank),
            }
            for placement in component.placements
        ],
    }
