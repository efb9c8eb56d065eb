"""Robots of a configuration, as nodes have found them: which of them are one robot?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from rlinf_actors import ConfigError, FrankaConfig, HardwareInfo, Identity
from rlinf_actors.cluster.cluster_nodes import ask_nodes
from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.hardware import registry
from rlinf_actors.hardware.configured import piece_of
from rlinf_actors.hardware.robots.franka import Franka
from rlinf_actors.wire.client_messages import Enumerated, EnumerateHardware
from rlinf_actors.wire.values import HardwareAnswer, NodeReport, NodeState

INTERFACES = {"eth1": "172.17.0.1"}
NODES = [
    NodeState(
        NodeReport(f"id{rank}", "far", f"10.0.0.{rank}", f"h{rank}", 8, 0, "3.11", "py", interfaces=INTERFACES),
        "inc",
        rank,
        "ready",
        0.0,
    )
    for rank in range(2)
]


async def found(*arms: tuple[int, str], nodes: Sequence[NodeState] = NODES) -> list[list[Identity]]:
    """Return the identities of Frankas, each given as its node's rank and its address there."""
    entries = [{"node_rank": rank, "robot_ip": address} for rank, address in arms]
    lab = {"label": "lab", "node_ranks": "0-1", "hardware": {"type": "Franka", "configs": entries}}
    config = ClusterConfig.from_any({"num_nodes": 2, "node_groups": [lab]}, hardware_types=registry.hardware_types())

    async def ask(asked: EnumerateHardware) -> Enumerated:
        mine = [FrankaConfig(rank, True, address) for rank, address in arms if rank == asked.question.node_rank]
        resource = Franka.enumerate(asked.question.node_rank, mine)
        assert resource is not None
        return Enumerated(HardwareAnswer([piece_of(info) for info in resource.infos]))

    found = await ask_nodes(config, nodes, ask)
    return [list(info.identities) for node in found for info in node.get_hardware_infos("Franka")]


async def test_one_robot_with_two_names_on_a_node_is_refused() -> None:
    said = r"Franka 0 of node 1 and Franka 1 of node 1 are the same robot, localhost = 127\.0\.0\.1: name each once"
    with pytest.raises(ConfigError, match=said):
        await found((1, "localhost"), (1, "127.0.0.1"))


async def test_one_loopback_address_of_two_nodes_of_one_host_is_one_robot() -> None:
    nodes = [replace(node, report=replace(node.report, host="h")) for node in NODES]
    with pytest.raises(ConfigError, match="Franka 0 of node 0 and Franka 0 of node 1 are the same robot, "):
        await found((0, "127.0.0.1"), (1, "localhost"), nodes=nodes)


async def test_loopback_addresses_of_two_hosts_are_two_robots() -> None:
    assert await found((0, "127.0.0.1"), (1, "127.0.0.1")) == [[Identity("localhost", 0)], [Identity("localhost", 1)]]


@pytest.mark.parametrize("other", [(0, "localhost"), (0, "172.17.0.1"), (0, "10.0.0.0")])
async def test_robot_at_a_nodes_own_address_is_one_robot_from_all_nodes(other: tuple[int, str]) -> None:
    with pytest.raises(ConfigError, match="Franka 0 of node 0 and Franka 0 of node 1 are the same robot, "):
        await found(other, (1, "10.0.0.0"))


async def test_address_that_two_nodes_have_is_each_nodes_own() -> None:
    assert await found((0, "172.17.0.1"), (1, "172.17.0.1")) == [[Identity("localhost", 0)], [Identity("localhost", 1)]]


async def test_robots_without_identity_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(asked: EnumerateHardware) -> Enumerated:
        return Enumerated(HardwareAnswer([piece_of(HardwareInfo("Franka", "v1"))] * 2))

    section: Any = {"label": "lab", "node_ranks": 0, "hardware": {"type": "Franka"}}
    config = ClusterConfig.from_any({"num_nodes": 1, "node_groups": [section]})
    node, *_ = await ask_nodes(config, NODES, ask)
    assert [info.identities for info in node.get_hardware_infos("Franka")] == [[], []]
