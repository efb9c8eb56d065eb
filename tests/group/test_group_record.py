"""The record that a launch writes, and the handles that processes make of the record."""

from __future__ import annotations

import asyncio

import group_kit
import pytest

from rlinf_actors.errors import ProtocolError
from rlinf_actors.group import control, group_spec
from rlinf_actors.group.group import WorkerGroup
from rlinf_actors.hardware.configured import piece_of
from rlinf_actors.model.hardware import AcceleratorType, HardwareInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.strategies import NodePlacementStrategy, PackedPlacementStrategy
from rlinf_actors.runtime.future import AsyncWork


def described(strategy):
    cluster = DescribedCluster.identical(2, 2, model="A800")
    placements = strategy.get_placement(cluster)
    nodes = [cluster.get_node_info(one.cluster_node_rank) for one in placements]
    hardware = {1: [HardwareInfo("Franka", "FR3")]}
    return group_spec.detail_of(placements, nodes, [f"host-{node.node_rank}" for node in nodes], hardware)


def attached_to(world, monkeypatch, text):
    """A handle of the world's group, as `from_group_name` makes it."""
    world.remote.detail, world.remote.owned = text, False
    found = AsyncWork("the look at the group")
    found.resolve((world.runtime, world.remote))
    monkeypatch.setattr("rlinf_actors.cluster.cluster.Cluster._asking", lambda ask, what: found)
    return WorkerGroup(control.attach(group_kit.Arm, "arms").wait())


@pytest.mark.parametrize("strategy", [PackedPlacementStrategy(0, 2), NodePlacementStrategy([0, 1, 1])])
def test_record_is_decoded_as_it_was_encoded(strategy):
    made = described(strategy)
    assert group_spec.decode(group_spec.encode(made), "g") == made


def test_record_carries_all_fields_but_leaves_out_defaults():
    odd = Placement(3, 2, 1, 0, AcceleratorType.NPU, 4, 5, ["6"], False, [7], "robots", "id")
    made = group_spec.GroupDetail([odd], ["h"], ["m"])
    assert group_spec.decode(group_spec.encode(made), "g").placements == [odd]
    assert "isolate" not in group_spec.encode(group_spec.GroupDetail([Placement(0, 0, 0)], ["h"], [""]))


def test_record_says_if_restarts_are_off_and_older_records_do_not():
    assert group_spec.decode(group_spec.encode(group_spec.GroupDetail(restarts=False)), "g").restarts is False
    assert "restarts" not in group_spec.encode(group_spec.GroupDetail())
    assert group_spec.decode("", "g").restarts is True


def test_record_has_the_models_of_ranks_with_accelerators():
    assert described(PackedPlacementStrategy(0, 2)).models == ["A800"] * 3
    assert described(NodePlacementStrategy([0, 1])).models == [
        "" if one.accelerator_type is AcceleratorType.NO_ACCEL else "A800"
        for one in described(NodePlacementStrategy([0, 1])).placements
    ]


def test_group_without_a_record_has_no_details():
    assert group_spec.decode("", "g") == group_spec.GroupDetail()


@pytest.mark.parametrize("text", ["{", "[]", '{"placements": [{"rank": "x"}]}'])
def test_invalid_record_is_an_error_that_names_the_group(text):
    with pytest.raises(ProtocolError, match="record of group 'g'"):
        group_spec.decode(text, "g")


async def test_attached_handle_has_the_same_details_as_the_owners(world, monkeypatch):
    made = described(PackedPlacementStrategy(0, 2))
    group = attached_to(world, monkeypatch, group_spec.encode(made))
    arms = {1: [HardwareInfo("Franka", "FR3")]}
    assert group.placements == made.placements
    infos = [entry.info for entry in group.worker_info_list]
    assert [info.hardware_infos for info in infos] == [[], arms[1], []]
    assert [(info.accelerator_type, info.accelerator_model) for info in infos] == [("NV_GPU", "A800")] * 3
    assert [info.available_accelerators for info in infos] == [["0"], ["1"], ["0"]]
    assert [peer.node for peer in world.remote.peers] == ["host-0", "host-0", "host-1"]


async def test_errors_of_an_attached_handle_name_hosts(world, monkeypatch):
    group = attached_to(world, monkeypatch, group_spec.encode(described(PackedPlacementStrategy(0, 2))))
    world.dies(2)
    assert "worker arms:2 on host-1 was ended by signal 9" in str(world.remote.peers[2].error)
    await asyncio.sleep(0)
    assert group.world_size == 3


async def test_an_owners_handle_has_the_hardware(world):
    arm = HardwareInfo("Franka", "FR3")
    world.remote.detail = group_spec.encode(group_spec.GroupDetail(hardware={1: [piece_of(arm)]}))
    assert [info.hardware_infos for info in world.control.worker_infos()] == [[], [arm], []]
    assert world.control.hardware == {1: [arm]}
