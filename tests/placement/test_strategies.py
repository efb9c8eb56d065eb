"""The four strategies, both older forms, the older call, and the default."""

# ruff: noqa: E501 (tables: a case a line)

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import PlacementError
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType, HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
    StridedPlacementStrategy,
    default_strategy,
)


class FakeCluster:
    """Only what a placement may ask for."""

    def __init__(self, *nodes: NodeInfo, groups: dict[str, NodeGroupInfo] | None = None) -> None:
        self._nodes = list(nodes)
        self._groups = groups or {}
        self.num_nodes = len(nodes)
        self.num_accelerators = sum(node.num_accelerators for node in nodes)

    def get_node_group(self, label: str = "cluster") -> NodeGroupInfo | None:
        return self._groups.get(label)

    def get_node_info(self, node_rank: int) -> NodeInfo:
        return self._nodes[node_rank]


def node(rank: int, accelerators: int = 0, robots: int = 0, kind: str = "NV_GPU", **more: Any) -> NodeInfo:
    infos = [AcceleratorInfo(kind, "X", index=index) for index in range(accelerators)]
    arms = [HardwareInfo("Arm", "A")] * robots
    resources = [HardwareResource(kind, infos), HardwareResource("Arm", arms)]
    return NodeInfo(node_rank=rank, ray_id=f"n{rank}", hardware_resources=resources, **more)


TWO = DescribedCluster.identical(2, 4)
CPUS = DescribedCluster.identical(3, 0)


def where(placements: list[Placement]) -> list[tuple[int, list[int]]]:
    return [(placement.cluster_node_rank, placement.local_hardware_ranks) for placement in placements]


def test_packed_one_each() -> None:
    placements = PackedPlacementStrategy(2, 5).get_placement(TWO)
    assert where(placements) == [(0, [2]), (0, [3]), (1, [0]), (1, [1])]
    assert placements[2] == Placement(
        rank=2,
        cluster_node_rank=1,
        placement_node_rank=1,
        local_accelerator_rank=0,
        accelerator_type=AcceleratorType.NV_GPU,
        local_rank=0,
        local_world_size=2,
        visible_accelerators=["0"],
        isolate_accelerator=True,
        local_hardware_ranks=[0],
        node_group_label="cluster",
        node_id="node-1",
    )


def test_packed_several_each_and_strided() -> None:
    assert where(PackedPlacementStrategy(0, 7, 2).get_placement(TWO)) == [
        (0, [0, 1]),
        (0, [2, 3]),
        (1, [0, 1]),
        (1, [2, 3]),
    ]
    strided = PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2).get_placement(TWO)
    assert where(strided) == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    assert [placement.visible_accelerators for placement in strided[:2]] == [["0", "2"], ["1", "3"]]


def test_not_isolated() -> None:
    placements = PackedPlacementStrategy(1, 4).get_placement(TWO, isolate_accelerator=False)
    assert [placement.local_rank for placement in placements] == [0, 1, 2, 0]
    assert [placement.local_world_size for placement in placements] == [3, 3, 3, 1]
    assert [placement.local_accelerator_rank for placement in placements] == [1, 2, 3, 0]
    assert {tuple(placement.visible_accelerators) for placement in placements} == {("0", "1", "2", "3")}
    assert not any(placement.isolate_gpu for placement in placements)


def test_local_rank_and_world_size_are_index_and_count_on_the_node() -> None:
    placements = FlexiblePlacementStrategy([[0], [0], [4], [1]]).get_placement(TWO)
    assert [(p.local_rank, p.local_world_size) for p in placements] == [(0, 3), (1, 3), (0, 1), (2, 3)]


def test_a_worker_has_its_resources_in_ascending_order() -> None:
    (placement,) = FlexiblePlacementStrategy([[2, 1, 3]]).get_placement(TWO)
    assert placement.local_hardware_ranks == [1, 2, 3]
    assert placement.visible_accelerators == ["1", "2", "3"]
    assert placement.local_accelerator_rank == 1


def test_a_rank_given_twice_is_found_at_placement() -> None:
    strategy = FlexiblePlacementStrategy([[0], [1, 1]])
    with pytest.raises(PlacementError, match=r"hardware_ranks_list\[1\] is \[1, 1\], which has a rank twice"):
        strategy.get_placement(TWO)


def test_a_strategy_may_override_get_placement_alone() -> None:
    class LastNode(PlacementStrategy):
        def __init__(self) -> None:
            super().__init__()

        def get_placement(self, cluster: Any, isolate_accelerator: bool = True) -> list[Placement]:  # type: ignore[override]
            placements = NodePlacementStrategy([cluster.num_nodes - 1]).get_placement(cluster)
            placements[0].local_world_size = 5
            return placements

    assert [placement.cluster_node_rank for placement in LastNode().get_placement(TWO)] == [1]
    with pytest.raises(NotImplementedError, match=r"does not override get_placement"):
        PlacementStrategy().get_placement(TWO)


def grouped(**groups: NodeGroupInfo) -> Any:
    nodes = sorted(
        {n.node_rank: n for group in groups.values() for n in group.nodes}.values(), key=lambda n: n.node_rank
    )

    class Fake:
        num_nodes = len(nodes)
        num_accelerators = sum(n.num_accelerators for n in nodes)

        def get_node_group(self, label: str = "cluster") -> NodeGroupInfo | None:
            return groups.get(label)

        def get_node_info(self, rank: int) -> NodeInfo:
            return nodes[rank]

    return Fake()


def test_node_placement_counts_through_several_groups() -> None:
    first, second = TWO.get_node_info(0), TWO.get_node_info(1)
    cluster = grouped(a=NodeGroupInfo("a", [second]), b=NodeGroupInfo("b", [first]))
    placements = NodePlacementStrategy([0, 1, 1], ["a", "b"]).get_placement(cluster)
    found = [(p.cluster_node_rank, p.node_group_label, p.visible_accelerators) for p in placements]
    assert found == [(1, "a", ["0", "1", "2", "3"]), (0, "b", ["0", "1", "2", "3"]), (0, "b", ["0", "1", "2", "3"])]
    with pytest.raises(IndexError, match="node 2 is outside node group 'a,b', which has 2 nodes: 0-1"):
        NodePlacementStrategy([2], "a,b").get_placement(cluster)
    overlapping = grouped(a=NodeGroupInfo("a", [second]), b=NodeGroupInfo("b", [second, first]))
    with pytest.raises(PlacementError, match="node groups 'a' and 'b' both hold node 1"):
        NodePlacementStrategy([0], "a,b").get_placement(overlapping)


@pytest.mark.parametrize(
    "strategy",
    [
        NodePlacementStrategy([0], "a"),
        FlexiblePlacementStrategy([[0]], "a"),
        PackedPlacementStrategy(0, 0, node_group="a"),
    ],
    ids=["node", "flexible", "packed"],
)
def test_every_strategy_hides_the_accelerators_of_a_group_that_ignores_them(strategy: PlacementStrategy) -> None:
    cluster = grouped(a=NodeGroupInfo("a", [TWO.get_node_info(0)], ignore_hardware=True))
    (placement,) = strategy.get_placement(cluster)
    assert (placement.visible_accelerators, placement.accelerator_type) == ([], AcceleratorType.NO_ACCEL)
    assert placement.isolate_accelerator


def test_workers_of_the_node_group_see_all_accelerators() -> None:
    cluster = grouped(node=NodeGroupInfo("node", [TWO.get_node_info(0)], ignore_hardware=True))
    (placement,) = NodePlacementStrategy([0], "node").get_placement(cluster)
    assert placement.visible_accelerators == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (PackedPlacementStrategy(num_nodes=2), [(n, [g]) for n in range(2) for g in range(4)]),
        (PackedPlacementStrategy(master_node=1, num_nodes=1, num_gpus_per_process=2), [(1, [0, 1]), (1, [2, 3])]),
        (PackedPlacementStrategy(num_processes=3, master_gpu=2), [(0, [2]), (0, [3]), (1, [0])]),
        (PackedPlacementStrategy(num_nodes=2, master_gpu=2, num_gpus_per_process=2), [(0, [2, 3]), (1, [0, 1]), (1, [2, 3])]),
        (PackedPlacementStrategy(num_nodes=1, num_gpus_per_process=3), [(0, [0, 1, 2])]),
        (PackedPlacementStrategy(master_node=1, num_nodes=1, master_gpu=1, num_gpus_per_process=2), [(1, [1, 2])]),
        (StridedPlacementStrategy(0, 2, 2, 2), [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]),
        (StridedPlacementStrategy(1, 1, 2, 1), [(1, [0]), (1, [1]), (1, [2]), (1, [3])]),
        (FlexiblePlacementStrategy([[0, 2], [5], [4, 7]]), [(0, [0, 2]), (1, [1]), (1, [0, 3])]),
    ],
)  # fmt: skip
def test_older_forms_on_a_cluster_and_in_the_older_call(strategy: Any, expected: list[tuple[int, list[int]]]) -> None:
    assert where(strategy.get_placement(TWO)) == expected
    assert where(strategy.get_placement(4, True)) == expected
    assert where(strategy.get_placement(num_gpus_per_node=4, isolate_gpu=True)) == expected


def test_whole_nodes_have_as_many_processes_as_fit() -> None:
    placements = PackedPlacementStrategy(num_nodes=1, num_gpus_per_process=3).get_placement(8)
    assert where(placements) == [(0, [0, 1, 2]), (0, [3, 4, 5])]


def test_the_older_call_of_the_newer_forms() -> None:
    assert where(PackedPlacementStrategy(0, 9).get_placement(8, True))[8:] == [(1, [0]), (1, [1])]
    placements = PackedPlacementStrategy(num_processes=4, isolate_gpu=False).get_placement(8)
    assert [placement.local_rank for placement in placements] == [0, 1, 2, 3]
    assert not placements[0].isolate_accelerator
    assert not PackedPlacementStrategy(0, 1).get_placement(8, isolate_gpu=False)[0].isolate_gpu
    nodes = NodePlacementStrategy([0, 2, 2]).get_placement(8, False)
    assert [placement.cluster_node_rank for placement in nodes] == [0, 2, 2]


def test_nodes_see_all_accelerators() -> None:
    placements = NodePlacementStrategy([1, 0, 1]).get_placement(TWO)
    assert [p.cluster_node_rank for p in placements] == [1, 0, 1]
    assert [p.placement_node_rank for p in placements] == [0, 1, 0]
    assert [(p.local_rank, p.local_world_size) for p in placements] == [(0, 2), (0, 1), (1, 2)]
    assert [p.visible_accelerators for p in placements] == [["0", "1", "2", "3"]] * 3
    first = placements[0]
    assert (first.local_accelerator_rank, first.isolate_accelerator, first.node_group_label) == (-1, False, "node")
    assert first.local_hardware_ranks == []


def test_node_ranks_inside_a_group_are_the_groups() -> None:
    lab = NodeGroupInfo(label="lab", nodes=[node(3), node(5)])
    fake = FakeCluster(*(node(rank) for rank in range(6)), groups={"lab": lab})
    placements = NodePlacementStrategy([1, 0], node_group_label="lab").get_placement(fake)
    assert [p.cluster_node_rank for p in placements] == [5, 3]
    with pytest.raises(PlacementError, match="node 2 is outside node group 'lab', which has 2 nodes: 0-1"):
        NodePlacementStrategy([2], "lab").get_placement(fake)
    assert NodePlacementStrategy([5], "cluster").get_placement(fake)[0].cluster_node_rank == 5


def test_cpu_nodes_are_resources() -> None:
    placements = FlexiblePlacementStrategy([[0], [0], [2]]).get_placement(CPUS)
    assert [(p.cluster_node_rank, p.local_rank, p.local_world_size) for p in placements] == [
        (0, 0, 2),
        (0, 1, 2),
        (2, 0, 1),
    ]
    assert placements[0].accelerator_type is AcceleratorType.NO_ACCEL
    assert not placements[0].isolate_accelerator


def test_robots() -> None:
    arms = NodeGroupInfo(label="arms", nodes=[node(0, 2, 2), node(1, 0, 1)], hardware_type="Arm")
    fake = FakeCluster(*arms.nodes, groups={"arms": arms})
    placements = PackedPlacementStrategy(0, 2, node_group="arms").get_placement(fake)
    assert where(placements) == [(0, [0]), (0, [1]), (1, [0])]
    assert [p.local_rank for p in placements] == [0, 1, 0]
    assert [p.visible_accelerators for p in placements] == [["0", "1"], ["0", "1"], []]
    assert {p.local_accelerator_rank for p in placements} == {-1}


def test_a_group_that_ignores_its_hardware_shows_no_accelerator() -> None:
    cpu = NodeGroupInfo(label="cpu", nodes=[node(0, 2)], ignore_hardware=True)
    placement = FlexiblePlacementStrategy([[0]], "cpu").get_placement(FakeCluster(*cpu.nodes, groups={"cpu": cpu}))[0]
    assert (placement.visible_accelerators, placement.isolate_accelerator) == ([], True)
    assert placement.accelerator_type is AcceleratorType.NO_ACCEL


def test_several_groups_are_numbered_one_after_the_other() -> None:
    nodes = [node(0, 2), node(1, 2, kind="NPU"), node(2, 0, 1)]
    groups = {
        "nv": NodeGroupInfo(label="nv", nodes=nodes[:1]),
        "npu": NodeGroupInfo(label="npu", nodes=nodes[1:2]),
        "arm": NodeGroupInfo(label="arm", nodes=nodes[2:], hardware_type="Arm"),
    }
    fake = FakeCluster(*nodes, groups=groups)
    for labels in ("npu,nv,arm", ["npu", "nv", "arm"]):
        placements = PackedPlacementStrategy(0, 4, node_group=labels).get_placement(fake)
        assert [p.node_group_label for p in placements] == ["npu", "npu", "nv", "nv", "arm"]
        assert [p.accelerator_type.value for p in placements] == ["NPU", "NPU", "NV_GPU", "NV_GPU", "NO_ACCEL"]
        assert [p.cluster_node_rank for p in placements] == [1, 1, 0, 0, 2]
        assert [p.placement_node_rank for p in placements] == [0, 0, 1, 1, 2]
    with pytest.raises(
        PlacementError,
        match="process 0 would hold resources 1-2 of node group 'npu,nv,arm', which lie on nodes 1 and 0",
    ):
        FlexiblePlacementStrategy([[1, 2]], "npu,nv,arm").get_placement(fake)


def test_a_process_holds_one_type_of_hardware() -> None:
    both = [node(0, 2, 1)]
    groups = {
        "gpu": NodeGroupInfo(label="gpu", nodes=both),
        "arm": NodeGroupInfo(label="arm", nodes=both, hardware_type="Arm"),
        "again": NodeGroupInfo(label="again", nodes=both),
    }
    fake = FakeCluster(*both, groups=groups)
    with pytest.raises(
        PlacementError, match=r"process 0 would hold NV_GPU 1 of node 0 .* and Arm 0 of node 0 .* one type"
    ):
        FlexiblePlacementStrategy([[1, 2]], "gpu,arm").get_placement(fake)
    with pytest.raises(PlacementError, match="'gpu' and 'again' both hold NV_GPU 0 of node 0"):
        FlexiblePlacementStrategy([[0]], "gpu,again").get_placement(fake)


def test_the_agents_own_visibility_is_kept() -> None:
    infos = [AcceleratorInfo("NV_GPU", "X", index=index) for index in (4, 5)]
    info = NodeInfo(hardware_resources=[HardwareResource("NV_GPU", infos)])
    placements = PackedPlacementStrategy(0, 1).get_placement(FakeCluster(info))
    assert [(p.local_accelerator_rank, p.visible_accelerators) for p in placements] == [(0, ["4"]), (1, ["5"])]


BAD_STRATEGIES: list[tuple[Any, str]] = [
    (lambda: PackedPlacementStrategy(3, 1), "end_hardware_rank 1 is below start_hardware_rank 3"),
    (lambda: PackedPlacementStrategy(-1, 1), "start_hardware_rank is -1"),
    (lambda: PackedPlacementStrategy(0), "end_hardware_rank is None"),
    (lambda: PackedPlacementStrategy(0, 2, 2), "3 resources do not divide into processes of 2 with stride 1: the number must be a multiple of 2, e.g. 2"),
    (lambda: PackedPlacementStrategy(0, 1, 1, 0), "stride is 0"),
    (lambda: PackedPlacementStrategy(0, 1, 0), "num_hardware_per_process is 0"),
    (lambda: PackedPlacementStrategy(0, 1, num_nodes=1), "not both"),
    (lambda: PackedPlacementStrategy(), "exactly one of num_nodes and num_processes"),
    (lambda: PackedPlacementStrategy(num_nodes=1, num_processes=1), "exactly one of num_nodes and num_processes"),
    (lambda: PackedPlacementStrategy(num_nodes=0), "num_nodes is 0"),
    (lambda: PackedPlacementStrategy(num_processes=True), "num_processes is True"),
    (lambda: PackedPlacementStrategy(0, 1, node_group="a,,b"), "a label must be text"),
    (lambda: PackedPlacementStrategy(0, 1, node_group="a,a"), "names node group 'a' twice"),
    (lambda: StridedPlacementStrategy(0, 1, 1, 1, isolate_gpu=False), "StridedPlacementStrategy needs isolate_gpu=True"),
    (lambda: StridedPlacementStrategy(0, 0, 1, 1), "num_nodes is 0"),
    (lambda: StridedPlacementStrategy(0, 1, 0, 1), "stride is 0"),
    (lambda: StridedPlacementStrategy(0, 1, 1, 0), "num_gpus_per_process is 0"),
    (lambda: FlexiblePlacementStrategy([]), "must list the ranks of each process"),
    (lambda: FlexiblePlacementStrategy("0"), "must list the ranks of each process"),
    (lambda: FlexiblePlacementStrategy([[]]), "hardware_ranks_list[0] is []"),
    (lambda: FlexiblePlacementStrategy([[0], 1]), "hardware_ranks_list[1] is 1"),
    (lambda: FlexiblePlacementStrategy([["0"]]), "hardware_ranks_list[0] is '0'"),
    (lambda: NodePlacementStrategy([]), "must list the node of each process"),
    (lambda: NodePlacementStrategy([-1]), "node_ranks is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD_STRATEGIES)
def test_each_bad_argument_is_named(make: Any, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "cluster", "message"),
    [
        (PackedPlacementStrategy(0, 8), TWO, "needs resources 0-8 of node group 'cluster', which has 8 resources (accelerators): ranks 0-7"),
        (PackedPlacementStrategy(0, 5, 3), TWO, "process 1 would hold resources 3-5 of node group 'cluster', which lie on nodes 0 and 1; a process sits on one node: node 0 has 4, so give each process a number that divides 4, not 3"),
        (PackedPlacementStrategy(0, 1, 2), CPUS, "name at least as many processes as nodes"),
        (PackedPlacementStrategy(0, 0, node_group="x"), TWO, "no node group 'x' in this cluster; its groups are cluster, node"),
        (PackedPlacementStrategy(num_nodes=3), TWO, "node 2 has no resource in node group 'cluster'"),
        (PackedPlacementStrategy(master_node=2, num_nodes=1), TWO, "node 2 has no resource"),
        (PackedPlacementStrategy(num_processes=9), TWO, "needs resources 0-8"),
        (PackedPlacementStrategy(num_nodes=1, master_gpu=4), TWO, "master_gpu is 4, but node 0 has 4"),
        (PackedPlacementStrategy(num_nodes=1, num_gpus_per_process=5), TWO, "node 0 has 4 resources from master_gpu 0 on, too few for one process of 5"),
        (PackedPlacementStrategy(num_nodes=1, master_gpu=1, num_gpus_per_process=2, stride=2), TWO, "has 3 resources from master_gpu 1 on, too few for one process of 2 with stride 2"),
        (PackedPlacementStrategy(num_nodes=2, num_gpus_per_process=3), TWO, "process 1 would hold resources 3-5"),
        (StridedPlacementStrategy(0, 1, 3, 1), TWO, "node 0 has 4 accelerators, not divisible into groups of 3 (stride 3 x 1 for each process)"),
        (StridedPlacementStrategy(0, 3, 2, 2), TWO, "node 2 has no resource"),
        (FlexiblePlacementStrategy([[3, 4]]), TWO, "process 0 would hold resources 3-4"),
        (FlexiblePlacementStrategy([[0], [8]]), TWO, "process 1 is given resource 8 of node group 'cluster', which has 8"),
        (NodePlacementStrategy([2]), TWO, "there is no node 2 in the cluster, which has 2 nodes: 0-1"),
        (NodePlacementStrategy([1]), DescribedCluster.identical(1, 0), "which has one node: 0"),
        (NodePlacementStrategy([0]), None, "needs a cluster, or the number of accelerators"),
        (NodePlacementStrategy([0]), -1, "num_gpus_per_node is -1"),
    ],
)  # fmt: skip
def test_a_strategy_that_does_not_fit_the_cluster_is_an_error(strategy: Any, cluster: Any, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        strategy.get_placement(cluster)
    assert message in str(caught.value)


def test_strided_refuses_to_share_at_the_call_too() -> None:
    with pytest.raises(PlacementError, match="isolate_gpu=True"):
        StridedPlacementStrategy(0, 1, 1, 1).get_placement(TWO, isolate_accelerator=False)


def test_arguments_are_not_changed_and_placements_not_shared() -> None:
    lists = [[0, 1], [2]]
    strategy = FlexiblePlacementStrategy(lists)
    first = strategy.get_placement(TWO)
    first[0].visible_accelerators.append("9")
    first[0].local_hardware_ranks.append(9)
    assert lists == [[0, 1], [2]]
    assert strategy.get_placement(TWO)[0].visible_accelerators == ["0", "1"]
    lists[0].append(3)
    assert strategy.get_placement(TWO)[0].local_hardware_ranks == [0, 1]
    group = NodeGroupInfo(label="cluster", nodes=[node(0, 2)])
    before = copy.deepcopy(group)
    PackedPlacementStrategy(0, 1).get_placement(FakeCluster(*group.nodes, groups={"cluster": group}))
    assert group == before


def test_signatures_are_those_that_scripts_use() -> None:
    packed = list(inspect.signature(PackedPlacementStrategy).parameters)
    assert packed[:5] == [
        "start_hardware_rank",
        "end_hardware_rank",
        "num_hardware_per_process",
        "stride",
        "node_group",
    ]
    strided = list(inspect.signature(StridedPlacementStrategy).parameters)
    assert strided == ["master_node", "num_nodes", "stride", "num_gpus_per_process", "isolate_gpu"]


def test_the_default_is_one_process_on_each_accelerator() -> None:
    assert where(default_strategy(TWO).get_placement(TWO)) == [(n, [g]) for n in range(2) for g in range(4)]
    assert where(default_strategy(CPUS).get_placement(CPUS)) == [(0, [])]
    mixed_with_cpu = FakeCluster(node(0), node(1, 2))
    assert where(default_strategy(mixed_with_cpu).get_placement(mixed_with_cpu)) == [(1, [0]), (1, [1])]
    mixed = FakeCluster(node(0, 1, node_labels=["a800"]), node(1, 1, kind="NPU", node_labels=["asc", "x"]), node(2, 1))
    with pytest.raises(PlacementError, match=r"NV_GPU: node 0 \(a800\), node 2; NPU: node 1 \(asc, x\)"):
        default_strategy(mixed)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_packed_uses_every_resource_once(nodes: int, each: int, stride: int, blocks: int) -> None:
    per_node = each * stride * blocks
    cluster = DescribedCluster.identical(nodes, per_node)
    placements = PackedPlacementStrategy(0, nodes * per_node - 1, each, stride).get_placement(cluster)
    used = sorted((p.cluster_node_rank, local) for p in placements for local in p.local_hardware_ranks)
    assert used == [(n, local) for n in range(nodes) for local in range(per_node)]
    for placement in placements:
        ranks = placement.local_hardware_ranks
        assert all(later - earlier == stride for earlier, later in itertools.pairwise(ranks))
    assert where(StridedPlacementStrategy(0, nodes, stride, each).get_placement(cluster)) == where(placements)
