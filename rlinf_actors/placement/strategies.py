"""The placement strategies, which choose node and devices of each worker of a group. Public API.

Every ``get_placement`` takes a cluster (Cluster, DescribedCluster, or any object with the members of ClusterView) or,
in the older call, the number of accelerators of each of its identical nodes. A strategy can be used for many groups.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlinf_actors.config.config_values import parse_labels
from rlinf_actors.errors import NodeRankError, PlacementError
from rlinf_actors.model.node import CLUSTER_GROUP, NODE_GROUP, NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.node_groups import ClusterView, find_group
from rlinf_actors.placement.resolver import ResourceTable, place, place_on_nodes
from rlinf_actors.plurals import counted


class PlacementStrategy:
    """Base class of the placement strategies. A strategy does not change and can be used for many groups.

    A strategy of your own overrides get_placement and returns a Placement for each worker.
    """

    _placement_strategy: str | None = None
    _logger = logging.getLogger("rlinf_actors.placement")

    def get_placement(
        self,
        cluster: ClusterView | int | None = None,
        isolate_accelerator: bool = True,
        *,
        num_gpus_per_node: int | None = None,
        isolate_gpu: bool | None = None,
    ) -> list[Placement]:
        """Return the placement of every worker of a group, by rank.

        Args:
            cluster: the cluster to place on; in the older call, the number of accelerators of each of its identical
                nodes.
            isolate_accelerator: True if a worker sees only its own accelerators.
            num_gpus_per_node: older name of *cluster*, used in the older call.
            isolate_gpu: older name of *isolate_accelerator*.

        Raises:
            PlacementError: the cluster has too few resources, or a worker would need resources of two nodes.
        """
        if cluster is None:
            cluster = num_gpus_per_node
        if isolate_gpu is not None:
            isolate_accelerator = isolate_gpu
        if cluster is None:
            raise PlacementError("get_placement() needs a cluster, or the number of accelerators of each node")
        if isinstance(cluster, int):
            per_node = whole(cluster, "num_gpus_per_node", least=0)
            from rlinf_actors.placement.described import DescribedCluster

            cluster = DescribedCluster.identical(self._nodes_needed(per_node), per_node)
        return self._place(cluster, isolate_accelerator)

    def _place(self, cluster: ClusterView, isolate: bool) -> list[Placement]:
        raise NotImplementedError(
            f"{type(self).__name__} does not override get_placement(cluster, isolate_accelerator)"
        )

    def _nodes_needed(self, per_node: int) -> int:
        """Return the smallest number of nodes, with *per_node* accelerators each, that the strategy needs."""
        raise NotImplementedError(f"{type(self).__name__} takes a cluster, not the number of accelerators of each node")


def group_labels(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the labels of node groups that *value* gives: one label, labels in one text (``"a,b"``), or a list.

    None gives the label of the group of all nodes. Raise PlacementError if a label is not valid, or is given twice.
    """
    if value is None:
        return (CLUSTER_GROUP,)
    try:
        return parse_labels(value, "node_group")
    except ValueError as error:
        raise PlacementError(str(error)) from error


def whole(value: object, name: str, least: int = 0) -> int:
    """Return *value* as an int of at least *least*.

    If it is no such number, raise PlacementError, which calls the value *name*. Ints of numpy are accepted, booleans
    are not.
    """
    number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if number is None or number < least:
        raise PlacementError(f"{name} is {value!r}; it must be a whole number from {least} up")
    return int(number)


class PackedPlacementStrategy(PlacementStrategy):
    """Place workers on consecutive resources. Each worker gets the same number of them.

    With a *stride* above 1, the resources of one worker are not consecutive, but those of all workers together are.

    The older form, by keyword, begins at an accelerator of a node: ``PackedPlacementStrategy(master_node=0,
    num_nodes=2)`` or ``PackedPlacementStrategy(num_processes=4, num_gpus_per_process=2)``.
    """

    def __init__(
        self,
        start_hardware_rank: int | None = None,
        end_hardware_rank: int | None = None,
        num_hardware_per_process: int = 1,
        stride: int = 1,
        node_group: str | Sequence[str] | None = None,
        *,
        master_node: int | None = None,
        num_nodes: int | None = None,
        num_processes: int | None = None,
        master_gpu: int | None = None,
        num_gpus_per_process: int | None = None,
        isolate_gpu: bool = True,
    ) -> None:
        """Choose the resources, and the number of resources of each worker.

        Args:
            start_hardware_rank: rank of the first resource.
            end_hardware_rank: rank of the last resource, included.
            num_hardware_per_process: number of resources of each worker.
            stride: distance between the resources of one worker: with stride 2 and two resources each, worker 0 gets
                resources 0 and 2, worker 1 gets 1 and 3.
            node_group: label, or labels, of the node group; all nodes by default.
            master_node: (older form) rank of the first node, 0 by default.
            num_nodes: (older form) number of whole nodes, which get as many workers as fit; give this or
                *num_processes*.
            num_processes: (older form) number of workers.
            master_gpu: (older form) position of the first accelerator on node *master_node*, 0 by default.
            num_gpus_per_process: (older form) number of accelerators of each worker, 1 by default.
            isolate_gpu: False lets workers see all accelerators of their node, whatever *isolate_accelerator* of
                get_placement is.

        Raises:
            PlacementError: a number is out of range, the resources cannot be divided into workers of this size and
                stride, or the arguments belong to both forms or are not enough for one.
        """
        super().__init__()
        self._labels = group_labels(node_group)
        self._stride = whole(stride, "stride", least=1)
        self._isolate = isolate_gpu
        self._start_hw_rank: int | None = None
        self._end_hw_rank: int | None = None
        older = (master_node, num_nodes, num_processes, master_gpu, num_gpus_per_process)
        if start_hardware_rank is not None or end_hardware_rank is not None:
            if any(value is not None for value in older):
                raise PlacementError(
                    "PackedPlacementStrategy takes start_hardware_rank and end_hardware_rank, or the older "
                    "master_node, num_nodes, num_processes, master_gpu, num_gpus_per_process; not both"
                )
            self._start_hw_rank = whole(start_hardware_rank, "start_hardware_rank")
            self._end_hw_rank = whole(end_hardware_rank, "end_hardware_rank")
            if self._end_hw_rank < self._start_hw_rank:
                raise PlacementError(
                    f"end_hardware_rank {self._end_hw_rank} is below start_hardware_rank {self._start_hw_rank}"
                )
            self._num_hardware_per_process = whole(num_hardware_per_process, "num_hardware_per_process", least=1)
            self._check_count(self._end_hw_rank - self._start_hw_rank + 1)
            return
        if (num_nodes is None) == (num_processes is None):
            raise PlacementError(
                "PackedPlacementStrategy needs start_hardware_rank and end_hardware_rank, "
                "or exactly one of num_nodes and num_processes"
            )
        self._num_hardware_per_process = whole(
            1 if num_gpus_per_process is None else num_gpus_per_process, "num_gpus_per_process", least=1
        )
        self._master_node = whole(master_node or 0, "master_node")
        self._master_gpu = whole(master_gpu or 0, "master_gpu")
        self._num_nodes = None if num_nodes is None else whole(num_nodes, "num_nodes", least=1)
        self._num_processes = None if num_processes is None else whole(num_processes, "num_processes", least=1)

    def _place(self, cluster: ClusterView, isolate: bool) -> list[Placement]:
        table = ResourceTable.of(cluster, self._labels)
        first, last = self._range(table)
        if last >= len(table.resources):
            raise PlacementError(f"the strategy needs resources {first}-{last} of {table.target}")
        return place(
            strided(first, last, self._num_hardware_per_process, self._stride), table, isolate and self._isolate
        )

    def _range(self, table: ResourceTable) -> tuple[int, int]:
        if self._start_hw_rank is not None and self._end_hw_rank is not None:
            return self._start_hw_rank, self._end_hw_rank
        start = table.first_on_node(self._master_node)
        on_master = table.count_on_node(self._master_node)
        if self._master_gpu >= on_master:
            raise PlacementError(
                f"master_gpu is {self._master_gpu}, but node {self._master_node} has {on_master} of them"
            )
        first = start + self._master_gpu
        if self._num_processes is not None:
            count = self._num_processes * self._num_hardware_per_process
        else:
            nodes = range(self._master_node, self._master_node + (self._num_nodes or 1))
            table.first_on_node(nodes[-1])  # raises for a node that is not there
            held = sum(map(table.count_on_node, nodes)) - self._master_gpu
            count = self._fitting(held, nodes)
        self._check_count(count)
        return first, first + count - 1

    def _fitting(self, held: int, nodes: range) -> int:
        """Return how many of the *held* resources of *nodes* are used: those that fill whole workers.

        Raise PlacementError if there are too few for one worker.
        """
        unit = self._num_hardware_per_process * self._stride
        if held < unit:
            where = f"node {nodes[0]} has" if len(nodes) == 1 else f"nodes {nodes[0]}-{nodes[-1]} have"
            stride = f" with stride {self._stride}" if self._stride > 1 else ""
            raise PlacementError(
                f"{where} {counted(held, 'resource')} from master_gpu {self._master_gpu} on, too few for one process "
                f"of {self._num_hardware_per_process}{stride}"
            )
        return held - held % unit

    def _check_count(self, count: int) -> None:
        unit = self._num_hardware_per_process * self._stride
        if count % unit:
            raise PlacementError(
                f"{counted(count, 'resource', 'does|do')} not divide into processes of "
                f"{self._num_hardware_per_process} with stride {self._stride}: the number must be a "
                f"multiple of {unit}, e.g. {max(unit, count - count % unit)}"
            )

    def _nodes_needed(self, per_node: int) -> int:
        each_node = max(per_node, 1)
        if self._end_hw_rank is not None:
            return self._end_hw_rank // each_node + 1
        if self._num_nodes is not None:
            return self._master_node + self._num_nodes
        last = self._master_gpu + (self._num_processes or 1) * self._num_hardware_per_process - 1
        return self._master_node + last // each_node + 1


class StridedPlacementStrategy(PlacementStrategy):
    """Place workers on whole nodes. The accelerators of each worker are at a distance of *stride*.

    The accelerators of a node are divided into blocks of ``stride * num_gpus_per_process``. Worker g of a block gets
    accelerators g, g + stride, g + 2 * stride, ... of the block.
    """

    def __init__(
        self, master_node: int, num_nodes: int, stride: int, num_gpus_per_process: int, isolate_gpu: bool = True
    ) -> None:
        """Choose the nodes and the pattern.

        Args:
            master_node: rank of the first node.
            num_nodes: number of nodes.
            stride: distance between the accelerators of a worker.
            num_gpus_per_process: number of accelerators of each worker.
            isolate_gpu: must be True, because LOCAL_RANK could not name the accelerators of a worker that sees all of
                them.

        Raises:
            PlacementError: a number is out of range, or isolate_gpu is False.
        """
        self._master_node = whole(master_node, "master_node")
        self._num_nodes = whole(num_nodes, "num_nodes", least=1)
        self._stride = whole(stride, "stride", least=1)
        self._num_hardware_per_process = whole(num_gpus_per_process, "num_gpus_per_process", least=1)
        self._check_isolated(isolate_gpu)

    def _place(self, cluster: ClusterView, isolate: bool) -> list[Placement]:
        self._check_isolated(isolate)
        table = ResourceTable.of(cluster, (CLUSTER_GROUP,))
        unit = self._stride * self._num_hardware_per_process
        assignment: list[list[int]] = []
        for node in range(self._master_node, self._master_node + self._num_nodes):
            first = table.first_on_node(node)
            count = table.count_on_node(node)
            if count % unit:
                raise PlacementError(
                    f"node {node} has {counted(count, 'accelerator')}, not divisible into groups of {unit} "
                    f"(stride {self._stride} x {self._num_hardware_per_process} for each process)"
                )
            assignment += strided(first, first + count - 1, self._num_hardware_per_process, self._stride)
        return place(assignment, table, True)

    def _nodes_needed(self, per_node: int) -> int:
        return self._master_node + self._num_nodes

    @staticmethod
    def _check_isolated(isolate: bool) -> None:
        if not isolate:
            raise PlacementError(
                "StridedPlacementStrategy needs isolate_gpu=True: a process that saw every accelerator could not tell "
                "which ones are its own; use PackedPlacementStrategy for processes that share a node's accelerators"
            )


class FlexiblePlacementStrategy(PlacementStrategy):
    """Place each worker on resources that are listed one by one. A worker has its resources in ascending order."""

    def __init__(
        self,
        hardware_ranks_list: Sequence[Sequence[int]],
        node_group_label: str | Sequence[str] | None = None,
    ) -> None:
        """Choose the resources of each worker.

        Args:
            hardware_ranks_list: for each worker, by rank, the ranks of its resources in the node group.
            node_group_label: label, or labels, of the node group; all nodes by default.

        Raises:
            PlacementError: the list is empty, or the entry of a worker is empty or no list of ranks. For an entry that
                repeats a rank, get_placement raises.
        """
        super().__init__()
        if isinstance(hardware_ranks_list, (str, bytes)) or not hardware_ranks_list:
            raise PlacementError(
                f"hardware_ranks_list is {hardware_ranks_list!r}; it must list the ranks of each process: [[0], [1, 2]]"
                ". It must not be empty"
            )
        self._labels = group_labels(node_group_label)
        self._ranks: list[list[int]] = []
        for rank, entry in enumerate(hardware_ranks_list):
            if isinstance(entry, (str, bytes)) or not isinstance(entry, Sequence) or not entry:
                raise PlacementError(
                    f"hardware_ranks_list[{rank}] is {entry!r}; it must be a list of ranks such as [0]"
                )
            self._ranks.append(sorted(whole(number, f"hardware_ranks_list[{rank}]") for number in entry))

    def _place(self, cluster: ClusterView, isolate: bool) -> list[Placement]:
        for rank, ranks in enumerate(self._ranks):
            if len(set(ranks)) != len(ranks):
                raise PlacementError(
                    f"hardware_ranks_list[{rank}] is {ranks}, which has a rank twice: ranks of a process must be unique"
                )
        return place(self._ranks, ResourceTable.of(cluster, self._labels), isolate)

    def _nodes_needed(self, per_node: int) -> int:
        return max(max(ranks) for ranks in self._ranks) // max(per_node, 1) + 1


class NodePlacementStrategy(PlacementStrategy):
    """Place workers on nodes, whatever hardware the nodes have. A worker sees all accelerators of its node.

    In a group with ``ignore_hardware`` a worker sees no accelerators, as with every other strategy.
    """

    def __init__(self, node_ranks: Sequence[int], node_group_label: str | Sequence[str] | None = None) -> None:
        """Choose the node of each worker.

        Args:
            node_ranks: the node of each worker, by the worker's rank: a node's rank in the cluster, or its index in the
                node groups if *node_group_label* is given. A node may appear several times.
            node_group_label: label, or labels, of node groups; None for the whole cluster. Indices count through the
                nodes of the groups in the order given.

        Raises:
            PlacementError: the list is empty or contains something other than ranks.
        """
        super().__init__()
        if isinstance(node_ranks, (str, bytes)) or not node_ranks:
            raise PlacementError(
                f"node_ranks is {node_ranks!r}; it must list the node of each process: [0, 0, 1]. It must not be empty"
            )
        self._node_ranks = [whole(rank, "node_ranks") for rank in node_ranks]
        self._labels = group_labels(node_group_label) if node_group_label is not None else (NODE_GROUP,)

    def _place(self, cluster: ClusterView, isolate: bool) -> list[Placement]:
        return place_on_nodes(self._entries(cluster))

    def _entries(self, cluster: ClusterView) -> list[tuple[NodeGroupInfo, NodeInfo]]:
        groups = [find_group(cluster, label) for label in self._labels]
        if len(groups) == 1 and groups[0].label in (NODE_GROUP, CLUSTER_GROUP):
            return [(groups[0], node) for node in self._nodes_of_cluster(cluster)]
        entries = [(group, node) for group in groups for node in group.nodes]
        owner: dict[int, NodeGroupInfo] = {}
        for group, node in entries:
            other = owner.setdefault(node.node_rank, group)
            if other is not group:
                raise PlacementError(
                    f"node groups {other.label!r} and {group.label!r} both hold node {node.node_rank}; groups that are "
                    "used together must not overlap"
                )
        for rank in self._node_ranks:
            if rank >= len(entries):
                label, last = ",".join(self._labels), len(entries) - 1
                nodes = "one node: 0" if last == 0 else f"{last + 1} nodes: 0-{last}" if entries else "no node"
                raise NodeRankError(f"node {rank} is outside node group {label!r}, which has {nodes}")
        return [entries[rank] for rank in self._node_ranks]

    def _nodes_of_cluster(self, cluster: ClusterView) -> list[NodeInfo]:
        worst = max(self._node_ranks)
        if worst >= cluster.num_nodes:
            nodes = "one node: 0" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes: 0-{cluster.num_nodes - 1}"
            raise NodeRankError(f"there is no node {worst} in the cluster, which has {nodes}")
        infos = {rank: cluster.get_node_info(rank) for rank in dict.fromkeys(self._node_ranks)}
        return [infos[rank] for rank in self._node_ranks]

    def _nodes_needed(self, per_node: int) -> int:
        return max(self._node_ranks) + 1


def default_strategy(cluster: ClusterView) -> PlacementStrategy:
    """Return the strategy for a launch that gives none: one worker on each accelerator of the cluster.

    Nodes on which the job may not launch are left out. If no node has accelerators, the strategy places one worker on
    the first node. Raise PlacementError, which lists the
    nodes, if the nodes have accelerators of several types.
    """
    by_type: dict[str, list[NodeInfo]] = {}
    nodes = [cluster.get_node_info(rank) for rank in range(cluster.num_nodes)]
    offered = [node for node in nodes if not node.closed] or nodes  # the head says why it refuses all of them
    for node in offered:
        if node.num_accelerators:
            by_type.setdefault(node.accelerator_type.value, []).append(node)
    if not by_type:
        return NodePlacementStrategy([offered[0].node_rank])
    if len(by_type) > 1:
        shown = "; ".join(f"{kind}: {', '.join(map(_describe, nodes))}" for kind, nodes in by_type.items())
        raise PlacementError(
            f"the nodes have accelerators of several types, so there is no default placement ({shown}); "
            "give a placement_strategy on one node group, e.g. PackedPlacementStrategy(0, 7, node_group=LABEL)"
        )
    if len(offered) < len(nodes):
        return FlexiblePlacementStrategy([[rank] for rank in ResourceTable.of(cluster, (CLUSTER_GROUP,)).offered])
    return PackedPlacementStrategy(0, cluster.num_accelerators - 1)


def strided(first: int, last: int, each: int, stride: int) -> list[list[int]]:
    """Divide resources *first* to *last* among workers, and return the resource ranks of each worker, by rank.

    Each worker gets *each* resources, at a distance of *stride*.
    """
    return [
        [start + offset + step * stride for step in range(each)]
        for start in range(first, last + 1, each * stride)
        for offset in range(stride)
    ]


def _describe(node: NodeInfo) -> str:
    labels = f" ({', '.join(node.node_labels)})" if node.node_labels else ""
    return f"node {node.node_rank}{labels}"
