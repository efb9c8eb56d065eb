"""Convert the resource ranks of workers to placements: the node of each worker, and the devices that it sees. Pure.

The placement strategies call `place` and `place_on_nodes`. Time is linear in workers and resources. Placement strings
are parsed in grammar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from rlinf_actors.errors import PlacementError
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.grammar import Target
from rlinf_actors.placement.node_groups import ClusterView, find_group


class Resource(msgspec.Struct, frozen=True):
    """One resource of a node group: a node, or the piece of hardware at position *local* of the node."""

    group: NodeGroupInfo
    node: NodeInfo
    local: int

    @property
    def identity(self) -> tuple[int, str, int]:
        """Key of the resource, which is equal in all node groups that contain the resource."""
        return (self.node.node_rank, self.group.resource_name, self.local)


class ResourceTable:
    """The resources of one or more node groups. Resource ranks count through the groups in the order given."""

    def __init__(self, groups: Sequence[NodeGroupInfo]) -> None:
        self.groups = tuple(groups)
        self.label = ",".join(group.label for group in self.groups)
        self.resources = [Resource(group, node, local) for group in self.groups for node, local in group.resources]
        self._count = Counter(resource.node.node_rank for resource in self.resources)
        self._first: dict[int, int] = {}
        for rank, resource in enumerate(self.resources):
            self._first.setdefault(resource.node.node_rank, rank)
        if len(self.groups) > 1:
            self._check_disjoint()

    @classmethod
    def of(cls, cluster: ClusterView, labels: Sequence[str]) -> ResourceTable:
        """Return the resources of the node groups called *labels*.

        Raise PlacementError if a group is unknown, or two groups contain the same resource.
        """
        return cls([find_group(cluster, label) for label in labels])

    @property
    def target(self) -> Target:
        nouns = list(dict.fromkeys(group.resource_name for group in self.groups))
        return Target(self.label, len(self.resources), nouns[0] if len(nouns) == 1 else "resource")

    @property
    def offered(self) -> list[int]:
        """The ranks of the resources for a placement that names none: those of nodes on which the job may launch.

        All ranks if there is no such node; then the head says why.
        """
        ranks = [rank for rank, resource in enumerate(self.resources) if not resource.node.closed]
        return ranks or list(range(len(self.resources)))

    def first_on_node(self, node_rank: int) -> int:
        """Return the rank of the first resource on a node. Raise PlacementError if the node has none in this table."""
        if node_rank not in self._first:
            raise PlacementError(f"node {node_rank} has no resource in {self.target}")
        return self._first[node_rank]

    def count_on_node(self, node_rank: int) -> int:
        return self._count[node_rank]

    def _check_disjoint(self) -> None:
        seen: dict[tuple[int, str, int], Resource] = {}
        for resource in self.resources:
            other = seen.setdefault(resource.identity, resource)
            if other is not resource:
                raise PlacementError(
                    f"node groups {other.group.label!r} and {resource.group.label!r} both hold "
                    f"{_describe(resource)}; groups that are used together must not overlap"
                )


def place(
    assignment: Sequence[Sequence[int]], table: ResourceTable, isolate_accelerator: bool = True
) -> list[Placement]:
    """Return the placements of workers, by rank. *assignment* has the ranks of each worker's resources in *table*.

    If *isolate_accelerator*, a worker sees only its own accelerators; otherwise it sees all accelerators that its node
    group has on its node. Raise PlacementError if a resource does not exist, or a worker would have resources of two
    nodes, two node groups or two types of hardware.
    """
    index: dict[int, int] = {}
    held = [_held(rank, ranks, table) for rank, ranks in enumerate(assignment)]
    return _with_local_ranks([_placement(rank, index, one, isolate_accelerator) for rank, one in enumerate(held)])


def place_on_nodes(entries: Sequence[tuple[NodeGroupInfo, NodeInfo]]) -> list[Placement]:
    """Place one worker on the node of each entry, a pair of a node group and one of its nodes, by rank.

    A worker sees all accelerators that the group has on the node, none if the group hides them.
    """
    index: dict[int, int] = {}
    return _with_local_ranks([_on_node(rank, index, group, node) for rank, (group, node) in enumerate(entries)])


def _held(rank: int, ranks: Sequence[int], table: ResourceTable) -> list[Resource]:
    for number in ranks:
        if not 0 <= number < len(table.resources):
            raise PlacementError(
                f"process {rank} is given resource {number} of {table.target}: the resource is out of range"
            )
    held = [table.resources[number] for number in ranks]
    first = held[0]
    for resource in held[1:]:
        if resource.node.node_rank != first.node.node_rank:
            raise PlacementError(
                f"process {rank} would hold resources {_spell(ranks)} of node group {table.label!r}, "
                f"which lie on nodes {first.node.node_rank} and {resource.node.node_rank}; a process sits on one node: "
                f"{_fewer_resources(first, ranks)}. All resources of a process must be on the same node"
            )
        if resource.group is not first.group or _kind(resource) != _kind(first):
            raise PlacementError(
                f"process {rank} would hold {_describe(first)} and {_describe(resource)}; "
                "a process holds one type of hardware of one node group"
            )
    return held


def _on_node(rank: int, index: dict[int, int], group: NodeGroupInfo, node: NodeInfo) -> Placement:
    """Return the placement of a worker that has no accelerators of its own and sees those of *group* on *node*.

    *index* maps ranks of nodes to placement_node_rank; a node that is not in it is added with the next number.
    """
    seen = () if group.hides_accelerators else group.accelerators_of(node)
    kind = node.accelerator_kinds[seen[0]] if seen else AcceleratorType.NO_ACCEL
    return Placement(
        rank=rank,
        cluster_node_rank=node.node_rank,
        placement_node_rank=index.setdefault(node.node_rank, len(index)),
        accelerator_type=kind,
        visible_accelerators=_names(group, node, kind),
        isolate_accelerator=group.hides_accelerators and bool(node.accelerators),
        node_group_label=group.label,
        node_id=node.node_id,
    )


def _placement(rank: int, index: dict[int, int], held: Sequence[Resource], isolate: bool) -> Placement:
    group, node = held[0].group, held[0].node
    found = _on_node(rank, index, group, node)
    if group.counts_nodes:
        return found
    found = replace(found, local_hardware_ranks=[resource.local for resource in held])
    if not group.holds_accelerators:
        return found
    first, kind = held[0].local, node.accelerator_kinds[held[0].local]
    names = node.accelerator_device_names
    visible = _names(group, node, kind)
    return replace(
        found,
        local_accelerator_rank=first,
        accelerator_type=kind,
        visible_accelerators=[names[resource.local] for resource in held] if isolate else visible,
        isolate_accelerator=isolate,
    )


def _names(group: NodeGroupInfo, node: NodeInfo, kind: AcceleratorType) -> list[str]:
    names = node.accelerator_device_names
    return [names[local] for local in group.accelerators_of(node) if node.accelerator_kinds[local] == kind]


def _with_local_ranks(found: Sequence[Placement]) -> list[Placement]:
    on_node = Counter(placement.cluster_node_rank for placement in found)
    passed: Counter[int] = Counter()
    for placement in found:
        node = placement.cluster_node_rank
        placement.local_rank, placement.local_world_size = passed[node], on_node[node]
        passed[node] += 1
    return list(found)


def _kind(resource: Resource) -> str:
    if not resource.group.holds_accelerators:
        return resource.group.resource_name
    return resource.node.accelerator_kinds[resource.local].value


def _describe(resource: Resource) -> str:
    if resource.group.counts_nodes:
        return f"node {resource.node.node_rank}"
    kind = _kind(resource)
    return f"{kind} {resource.local} of node {resource.node.node_rank} (group {resource.group.label!r})"


def _spell(ranks: Sequence[int]) -> str:
    consecutive = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 1 else ", ".join(map(str, ranks))


def _fewer_resources(first: Resource, ranks: Sequence[int]) -> str:
    on_node = sum(node.node_rank == first.node.node_rank for node, _ in first.group.resources)
    if first.group.counts_nodes:
        return "name at least as many processes as nodes"
    here = f"node {first.node.node_rank} has {on_node}"
    return f"{here}, so give each process a number that divides {on_node}, not {len(ranks)}"
