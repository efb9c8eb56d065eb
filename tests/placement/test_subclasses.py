"""Programs written for RLinf subclass ComponentPlacement, send it to workers, and build nodes and groups by hand."""

from __future__ import annotations

import enum
import pickle
from typing import Any

from omegaconf import OmegaConf

from rlinf_actors.hardware.accelerators import Accelerator
from rlinf_actors.model.hardware import AcceleratorType, HardwareInfo, HardwareResource
from rlinf_actors.model.node import NodeEnvConfig, NodeGroupInfo, NodeInfo
from rlinf_actors.placement.component import ComponentPlacement, PlacementMode
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.strategies import PackedPlacementStrategy

EIGHT = DescribedCluster.identical(1, 8)
CONFIG = OmegaConf.create(
    {
        "cluster": {"num_nodes": 1, "component_placement": {"actor,reward": "0-2,3:3-4,5,7", "rollout": "all:0-3"}},
        "rollout": {"tensor_parallel_size": 2},
    }
)


class Mode(enum.Enum):
    PIPELINE = enum.auto()


class PipelinePlacement(ComponentPlacement):
    def __init__(self, config: Any, cluster: Any) -> None:
        super().__init__(config, cluster)
        self._placement_mode = Mode.PIPELINE
        self._placements["rollout"] = PackedPlacementStrategy(0, 7, self._config.rollout.tensor_parallel_size)


def test_a_subclass_finds_what_it_needs() -> None:
    placement = PipelinePlacement(CONFIG, EIGHT)
    assert placement._config is CONFIG
    assert placement._component_rank_map["actor"] == {(0, 1, 2): [0, 1, 2], (3,): [3, 4], (5,): [5], (7,): [6]}
    assert placement._component_rank_map["rollout"] == {tuple(range(8)): [0, 1, 2, 3]}
    assert list(placement._placements) == placement._components == ["actor", "reward", "rollout"]
    assert placement._component_world_size == {"actor": 7, "reward": 7, "rollout": 4}


def test_the_mode_and_the_strategy_of_a_subclass_win() -> None:
    placement = PipelinePlacement(CONFIG, EIGHT)
    assert placement.placement_mode is Mode.PIPELINE
    assert ComponentPlacement(CONFIG, EIGHT).placement_mode is PlacementMode.HYBRID
    strategy = placement.get_strategy("rollout")
    assert isinstance(strategy, PackedPlacementStrategy)
    assert (strategy._start_hw_rank, strategy._end_hw_rank, strategy._num_hardware_per_process) == (0, 7, 2)
    assert strategy._stride == 1
    other = ComponentPlacement(CONFIG, EIGHT)
    other.placement_mode = Mode.PIPELINE
    assert other.placement_mode is Mode.PIPELINE


def test_a_placement_pickles() -> None:
    placement = pickle.loads(pickle.dumps(PipelinePlacement(CONFIG, EIGHT)))  # noqa: S301 - our own bytes
    assert placement.placement_mode is Mode.PIPELINE
    assert placement.get_hardware_ranks("actor") == [0, 1, 2, 3, 5, 7]
    assert placement.get_strategy("actor") is placement.get_strategy("reward")
    assert len(placement.get_strategy("rollout").get_placement(EIGHT)) == 4


def by_hand(rank: int, accelerators: int, model: str = "NV_GPU:Mock") -> NodeInfo:
    """A node as RLinf's programs build it: type ``Accelerator``, the vendor's type in the model."""
    infos = [HardwareInfo(type=Accelerator.HW_TYPE, model=model) for _ in range(accelerators)]
    return NodeInfo(
        [], rank, f"id-{rank}", "10.0.0.1", 8, "/py", {}, {}, [HardwareResource(Accelerator.HW_TYPE, infos)]
    )


def test_resources_of_rlinfs_type_count_as_accelerators() -> None:
    node = by_hand(0, 2)
    assert (node.num_accelerators, node.accelerator_type) == (2, AcceleratorType.NV_GPU)
    assert node.get_hw_resource_count(Accelerator.HW_TYPE) == 2
    assert by_hand(0, 1, "GPU:Other").accelerator_type == "GPU"


def test_a_node_group_can_be_changed() -> None:
    group = NodeGroupInfo(label=NodeGroupInfo.DEFAULT_GROUP_LABEL, nodes=[by_hand(0, 2), by_hand(1, 1)])
    assert (group.hardware_type, group.hardware_resource_count) == (Accelerator.HW_TYPE, 3)
    group.hardware_type = None
    assert (group.hardware_resource_count, group.local_hardware_ranks) == (2, [-1, -1])
    group.nodes = [by_hand(5, 4)]
    group.hardware_type = Accelerator.HW_TYPE
    assert (group.hardware_resource_count, group.get_node_by_hardware_rank(3).node_rank) == (4, 5)
    assert NodeGroupInfo(label=NodeGroupInfo.NODE_PLACEMENT_GROUP_LABEL, nodes=[by_hand(0, 2)]).hardware_type is None
    assert NodeGroupInfo.RESERVED_LABELS == ["cluster", "node"]


def test_variables_of_a_group_in_omegaconf() -> None:
    entry = NodeEnvConfig(
        node_ranks=[0], env_vars=OmegaConf.create([{"A": "1"}, {"B": 2}]), python_interpreter_path="/p"
    )
    assert entry.env_vars == [{"A": "1"}, {"B": "2"}]
    group = NodeGroupInfo("g", [by_hand(0, 1)], env_configs=[entry])
    assert group.get_node_env_vars(0) == {"A": "1", "B": "2"}
    assert group.get_node_python_interpreter_path(0) == "/p"
