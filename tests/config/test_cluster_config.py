"""Every key and rule of the cluster section: what is accepted, and what each fault says and where."""

# ruff: noqa: E501 (tables: a case a line)

from __future__ import annotations

import contextlib
import copy
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.config.cluster_config import ClusterConfig, NodeGroupConfig, spell_ranks
from rlinf_actors.errors import ConfigError


@dataclass
class ArmConfig:
    node_rank: int
    robot_ip: str
    camera_serials: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.robot_ip == "refuse":
            raise ValueError("robot_ip cannot be 'refuse'")


TYPES: dict[str, type] = {"Arm": ArmConfig, "Gripper": ArmConfig}


def group(**changes: Any) -> dict[str, Any]:
    return {"label": "a800", "node_ranks": "0-3", **changes}


def cluster(*groups: Any, **changes: Any) -> dict[str, Any]:
    return {"num_nodes": 4, "node_groups": list(groups), **changes}


def with_env(*entries: Any) -> dict[str, Any]:
    return cluster(group(env_configs=list(entries)))


def with_hardware(hardware: Any, **changes: Any) -> dict[str, Any]:
    return cluster(group(hardware=hardware, **changes))


def test_every_key_is_read() -> None:
    config = ClusterConfig.from_any(
        {
            "cluster": {
                "num_nodes": 4,
                "component_placement": {
                    "actor,rollout": "0-7",
                    "env": {"node_group": "arms", "placement": 0},
                    "agent": {"node_group": ["a800", 4090], "placement": "all"},
                    "tool": {"node_group": "a800, node", "placement": "0-1"},
                },
                "node_groups": [
                    {
                        "label": "a800",
                        "node_ranks": "0-1",
                        "env_configs": [
                            {"node_ranks": 0, "python_interpreter_path": "/opt/x/bin/python"},
                            {"node_ranks": [1], "env_vars": [{"A": "x"}, {"B": 2}, {"C": 0.5}]},
                        ],
                    },
                    {"label": 4090, "node_ranks": [2], "ignore_hardware": True},
                    {
                        "label": "arms",
                        "node_ranks": 3,
                        "hardware": {"type": "Arm", "configs": [{"node_rank": 3, "robot_ip": "10.0.0.1"}]},
                    },
                ],
            },
            "other": {"anything": "goes"},
        },
        hardware_types=TYPES,
    )
    assert config.num_nodes == 4
    assert [rule.components for rule in config.component_placement] == [
        ("actor", "rollout"),
        ("env",),
        ("agent",),
        ("tool",),
    ]
    assert [rule.node_groups for rule in config.component_placement] == [
        ("cluster",),
        ("arms",),
        ("a800", "4090"),
        ("a800", "node"),
    ]
    assert [rule.placement for rule in config.component_placement] == ["0-7", "0", "all", "0-1"]
    a800, old, arms = config.node_groups
    assert (a800.node_ranks, old.label, old.ignore_hardware) == ([0, 1], "4090", True)
    assert a800.env_configs[0].python_interpreter_path == "/opt/x/bin/python"
    assert a800.env_configs[1].env_vars == [{"A": "x"}, {"B": "2"}, {"C": "0.5"}]
    assert arms.hardware is not None
    assert arms.hardware.configs == (ArmConfig(3, "10.0.0.1"),)
    assert config.get_node_labels(3) == ["arms"]
    assert config.get_hardware_configs(3) == {"Arm": [ArmConfig(3, "10.0.0.1")]}
    assert config.get_hardware_configs(0) == {}


def test_a_config_is_returned_as_it_is() -> None:
    config = ClusterConfig.from_any({"num_nodes": 1})
    assert ClusterConfig.from_any(config) is config
    assert ClusterConfig.from_dict_cfg({"num_nodes": 1}) == config


def test_nothing_passed_in_is_changed() -> None:
    given_config = with_hardware({"type": "Arm", "configs": [{"node_rank": 1, "robot_ip": "x"}]})
    before = copy.deepcopy(given_config)
    ClusterConfig.from_any(given_config, hardware_types=TYPES)
    assert given_config == before


def test_without_a_table_of_types_hardware_stays_plain() -> None:
    config = ClusterConfig.from_any(with_hardware({"type": "Any", "configs": [{"node_rank": "1", "x": 1}]}))
    assert config.get_hardware_configs(1) == {"Any": [{"node_rank": 1, "x": 1}]}


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        (2, (2,)),
        ("2", (2,)),
        ("0-3", (0, 1, 2, 3)),
        (" 0 - 1 , 3 ", (0, 1, 3)),
        ("3,0", (0, 3)),
        ("all", (0, 1, 2, 3)),
        ("ALL", (0, 1, 2, 3)),
        ([3, 1], (1, 3)),
        ([0, "2-3"], (0, 2, 3)),
        ((1, 2), (1, 2)),
    ],
)
def test_node_ranks(value: Any, ranks: tuple[int, ...]) -> None:
    config = ClusterConfig.from_any(cluster(group(node_ranks=value)))
    assert config.node_groups[0].node_ranks == list(ranks)


def test_all_in_env_configs_is_all_of_the_group() -> None:
    config = ClusterConfig.from_any(cluster(group(node_ranks="1-2", env_configs=[{"node_ranks": "all"}])))
    assert config.node_groups[0].env_configs[0].node_ranks == [1, 2]


@pytest.mark.parametrize("count", [18, "18", " 18 "])
def test_num_nodes(count: Any) -> None:
    assert ClusterConfig.from_any({"num_nodes": count}).num_nodes == 18


def test_num_nodes_from_the_caller() -> None:
    assert ClusterConfig.from_any({}, num_nodes=2).num_nodes == 2
    assert ClusterConfig.from_any({"num_nodes": 2}, num_nodes=2).num_nodes == 2
    with pytest.raises(ConfigError, match="is 3, but num_nodes=2 was asked for"):
        ClusterConfig.from_any({"num_nodes": 3}, num_nodes=2)


ENV0 = "cluster.node_groups[0].env_configs[0]"
HARDWARE = "cluster.node_groups[0].hardware"
BAD: list[tuple[str, Any, str, str]] = [
    ("no mapping", 3, "cluster", "a mapping, an OmegaConf DictConfig or the path"),
    ("empty section", {"cluster": None}, "cluster", "must be a mapping such as {num_nodes: 1}"),
    ("no num_nodes", {}, "cluster", "has no num_nodes"),
    ("zero nodes", {"num_nodes": 0}, "cluster.num_nodes", "is 0; it must be a whole number from 1 up"),
    ("negative", {"num_nodes": -1}, "cluster.num_nodes", "from 1 up"),
    ("bool", {"num_nodes": True}, "cluster.num_nodes", "is True"),
    ("float", {"num_nodes": 1.5}, "cluster.num_nodes", "is 1.5"),
    ("word", {"num_nodes": "two"}, "cluster.num_nodes", "is 'two'"),
    ("superscript digits", {"num_nodes": "²"}, "cluster.num_nodes", "whole number"),
    ("unknown key", {"num_nodes": 1, "node_group": []}, "cluster.node_group", "unknown key 'node_group'; did you mean 'node_groups'"),
    ("number as key", {"num_nodes": 1, 7: 1}, "cluster.7", "unknown key 7"),
    ("groups no list", cluster(node_groups={"label": "x"}), "cluster.node_groups", "must be a list such as [{label"),
    ("group no mapping", cluster("a800"), "cluster.node_groups[0]", "must be a mapping such as {label"),
    ("group key", cluster(group(node_rank=1)), "cluster.node_groups[0].node_rank", "did you mean 'node_ranks'"),
    ("no label", cluster({"node_ranks": 0}), "cluster.node_groups[0]", "has no label"),
    ("no ranks", cluster({"label": "x"}), "cluster.node_groups[0]", "has no node_ranks"),
    ("label none", cluster(group(label=None)), "cluster.node_groups[0].label", "text or a whole number"),
    ("label float", cluster(group(label=1.5)), "cluster.node_groups[0].label", "text or a whole number"),
    ("label bool", cluster(group(label=True)), "cluster.node_groups[0].label", "text or a whole number"),
    ("label empty", cluster(group(label=" ")), "cluster.node_groups[0].label", "text or a whole number"),
    ("label comma", cluster(group(label="a,b")), "cluster.node_groups[0].label", "cannot hold a comma"),
    ("reserved", cluster(group(label="cluster")), "cluster.node_groups[0].label", "built-in group of all nodes"),
    ("reserved node", cluster(group(label="node")), "cluster.node_groups[0].label", "'node' is the built-in"),
    ("label twice", cluster(group(label=4090), group(label="4090")), "cluster.node_groups[1].label", "'4090' is the label of cluster.node_groups[0] too"),
    ("rank range", cluster(group(node_ranks="0-4")), "cluster.node_groups[0].node_ranks", "names node 4, but the cluster has 4 nodes: ranks 0-3"),
    ("rank far", cluster(group(node_ranks="0-999999999")), "cluster.node_groups[0].node_ranks", "names node 4"),
    ("rank one node", {"num_nodes": 1, "node_groups": [group(node_ranks=1)]}, "cluster.node_groups[0].node_ranks", "one node: rank 0"),
    ("rank twice", cluster(group(node_ranks="0-2,1")), "cluster.node_groups[0].node_ranks", "names node 1 twice"),
    ("rank back", cluster(group(node_ranks="3-0")), "cluster.node_groups[0].node_ranks", "runs backwards; write 0-3"),
    ("rank word", cluster(group(node_ranks="0-x")), "cluster.node_groups[0].node_ranks", "cannot read '0-x'"),
    ("rank empty", cluster(group(node_ranks="")), "cluster.node_groups[0].node_ranks", "cannot read ''"),
    ("rank comma", cluster(group(node_ranks="0,")), "cluster.node_groups[0].node_ranks", "cannot read ''"),
    ("rank list empty", cluster(group(node_ranks=[])), "cluster.node_groups[0].node_ranks", "names no node"),
    ("rank none", cluster(group(node_ranks=None)), "cluster.node_groups[0].node_ranks", 'ranges ("0-7,12")'),
    ("rank bool", cluster(group(node_ranks=[True])), "cluster.node_groups[0].node_ranks[0]", "is True"),
    ("rank negative", cluster(group(node_ranks=-1)), "cluster.node_groups[0].node_ranks", "ranks count from 0"),
    ("rank float", cluster(group(node_ranks=1.0)), "cluster.node_groups[0].node_ranks", "is 1.0"),
    ("rank nested", cluster(group(node_ranks=[[0]])), "cluster.node_groups[0].node_ranks[0]", "inside a list"),
    ("all in list", cluster(group(node_ranks=["all"])), "cluster.node_groups[0].node_ranks[0]", "inside a list"),
    ("ignore no bool", cluster(group(ignore_hardware="yes")), "cluster.node_groups[0].ignore_hardware", "true or false"),
    ("env no list", cluster(group(env_configs={})), "cluster.node_groups[0].env_configs", "must be a list"),
    ("env no mapping", with_env(3), ENV0, "must be a mapping"),
    ("env key", with_env({"node_ranks": 0, "env_var": []}), f"{ENV0}.env_var", "did you mean 'env_vars'"),
    ("env no ranks", with_env({"env_vars": []}), ENV0, "has no node_ranks"),
    ("env outside", cluster(group(node_ranks="0-1", env_configs=[{"node_ranks": "1-2"}])), f"{ENV0}.node_ranks", "names node 2, which is not in group 'a800' (its nodes: 0-1)"),
    ("env overlap", with_env({"node_ranks": "0-1"}, {"node_ranks": 1}), "cluster.node_groups[0].env_configs[1].node_ranks", f"names node 1, which {ENV0} covers already"),
    ("interpreter", with_env({"node_ranks": 0, "python_interpreter_path": 3}), f"{ENV0}.python_interpreter_path", "the path of an interpreter"),
    ("vars mapping", with_env({"node_ranks": 0, "env_vars": {"A": 1}}), f"{ENV0}.env_vars", "must be a list such as [{GLOO_SOCKET_IFNAME: eth0}]"),
    ("vars two keys", with_env({"node_ranks": 0, "env_vars": [{"A": 1, "B": 2}]}), f"{ENV0}.env_vars[0]", "has 2 keys"),
    ("vars no key", with_env({"node_ranks": 0, "env_vars": [{}]}), f"{ENV0}.env_vars[0]", "has 0 keys"),
    ("vars text", with_env({"node_ranks": 0, "env_vars": ["A=1"]}), f"{ENV0}.env_vars[0]", "must be a mapping"),
    ("vars twice", with_env({"node_ranks": 0, "env_vars": [{"A": 1}, {"A": 1}]}), f"{ENV0}.env_vars[1]", "A is set twice"),
    ("vars name", with_env({"node_ranks": 0, "env_vars": [{"A=B": 1}]}), f"{ENV0}.env_vars[0]", "cannot be the name"),
    ("vars bool", with_env({"node_ranks": 0, "env_vars": [{"A": True}]}), f"{ENV0}.env_vars[0].A", "YAML reads it as True; quote"),
    ("vars none", with_env({"node_ranks": 0, "env_vars": [{"A": None}]}), f"{ENV0}.env_vars[0].A", "text or a number"),
    ("vars nul", with_env({"node_ranks": 0, "env_vars": [{"A": "a\0"}]}), f"{ENV0}.env_vars[0].A", "NUL"),
    ("hardware no mapping", with_hardware("Arm"), HARDWARE, "must be a mapping such as {type: Franka"),
    ("hardware key", with_hardware({"type": "Arm", "config": []}), f"{HARDWARE}.config", "did you mean 'configs'"),
    ("hardware no type", with_hardware({"configs": []}), HARDWARE, "has no type"),
    ("hardware type", with_hardware({"type": "Amr"}), f"{HARDWARE}.type", "no hardware type 'Amr'; did you mean 'Arm'? Known types: Arm, Gripper"),
    ("hardware accelerator", with_hardware({"type": "NV_GPU"}), f"{HARDWARE}.type", "leave the hardware section out"),
    ("hardware rank", with_hardware({"type": "Arm", "configs": [{"robot_ip": "x"}]}), f"{HARDWARE}.configs[0]", "has no node_rank"),
    ("hardware outside", cluster(group(node_ranks="0-1", hardware={"type": "Arm", "configs": [{"node_rank": 2, "robot_ip": "x"}]})), f"{HARDWARE}.configs[0].node_rank", "is 2, which is not in group 'a800' (its nodes: 0, 1)"),
    ("hardware field", with_hardware({"type": "Arm", "configs": [{"node_rank": 0, "robot_pi": "x"}]}), f"{HARDWARE}.configs[0].robot_pi", "did you mean 'robot_ip'"),
    ("hardware missing", with_hardware({"type": "Arm", "configs": [{"node_rank": 0}]}), f"{HARDWARE}.configs[0]", "has no robot_ip, which ArmConfig needs"),
    ("hardware refuses", with_hardware({"type": "Arm", "configs": [{"node_rank": 0, "robot_ip": "refuse"}]}), f"{HARDWARE}.configs[0]", "ArmConfig refuses it: robot_ip cannot be"),
    ("ignored hardware", with_hardware({"type": "Arm"}, ignore_hardware=True), "cluster.node_groups[0].ignore_hardware", "exclude one another"),
    ("components list", {"num_nodes": 1, "component_placement": ["a"]}, "cluster.component_placement", "must be a mapping such as {actor"),
    ("component key", {"num_nodes": 1, "component_placement": {"a": {"placements": "0"}}}, "cluster.component_placement.a.placements", "did you mean 'placement'"),
    ("no placement", {"num_nodes": 1, "component_placement": {"a": {"node_group": "node"}}}, "cluster.component_placement.a", "has no placement"),
    ("placement none", {"num_nodes": 1, "component_placement": {"a": None}}, "cluster.component_placement.a", "a placement is a rank or a string"),
    ("placement bool", {"num_nodes": 1, "component_placement": {"a": True}}, "cluster.component_placement.a", "a placement is a rank or a string"),
    ("placement list", {"num_nodes": 1, "component_placement": {"a": {"placement": [0]}}}, "cluster.component_placement.a.placement", "is [0]"),
    ("names", {"num_nodes": 1, "component_placement": {"a,,b": "0"}}, "cluster.component_placement.a,,b", "no list of component names"),
    ("name none", {"num_nodes": 1, "component_placement": {None: "0"}}, "cluster.component_placement.None", "no list of component names"),
    ("two rules", {"num_nodes": 1, "component_placement": {"a,b": "0", "b": "0"}}, "cluster.component_placement.b", "component 'b' has a rule already at cluster.component_placement.a,b"),
    ("no such group", {"num_nodes": 1, "component_placement": {"a": {"node_group": "A800", "placement": 0}}, "node_groups": [group(node_ranks=0)]}, "cluster.component_placement.a.node_group", "no node group 'A800'; did you mean"),
    ("group twice", {"num_nodes": 1, "component_placement": {"a": {"node_group": "node,node", "placement": 0}}}, "cluster.component_placement.a.node_group", "names node group 'node' twice"),
    ("group list empty", {"num_nodes": 1, "component_placement": {"a": {"node_group": [], "placement": 0}}}, "cluster.component_placement.a.node_group", "an empty list"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "path", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_each_fault_names_its_path(config: Any, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.from_any(config, hardware_types=TYPES)
    assert caught.value.path == path
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ValueError)


def test_no_type_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"no hardware type 'Arm'; Known types: none\. .*RLINF_EXT_MODULE"):
        ClusterConfig.from_any(with_hardware({"type": "Arm"}), hardware_types={})


def test_a_group_alone() -> None:
    alone = NodeGroupConfig.from_any({"label": "x", "node_ranks": "all"}, num_nodes=2)
    assert alone.node_ranks == [0, 1]
    with pytest.raises(ConfigError) as caught:
        NodeGroupConfig.from_any({"label": "x", "node_ranks": 2}, num_nodes=2)
    assert caught.value.path == "node_group.node_ranks"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 100) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(json_like, json_like, json_like)
def test_whatever_comes_in_the_only_error_is_config_error(groups: Any, placement: Any, entry: Any) -> None:
    for config in (
        groups,
        {"num_nodes": 4, "node_groups": groups, "component_placement": placement},
        cluster({"label": "x", "node_ranks": entry}),
        with_env({"node_ranks": 0, "env_vars": entry}),
        with_hardware({"type": "Arm", "configs": entry}),
    ):
        if isinstance(config, str):
            continue  # a path
        with contextlib.suppress(ConfigError):
            ClusterConfig.from_any(config, hardware_types=TYPES)


@given(st.sets(st.integers(0, 60)))
def test_spelled_ranks_are_read_back(ranks: set[int]) -> None:
    ordered = tuple(sorted(ranks))
    if not ordered:
        assert spell_ranks(ordered) == "none"
        return
    group = NodeGroupConfig.from_any({"label": "x", "node_ranks": spell_ranks(ordered)}, num_nodes=61)
    assert group.node_ranks == list(ordered)


def test_the_configuration_needs_no_omegaconf() -> None:
    assert "omegaconf" not in {name.split(".")[0] for name in vars(sys.modules["rlinf_actors.config.config_values"])}


def test_a_node_s_pieces_of_one_type_belong_to_one_group() -> None:
    def lab(label: str, ranks: object, kind: str = "Arm") -> dict[str, Any]:
        return group(label=label, node_ranks=ranks, hardware={"type": kind, "configs": []})

    with pytest.raises(ConfigError, match=r"node_groups\[1\]\.hardware: group 'left' owns Arm on node 2 too"):
        ClusterConfig.from_any(cluster(lab("left", "0-2"), lab("right", "2-3")), hardware_types=TYPES)
    ClusterConfig.from_any(cluster(lab("left", "0-1"), lab("right", "2-3")), hardware_types=TYPES)
    ClusterConfig.from_any(cluster(lab("left", 2), lab("right", 2, "Gripper")), hardware_types=TYPES)


RLINFS_SENTENCES: list[tuple[dict[str, Any], str]] = [
    (cluster(group(label="node")), "reserved"),
    (with_env({"node_ranks": 0, "env_vars": [{"A": 1, "B": 2}]}), "exactly one key-value pair"),
    (with_env({"node_ranks": 0, "env_vars": ["BAD"]}), "Each node env_var must be a dict"),
    (cluster(group(node_ranks="0-9")), "Error parsing node_ranks"),
    (cluster(group(node_ranks="bad-format")), "Invalid rank format"),
    (cluster("train"), "Each node yaml config must be a dictionary"),
    (with_hardware({"type": "Arm", "configs": ["BAD"]}), "Each hardware config must be a dictionary"),
    (with_hardware({"type": "Leg"}), "Unsupported hardware type"),
    (with_hardware({"type": "Arm", "configs": [{"robot_ip": "x"}]}), "Missing fields '['node_rank']' detected"),
    (with_hardware({"type": "Arm", "configs": [{"node_rank": 9, "robot_ip": "x"}]}), "must be within node_ranks"),
    (
        with_hardware({"type": "Arm", "configs": [{"node_rank": 0, "robot_ip": "x", "zoom": 1}]}),
        "Unknown fields '{'zoom'}' detected",
    ),
    (with_hardware({"type": "Arm", "configs": [{"node_rank": 0, "robot_ip": "x"}] * 2}), "Duplicate hardware configs"),
    ({"num_nodes": 0}, "'num_nodes' must be a positive integer"),
]


@pytest.mark.parametrize(("config", "sentence"), RLINFS_SENTENCES, ids=[sentence for _, sentence in RLINFS_SENTENCES])
def test_an_error_has_the_words_that_users_of_rlinf_search_for(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AssertionError) as caught:
        ClusterConfig.from_any(config, hardware_types=TYPES)
    assert sentence in str(caught.value)


def test_what_the_configuration_has_for_a_node() -> None:
    entries = [{"node_ranks": 1, "python_interpreter_path": "/opt/py"}]
    arms = {"type": "Franka", "configs": [{"node_rank": 1, "robot_ip": "10.0.0.1"}]}
    groups = cluster(group(env_configs=entries), {"label": "lab", "node_ranks": "1-2", "hardware": arms})
    config = ClusterConfig.from_dict_cfg(groups)
    assert config.get_node_labels_by_rank(1) == ["a800", "lab"]
    assert config.get_node_labels_by_rank(99) == []
    assert config.get_node_python_interpreter_path_by_rank(1) == ["/opt/py"]
    assert config.get_node_python_interpreter_path_by_rank(0) == []
    (arm,) = config.get_node_hw_configs_by_rank(1)
    assert (type(arm).__name__, arm.robot_ip) == ("FrankaConfig", "10.0.0.1")
    assert config.get_node_hw_configs_by_rank(2) == []
    assert [each.hardware_type for each in config.node_groups] == [None, "Franka"]
