"""NodeInfo, NodeGroupInfo, Placement and WorkerInfo as hand-made values; groups from a configuration."""

from __future__ import annotations

import pickle

import pytest

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.model.address import WorkerAddress, WorkerInfo
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType, HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeEnvConfig, NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.node_groups import build_node_groups, with_configured_hardware


def gpus(count: int, kind: str = "NV_GPU", first: int = 0) -> HardwareResource:
    return HardwareResource(kind, [AcceleratorInfo(kind, "H100", index=first + index) for index in range(count)])


def arms(count: int) -> HardwareResource:
    return HardwareResource("Franka", [HardwareInfo("Franka", f"FR{index}") for index in range(count)])


def node(rank: int, *resources: HardwareResource) -> NodeInfo:
    return NodeInfo(
        node_rank=rank, ray_id=f"id{rank}", hardware_resources=list(resources), python_interpreter_path="/py"
    )


def test_a_node_with_accelerators_and_robots() -> None:
    info = node(0, arms(2), gpus(3))
    assert info.num_accelerators == 3
    assert info.accelerator_type is AcceleratorType.NV_GPU
    assert info.accelerator_model == "H100"
    assert info.get_hw_resource_count("NV_GPU") == 3
    assert info.get_hw_resource_count("Franka") == 2
    assert info.get_hw_resource_count("Other") == 0
    assert info.node_id == info.ray_id == "id0"
    assert pickle.loads(pickle.dumps(info)) == info  # noqa: S301


def test_a_node_without_anything() -> None:
    info = NodeInfo()
    assert (info.num_accelerators, info.accelerator_type, info.accelerator_model) == (0, AcceleratorType.NO_ACCEL, "")


def test_the_older_resource_type_of_accelerators() -> None:
    info = node(0, HardwareResource("Accelerator", [HardwareInfo("AMD_GPU", "MI300")] * 2))
    assert (info.num_accelerators, info.accelerator_type) == (2, AcceleratorType.AMD_GPU)
    assert info.get_hw_resource_count("Accelerator") == info.get_hw_resource_count("AMD_GPU") == 2


def test_device_names() -> None:
    assert node(0, gpus(2, first=4)).accelerator_device_names == ("4", "5")
    slices = [AcceleratorInfo("NV_GPU", "H100", index=0, uuid=f"MIG-{number}") for number in range(2)]
    assert node(0, HardwareResource("NV_GPU", slices)).accelerator_device_names == ("MIG-0", "MIG-1")
    plain = [HardwareInfo("NV_GPU", "H100"), HardwareInfo("NV_GPU", "H100")]
    assert node(0, HardwareResource("NV_GPU", plain)).accelerator_device_names == ("0", "1")


def test_a_group_of_accelerators() -> None:
    group = NodeGroupInfo(label="g", nodes=[node(3, gpus(2)), node(5), node(7, gpus(1))])
    assert group.node_ranks == [3, 5, 7]
    assert group.hardware_resource_count == 3
    assert group.local_hardware_ranks == [0, 1, 0]
    assert [group.get_node_by_hardware_rank(rank).node_rank for rank in range(3)] == [3, 3, 7]
    assert group.get_local_hardware_rank(2) == 0
    assert [info.model for info in group.get_hardware_infos(3)] == ["H100", "H100"]
    assert group.group_ranks_to_global_ranks([2, 0]) == [7, 3]


@pytest.mark.parametrize(
    "group",
    [
        NodeGroupInfo(label="g", nodes=[node(0), node(1)]),
        NodeGroupInfo(label="g", nodes=[node(0, gpus(2)), node(1)], ignore_hardware=True),
        NodeGroupInfo(label="node", nodes=[node(0, gpus(2)), node(1, arms(1))]),
    ],
)
def test_a_group_of_nodes(group: NodeGroupInfo) -> None:
    assert group.hardware_resource_count == 2
    assert group.local_hardware_ranks == [-1, -1]
    assert group.get_local_hardware_rank(1) == -1
    assert group.get_node_by_hardware_rank(1).node_rank == 1
    assert group.get_hardware_infos(0) == []


def test_a_group_of_robots() -> None:
    group = NodeGroupInfo(label="g", nodes=[node(0, gpus(2), arms(1)), node(1, arms(2))], hardware_type="Franka")
    assert group.local_hardware_ranks == [0, 0, 1]
    assert [info.model for info in group.get_hardware_infos(1)] == ["FR0", "FR1"]


def test_a_rank_outside_the_group_is_an_error_that_says_what_it_has() -> None:
    group = NodeGroupInfo(label="g", nodes=[node(4, gpus(2))])
    with pytest.raises(PlacementError, match="resource 2 is outside node group 'g', which has 2 accelerators: 0-1"):
        group.get_node_by_hardware_rank(2)
    with pytest.raises(PlacementError, match="resource -1 is outside"):
        group.get_local_hardware_rank(-1)
    with pytest.raises(PlacementError, match="node 1 is outside node group 'g', which has one node: 0"):
        group.group_ranks_to_global_ranks([1])
    for ask in (group.get_hardware_infos, group.get_node_env_vars, group.get_node_python_interpreter_path):
        with pytest.raises(PlacementError, match=r"node 0 is not in node group 'g', whose nodes are \[4\]"):
            ask(0)
    with pytest.raises(PlacementError, match="which has no Arm"):
        NodeGroupInfo(label="g", nodes=[node(0)], hardware_type="Arm").get_node_by_hardware_rank(0)


def test_variables_and_interpreters() -> None:
    configs = [
        NodeEnvConfig(node_ranks=0, env_vars=[{"A": "1"}, {"B": 2}]),  # type: ignore[arg-type]
        NodeEnvConfig(node_ranks=[1], python_interpreter_path="/opt/py"),  # type: ignore[arg-type]
    ]
    group = NodeGroupInfo(label="g", nodes=[node(0), node(1), node(2)], env_configs=configs)
    assert [group.get_node_env_vars(rank) for rank in range(3)] == [{"A": "1", "B": "2"}, {}, {}]
    assert [group.get_node_python_interpreter_path(rank) for rank in range(3)] == ["/py", "/opt/py", "/py"]


def test_older_names_give_the_same_values() -> None:
    placement = Placement(
        rank=1,
        cluster_node_rank=4,
        placement_node_rank=2,
        local_accelerator_rank=3,
        visible_accelerators=["3"],
        isolate_accelerator=False,
        node_id="n4",
    )
    assert (placement.node_rank, placement.node_id, placement.local_gpu_id) == (4, "n4", 3)
    assert (placement.cuda_visible_devices, placement.isolate_gpu) == (["3"], False)
    info = WorkerInfo(
        WorkerAddress("g", 1), 1, cluster_node_rank=4, accelerator_rank=3, available_accelerators=["3"], node_port=7
    )
    assert (info.node_id, info.gpu_id, info.available_gpus, info.node_port) == (4, 3, ["3"], 7)
    with pytest.raises(AttributeError):
        placement.node_rank = 1  # type: ignore[misc]


CONFIG = {
    "num_nodes": 3,
    "node_groups": [
        {"label": "big", "node_ranks": "0-1", "env_configs": [{"node_ranks": 0, "env_vars": [{"A": 1}]}]},
        {"label": "lab", "node_ranks": "1-2", "hardware": {"type": "Franka", "configs": [{"node_rank": 2}]}},
        {"label": "cpu", "node_ranks": 0, "ignore_hardware": True},
    ],
}


def test_groups_from_a_configuration() -> None:
    nodes = [node(2, arms(1)), node(0, gpus(2)), node(1, gpus(2))]
    groups = build_node_groups(ClusterConfig.from_any(CONFIG), nodes)
    assert list(groups) == ["big", "lab", "cpu", "cluster", "node"]
    assert {label: group.hardware_resource_count for label, group in groups.items()} == {
        "big": 4,
        "lab": 1,
        "cpu": 1,
        "cluster": 4,
        "node": 3,
    }
    assert groups["cluster"].node_ranks == [0, 1, 2]
    assert [info.node_labels for info in groups["node"].nodes] == [["big", "cpu"], ["big", "lab"], ["lab"]]
    assert groups["big"].get_node_env_vars(0) == {"A": "1"}
    assert nodes[0].node_labels == []


def test_groups_without_a_configuration() -> None:
    groups = build_node_groups(None, [node(0), node(1)])
    assert list(groups) == ["cluster", "node"]


def test_a_group_with_a_missing_node_is_an_error() -> None:
    with pytest.raises(ConfigError, match="group 'lab' has node 2, but the cluster's nodes are") as caught:
        build_node_groups(ClusterConfig.from_any(CONFIG), [node(0), node(1)])
    assert caught.value.path == "cluster.node_groups[1].node_ranks"


def test_configured_robots_of_described_nodes() -> None:
    config = ClusterConfig.from_any(CONFIG)
    described = with_configured_hardware(config, [node(0), node(1), node(2)])
    assert [info.get_hw_resource_count("Franka") for info in described] == [0, 0, 1]
    stated = with_configured_hardware(config, [node(0), node(1), node(2, arms(2))])
    assert stated[2].get_hw_resource_count("Franka") == 2
