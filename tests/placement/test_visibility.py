"""Visibility variables that users set: which devices a node group has then, and what contradicts what."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.group.group_spec import worker_specs
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareResource
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)
from rlinf_actors.wire.values import WorkerSpec

CUDA = "CUDA_VISIBLE_DEVICES"


def node(rank: int, indices: list[int], kind: str = "NV_GPU", models: str = "", **more: Any) -> NodeInfo:
    infos = [
        AcceleratorInfo(kind, models[n : n + 1] or "M", index=index, uuid=f"GPU-{rank}{index}-x", numa_node=index // 2)
        for n, index in enumerate(indices)
    ]
    return NodeInfo(node_rank=rank, hardware_resources=[HardwareResource(kind, infos)] if infos else [], **more)


def cluster(*nodes: NodeInfo, variables: dict[int, dict[str, str]] | None = None, **group: Any) -> DescribedCluster:
    """All nodes in group `g`, with the given env_vars by node rank."""
    entries = [
        {"node_ranks": rank, "env_vars": [{name: value} for name, value in found.items()]}
        for rank, found in (variables or {}).items()
    ]
    labelled = {"label": "g", "node_ranks": "all", "env_configs": entries, **group}
    config = ClusterConfig.from_any({"num_nodes": len(nodes), "node_groups": [labelled]})
    return DescribedCluster(nodes, config)


def packed(last: int, each: int = 1) -> PlacementStrategy:
    return PackedPlacementStrategy(0, last, each, node_group="g")


def specs(
    found: DescribedCluster, placements: list[Placement], numa_bind: bool = False, **env: str
) -> list[WorkerSpec]:
    return worker_specs(WorkerSpec("", "w", "job", -1, 0, -1, env), placements, found, numa_bind=numa_bind)


# --- in env_configs ---


@pytest.mark.parametrize("value", ["2,3", "GPU-02-x,GPU-03-x", "GPU-02,3", " 2 , 3,"])
def test_a_group_has_the_listed_devices_only(value: str) -> None:
    found = cluster(node(0, [0, 1, 2, 3]), variables={0: {CUDA: value}})
    first, second = specs(found, packed(1).get_placement(found))
    assert [spec.env[CUDA] for spec in (first, second)] == ["2", "3"]
    # Positions on the node stay what they are: the accelerators' locks go by them.
    assert [spec.env["LOCAL_HARDWARE_RANKS"] for spec in (first, second)] == ["2", "3"]
    assert [spec.env["LOCAL_ACCELERATOR_RANK"] for spec in (first, second)] == ["2", "3"]
    with pytest.raises(PlacementError, match="node group 'g'"):
        packed(2).get_placement(found)


def test_devices_are_used_in_the_listed_order() -> None:
    found = cluster(node(0, [0, 1, 2, 3]), node(1, [0, 1]), variables={0: {CUDA: "3,0,2"}})
    placements = FlexiblePlacementStrategy([[0, 1], [2], [3]], "g").get_placement(found)
    assert [p.visible_accelerators for p in placements] == [["3", "0"], ["2"], ["0"]]
    assert [p.local_hardware_ranks for p in placements] == [[3, 0], [2], [0]]


def test_without_isolation_workers_see_what_is_listed_and_count_in_it() -> None:
    found = cluster(node(0, [0, 1, 2, 3]), variables={0: {CUDA: "3,1"}})
    placements = packed(1).get_placement(found, isolate_accelerator=False)
    assert [(p.visible_accelerators, p.local_rank, p.local_world_size) for p in placements] == [
        (["3", "1"], 0, 2),
        (["3", "1"], 1, 2),
    ]
    assert [p.local_accelerator_rank for p in placements] == [3, 1]


def test_other_groups_have_all_devices() -> None:
    found = cluster(node(0, [0, 1, 2]), variables={0: {CUDA: "1"}})
    assert PackedPlacementStrategy(0, 2).get_placement(found)[2].visible_accelerators == ["2"]
    assert NodePlacementStrategy([0]).get_placement(found)[0].visible_accelerators == ["0", "1", "2"]
    assert NodePlacementStrategy([0], "g").get_placement(found)[0].visible_accelerators == ["1"]


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_group_that_hides_all_is_one_of_nodes(value: str) -> None:
    found = cluster(node(0, [0, 1]), variables={0: {CUDA: value}})
    (placement,) = packed(0).get_placement(found)
    spec = specs(found, [placement])[0]
    assert (placement.local_rank, placement.local_accelerator_rank, placement.visible_accelerators) == (0, -1, [])
    assert (spec.env[CUDA], spec.env["ACCELERATOR_TYPE"]) == ("", "NO_ACCEL")


def test_workers_with_robots_see_what_is_listed() -> None:
    found = cluster(
        node(0, [0, 1]),
        variables={0: {CUDA: "1"}},
        hardware={"type": "Franka", "configs": [{"robot_ip": "10.0.0.1", "node_rank": 0}]},
    )
    (placement,) = packed(0).get_placement(found)
    assert (placement.visible_accelerators, placement.local_hardware_ranks) == (["1"], [0])


def test_indices_are_those_of_the_vendor_where_the_node_hides_some() -> None:
    found = cluster(node(0, [4, 6], env_vars={CUDA: "4,6"}), variables={0: {CUDA: "6"}})
    assert packed(0).get_placement(found)[0].visible_accelerators == ["6"]


def test_other_vendors() -> None:
    nodes = node(0, [0, 1, 2], "AMD_GPU"), node(1, [0, 1, 2], "INTEL_GPU"), node(2, [0, 1], "NPU")
    names = {
        0: {"HIP_VISIBLE_DEVICES": "2"},
        1: {"ONEAPI_DEVICE_SELECTOR": "level_zero:1,2"},
        2: {"ASCEND_RT_VISIBLE_DEVICES": "1"},
    }
    placements = FlexiblePlacementStrategy([[0], [1], [2], [3]], "g").get_placement(cluster(*nodes, variables=names))
    assert [p.visible_accelerators for p in placements] == [["2"], ["1"], ["2"], ["1"]]


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ({CUDA: "1,7"}, ["names 7, which no device", "NV_GPU 0, NV_GPU 1", f"{CUDA}=0,1"]),
        ({CUDA: "1,1"}, ["names device 1 twice"]),
        ({CUDA: "GPU-0"}, ["2 devices have"]),
        ({"HIP_VISIBLE_DEVICES": "0"}, ["names 0, which no device", "NV_GPU 0, NV_GPU 1"]),
    ],
)
def test_a_list_that_does_not_fit_the_node_is_an_error(value: dict[str, str], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(node(0, [0, 1], env_vars={CUDA: "0,1"}), variables={0: value})
    (name,) = value
    assert str(caught.value).startswith(f"cluster.node_groups[0].env_configs[0].env_vars.{name}: ")
    for text in [*texts, value[name]]:
        assert text in str(caught.value)


def test_another_vendors_devices_may_be_hidden() -> None:
    found = cluster(node(0, [0]), variables={0: {"HIP_VISIBLE_DEVICES": "-1"}})
    assert packed(0).get_placement(found)[0].visible_accelerators == ["0"]


def test_a_node_without_accelerators() -> None:
    with pytest.raises(ConfigError, match=r"does not fit node 0: .*offers no accelerator"):
        cluster(node(0, []), variables={0: {CUDA: "0"}})
    assert packed(0).get_placement(cluster(node(0, []), variables={0: {CUDA: ""}}))[0].visible_accelerators == []


def test_a_group_that_ignores_hardware_may_not_list_it() -> None:
    with pytest.raises(ConfigError, match=r"shows accelerators 1 of node 0, but group 'g' has ignore_hardware: true"):
        cluster(node(0, [0, 1]), variables={0: {CUDA: "1"}}, ignore_hardware=True)
    found = cluster(node(0, [0, 1]), variables={0: {CUDA: ""}}, ignore_hardware=True)
    assert packed(0).get_placement(found)[0].visible_accelerators == []


def test_a_variable_that_renumbers_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is '1', which changes what the device numbers of node 0 mean"):
        cluster(node(0, [0, 1], "AMD_GPU"), variables={0: {"ROCR_VISIBLE_DEVICES": "1"}})
    same = node(0, [0, 1], "AMD_GPU", env_vars={"ROCR_VISIBLE_DEVICES": "1,2"})
    cluster(same, variables={0: {"ROCR_VISIBLE_DEVICES": "1,2"}})
    with pytest.raises(ConfigError, match=r"is 'FASTEST_FIRST', but node 0 has several models \(A, B\)"):
        cluster(node(0, [0, 1], models="AB"), variables={0: {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}})
    cluster(node(0, [0, 1], models="AA"), variables={0: {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}})


# --- in launch(env_vars=...) ---


@pytest.mark.parametrize("value", ["2,3", "GPU-02-x,GPU-03", "2,GPU-03-x"])
def test_launch_may_say_what_the_placement_says(value: str) -> None:
    found = cluster(node(0, [0, 1, 2, 3]))
    placements = FlexiblePlacementStrategy([[2, 3]], "g").get_placement(found)
    assert specs(found, placements, **{CUDA: value})[0].env[CUDA] == value


@pytest.mark.parametrize("value", ["0,1", "2", "3,2", "", "GPU-02-x"])
def test_launch_may_not_say_otherwise(value: str) -> None:
    found = cluster(node(0, [0, 1, 2, 3]), variables={0: {CUDA: "2,3,0,1"}})
    placements = packed(1, each=2).get_placement(found)
    with pytest.raises(ConfigError) as caught:
        specs(found, placements, **{CUDA: value})
    text = str(caught.value)
    assert text.startswith(f"launch(env_vars).{CUDA}: ")
    assert f"is {value!r}, but worker 0 was placed on node 0 in group 'g' with {CUDA}='2,3'" in text
    assert f"env_configs of that group has {CUDA}=2,3,0,1" in text


def test_launch_and_workers_without_accelerators() -> None:
    found = cluster(node(0, [0, 1]), ignore_hardware=True)
    placements = packed(0).get_placement(found)
    assert specs(found, placements, **{CUDA: "-1"})[0].env[CUDA] == "-1"
    with pytest.raises(ConfigError, match=r"is '0', but worker 0 .* with CUDA_VISIBLE_DEVICES=''"):
        specs(found, placements, **{CUDA: "0"})


def test_launch_and_workers_that_see_all() -> None:
    found = cluster(node(0, [0, 1]))
    for placements in (
        NodePlacementStrategy([0, 0]).get_placement(found),
        packed(1).get_placement(found, isolate_accelerator=False),
    ):
        assert [spec.env[CUDA] for spec in specs(found, placements, **{CUDA: "0,1"})] == ["0,1", "0,1"]
        with pytest.raises(ConfigError, match=r"is '1', but worker 0 .* with CUDA_VISIBLE_DEVICES='0,1'"):
            specs(found, placements, **{CUDA: "1"})


def test_launch_with_a_device_that_the_node_hides_or_another_vendors() -> None:
    found = cluster(node(0, [0, 1], env_vars={CUDA: "0,1"}))
    placements = packed(0).get_placement(found)
    with pytest.raises(ConfigError, match=r"names 5, which no device .* its own settings: CUDA_VISIBLE_DEVICES=0,1"):
        specs(found, placements, **{CUDA: "5"})
    with pytest.raises(ConfigError, match=r"launch\(env_vars\)\.MUSA_VISIBLE_DEVICES"):
        specs(found, placements, MUSA_VISIBLE_DEVICES="0")


# --- NUMA ---


def test_the_numa_nodes_of_a_workers_accelerators() -> None:
    found = cluster(node(0, [0, 1, 2, 3]))
    placements = FlexiblePlacementStrategy([[0, 1], [2], [1, 3]], "g").get_placement(found)
    assert [spec.numa_nodes for spec in specs(found, placements, numa_bind=True)] == [(0,), (1,), (0, 1)]
    assert [spec.numa_nodes for spec in specs(found, placements)] == [(), (), ()]
    on_node = NodePlacementStrategy([0]).get_placement(found)
    assert specs(found, on_node, numa_bind=True)[0].numa_nodes == ()
