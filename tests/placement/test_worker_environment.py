"""What a worker finds in its environment because of where it is."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType, HardwareResource
from rlinf_actors.model.node import NodeEnvConfig, NodeGroupInfo, NodeInfo
from rlinf_actors.placement.environment import GroupLayout, worker_environment
from rlinf_actors.placement.resolver import ResourceTable, place, place_on_nodes


def node(rank: int, kind: str = "NV_GPU", count: int = 2, **more: Any) -> NodeInfo:
    infos = [AcceleratorInfo(kind, "M", index=index) for index in range(count)]
    return NodeInfo(node_rank=rank, hardware_resources=[HardwareResource(kind, infos)], **more)


def environments(
    group: NodeGroupInfo, assignment: list[list[int]], isolate: bool = True, **more: Any
) -> list[dict[str, str]]:
    placements = place(assignment, ResourceTable([group]), isolate)
    layout = GroupLayout.of(placements)
    nodes = {info.node_rank: info for info in group.nodes}
    return [
        worker_environment("g", placement, layout, nodes[placement.cluster_node_rank], group, "job", **more)
        for placement in placements
    ]


def test_an_isolated_worker_gets_every_variable() -> None:
    group = NodeGroupInfo(label="a", nodes=[node(3), node(5)], env_configs=[NodeEnvConfig((5,), env_vars={"X": "1"})])
    found = environments(group, [[1], [2], [3]])
    assert found[2] == {
        "X": "1",
        "GROUP_NAME": "g",
        "WORKER_NAME": "g:2",
        "WORLD_SIZE": "3",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "CLUSTER_NODE_RANK": "5",
        "NODE_LOCAL_RANK": "1",
        "NODE_LOCAL_WORLD_SIZE": "2",
        "LOCAL_ACCELERATOR_RANK": "1",
        "VISIBLE_DEVICES": "1",
        "ACCELERATOR_TYPE": "NV_GPU",
        "ACCELERATOR_MODEL": "M",
        "ISOLATE_ACCELERATOR": "1",
        "LOCAL_HARDWARE_RANKS": "1",
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_CUMEM_ENABLE": "0",
        "MUJOCO_EGL_DEVICE_ID": "1",
        "EGL_DEVICE_ID": "1",
        "NODE_GROUP_LABEL": "a",
        "CLUSTER_NAMESPACE": "job",
    }
    assert "X" not in found[0]


def test_placements_may_be_given_instead_of_the_layout() -> None:
    group = NodeGroupInfo(label="a", nodes=[node(0)])
    placements = place([[0], [1]], ResourceTable([group]))
    assert worker_environment("g", placements[1], placements, group.nodes[0], group, "job")["NODE_LOCAL_RANK"] == "1"


def test_a_worker_that_is_not_isolated_sees_all_accelerators() -> None:
    found = environments(NodeGroupInfo(label="a", nodes=[node(0)]), [[1], [0]], isolate=False)
    assert [entry["LOCAL_RANK"] for entry in found] == ["1", "0"]
    assert [entry["LOCAL_WORLD_SIZE"] for entry in found] == ["2", "2"]
    assert {entry["CUDA_VISIBLE_DEVICES"] for entry in found} == {"0,1"}
    assert {entry["ISOLATE_ACCELERATOR"] for entry in found} == {"0"}


def test_a_worker_without_accelerator() -> None:
    found = environments(NodeGroupInfo(label="a", nodes=[NodeInfo()]), [[0], [0]])
    assert [(entry["LOCAL_RANK"], entry["NODE_LOCAL_RANK"], entry["LOCAL_WORLD_SIZE"]) for entry in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert found[0]["LOCAL_ACCELERATOR_RANK"] == "-1"
    assert found[0]["ACCELERATOR_TYPE"] == "NO_ACCEL"
    assert found[0]["ACCELERATOR_MODEL"] == found[0]["VISIBLE_DEVICES"] == found[0]["LOCAL_HARDWARE_RANKS"] == ""
    assert not {"CUDA_VISIBLE_DEVICES", ""} & found[0].keys()


def test_ignored_hardware_is_hidden() -> None:
    found = environments(NodeGroupInfo(label="a", nodes=[node(0)], ignore_hardware=True), [[0]])
    assert (found[0]["CUDA_VISIBLE_DEVICES"], found[0]["ACCELERATOR_TYPE"]) == ("", "NO_ACCEL")


def test_node_workers_see_all() -> None:
    info = node(0)
    group = NodeGroupInfo(label="node", nodes=[info])
    placements = place_on_nodes([(group, info)] * 2)
    found = worker_environment("g", placements[1], placements, info, group, "job")
    assert (found["CUDA_VISIBLE_DEVICES"], found["LOCAL_RANK"], found["ACCELERATOR_TYPE"]) == ("0,1", "1", "NV_GPU")


@pytest.mark.parametrize(
    ("kind", "variable", "value", "hidden", "nic"),
    [
        ("NV_GPU", "CUDA_VISIBLE_DEVICES", "1", "", "NCCL_SOCKET_IFNAME"),
        ("AMD_GPU", "HIP_VISIBLE_DEVICES", "1", "-1", "NCCL_SOCKET_IFNAME"),
        ("INTEL_GPU", "ONEAPI_DEVICE_SELECTOR", "level_zero:1", "!*:gpu", "CCL_MNIC_NAME"),
        ("NPU", "ASCEND_RT_VISIBLE_DEVICES", "1", "", "HCCL_SOCKET_IFNAME"),
        ("MUSA_GPU", "MUSA_VISIBLE_DEVICES", "1", "", "MCCL_SOCKET_IFNAME"),
        ("KUNLUN_XPU", "CUDA_VISIBLE_DEVICES", "1", "", "BKCL_SOCKET_IFNAME"),
    ],
)
def test_vendors(kind: str, variable: str, value: str, hidden: str, nic: str) -> None:
    nodes = [node(0, kind)]
    found = environments(NodeGroupInfo(label="a", nodes=nodes), [[1]], comm_net_devices="eth3")[0]
    assert found[variable] == value
    assert (found["GLOO_SOCKET_IFNAME"], found[nic]) == ("eth3", "eth3")
    blind = environments(NodeGroupInfo(label="a", nodes=nodes, ignore_hardware=True), [[0]])[0]
    assert blind[variable] == hidden
    assert ACCELERATOR_TABLE[AcceleratorType(kind)].ccl in {"nccl", "ccl", "hccl", "mccl", "bkcl"}


def test_the_table_is_complete() -> None:
    assert set(ACCELERATOR_TABLE) == set(AcceleratorType)


def test_network_interfaces_only_where_unset() -> None:
    configs = [NodeEnvConfig((1,), env_vars={"GLOO_SOCKET_IFNAME": "conf"})]
    nodes = [
        node(0, default_env_vars={"NCCL_SOCKET_IFNAME": "node"}),
        node(1, env_vars={"RLINF_COMM_NET_DEVICES": "own"}),
        node(2, count=0),
    ]
    group = NodeGroupInfo(label="a", nodes=nodes, env_configs=configs)
    found = environments(group, [[0], [2]], comm_net_devices="eth3,eth4")
    assert found[0]["GLOO_SOCKET_IFNAME"] == "eth3,eth4"
    assert "NCCL_SOCKET_IFNAME" not in found[0]  # the agent merges the node's own in
    assert (found[1]["GLOO_SOCKET_IFNAME"], found[1]["NCCL_SOCKET_IFNAME"]) == ("conf", "own")
    assert not [name for name in environments(group, [[0]])[0] if name.endswith("IFNAME")]
    plain = environments(NodeGroupInfo(label="c", nodes=nodes[2:]), [[0]], comm_net_devices="e")[0]
    named = [name for name in plain if name.endswith(("IFNAME", "MNIC_NAME"))]
    assert named == ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]


def test_computed_variables_override_the_configuration() -> None:
    configs = [NodeEnvConfig((0,), env_vars={"RANK": "7", "CUDA_VISIBLE_DEVICES": "9"})]
    found = environments(NodeGroupInfo(label="a", nodes=[node(0)], env_configs=configs), [[1]])[0]
    assert (found["RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "1")


def test_devices_are_numbered_as_the_probe_did_unless_the_user_says_otherwise() -> None:
    configs = [NodeEnvConfig((0,), env_vars={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})]
    nodes = [node(0), node(1, env_vars={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}), node(2), node(3, "AMD_GPU")]
    found = environments(NodeGroupInfo(label="a", nodes=nodes, env_configs=configs), [[0], [2], [4], [6]])
    told = [entry.get("CUDA_DEVICE_ORDER") for entry in found]
    assert told == ["FASTEST_FIRST", None, "PCI_BUS_ID", None]  # the agent merges the node's own in
    nodes[1].accelerators[1].model = "N"
    assert environments(NodeGroupInfo(label="a", nodes=nodes), [[2]])[0]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_interface_that_holds_the_nodes_address_is_always_named() -> None:
    nodes = [
        node(0, node_ip="10.1.0.9", interface="ib0"),
        node(1, count=0, node_ip="127.0.0.1", interface="lo"),
        node(2, "NPU", node_ip="10.1.0.9", interface="ib0", env_vars={"NCCL_SOCKET_IFNAME": "eth0"}),
        node(3, node_ip="192.0.2.7", interface=""),  # an address of a router before it: no interface has that
    ]
    found = [environments(NodeGroupInfo(label="a", nodes=[one]), [[0]])[0] for one in nodes]
    told = [{name[:4]: value for name, value in entry.items() if name.endswith("IFNAME")} for entry in found]
    assert told == [{"GLOO": "ib0", "NCCL": "ib0"}, {"GLOO": "lo", "NCCL": "lo"}, {"GLOO": "ib0", "HCCL": "ib0"}, {}]


def test_interfaces_of_the_launch_go_before_all_others() -> None:
    info = node(0, interface="eth0", env_vars={"RLINF_COMM_NET_DEVICES": "own", "NCCL_SOCKET_IFNAME": "eth2"})
    group = NodeGroupInfo(label="a", nodes=[info])
    placements = place([[0]], ResourceTable([group]))

    def named(**launch: str) -> dict[str, str]:
        found = worker_environment(
            "g", placements[0], placements, info, group, "job", comm_net_devices="driver", launch_env=launch
        )
        return {name[:4]: value for name, value in {**found, **launch}.items() if name.endswith("IFNAME")}

    assert named() == {"GLOO": "own"}
    assert named(RLINF_COMM_NET_DEVICES="ib0") == {"GLOO": "ib0"}
    assert named(RLINF_COMM_NET_DEVICES="ib0", GLOO_SOCKET_IFNAME="eth9") == {"GLOO": "eth9"}


class TestSeveralVendorsOnOneNode:
    """NVIDIA's 4 and 5, as agentd's CUDA_VISIBLE_DEVICES left them, and Ascend's 0 to 5."""

    def group(self) -> NodeGroupInfo:
        nvidia = HardwareResource("NV_GPU", [AcceleratorInfo("NV_GPU", "A800", index=index) for index in (4, 5)])
        ascend = HardwareResource("NPU", [AcceleratorInfo("NPU", "910B", index=index) for index in range(6)])
        return NodeGroupInfo("mixed", [NodeInfo(node_rank=0, hardware_resources=[nvidia, ascend])])

    def test_each_ones_devices_keep_their_names_and_the_others_are_hidden(self) -> None:
        first, *_, last = environments(self.group(), [[rank] for rank in range(8)])
        assert (first["CUDA_VISIBLE_DEVICES"], first["ASCEND_RT_VISIBLE_DEVICES"]) == ("4", "")
        assert (last["CUDA_VISIBLE_DEVICES"], last["ASCEND_RT_VISIBLE_DEVICES"]) == ("", "5")
        assert (first["ACCELERATOR_MODEL"], last["ACCELERATOR_MODEL"]) == ("A800", "910B")
        assert (last["LOCAL_HARDWARE_RANKS"], last["LOCAL_ACCELERATOR_RANK"]) == ("7", "7")

    def test_one_that_is_not_isolated_sees_all_of_its_own_type(self) -> None:
        (found,) = environments(self.group(), [[3]], isolate=False)
        assert found["ASCEND_RT_VISIBLE_DEVICES"] == found["VISIBLE_DEVICES"] == "0,1,2,3,4,5"
        assert found["LOCAL_RANK"] == "1"
        assert "CUDA_VISIBLE_DEVICES" not in found

    def test_interfaces_and_numbering_are_those_of_all_vendors(self) -> None:
        found, *_ = environments(self.group(), [[0]], comm_net_devices="ib0")
        assert found["NCCL_SOCKET_IFNAME"] == found["HCCL_SOCKET_IFNAME"] == "ib0"
        assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
