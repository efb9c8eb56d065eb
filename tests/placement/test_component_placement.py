"""ComponentPlacement, described clusters and plans; the contract's two configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.errors import ConfigError, PlacementError
from rlinf_actors.placement.component import ComponentPlacement, PlacementMode
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.plan import plan
from rlinf_actors.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy

FIRST = """
cluster:
  num_nodes: 1
  component_placement:
    test_worker: {node_group: a800, placement: 0-3}
  node_groups:
    - {label: a800, node_ranks: 0}
"""

HETEROGENEOUS = """
cluster:
  num_nodes: 18
  component_placement:
    actor:   {node_group: a800,   placement: 0-63}
    rollout: {node_group: "4090", placement: 0-63}
    env:     {node_group: franka, placement: 0-1}
    agent:   {node_group: node,   placement: "0-1:0-199,2-3:200-399"}
  node_groups:
    - label: a800
      node_ranks: 0-7
      env_configs:
        - node_ranks: 0-7
          python_interpreter_path: /opt/venv/openpi/bin/python3
          env_vars: [{GLOO_SOCKET_IFNAME: eth0}]
    - label: 4090
      node_ranks: 8-15
      env_configs:
        - node_ranks: 8-15
          env_vars: [{GLOO_SOCKET_IFNAME: eth1}]
    - label: franka
      node_ranks: 16-17
      hardware:
        type: Franka
        configs:
          - {robot_ip: 10.10.10.1, node_rank: 16, camera_serials: ["322142001230", "322142001231"]}
          - {robot_ip: 10.10.10.2, node_rank: 17, camera_serials: ["322142001232", "322142001233"]}
"""

NODES = """
nodes:
  - {count: 8, ip: 10.0.0.1, cpus: 128, accelerator: {type: NV_GPU, model: A800, number: 8}}
  - {count: 8, ip: 10.0.1.1, accelerator: {model: RTX4090, number: 8}}
  - {count: 2, ip: 10.0.2.1}
"""


def described(config: Any, nodes: Any) -> DescribedCluster:
    return DescribedCluster.from_any(nodes, ClusterConfig.from_any(config))


def components(rules: dict[str, Any], cluster: DescribedCluster) -> ComponentPlacement:
    return ComponentPlacement({"cluster": {"component_placement": rules}}, cluster)


def test_the_first_program() -> None:
    config = yaml.safe_load(FIRST)
    four = described(config, [{"accelerator": {"number": 4}}])
    placement = ComponentPlacement(OmegaConf.create(config), four)
    assert placement.components == ["test_worker"]
    assert placement.get_world_size("test_worker") == 4
    placements = placement.get_strategy("test_worker").get_placement(four)
    assert [entry.visible_accelerators for entry in placements] == [["0"], ["1"], ["2"], ["3"]]

    none = described(config, [{}])
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(config, none)
    assert str(caught.value) == (
        "cluster.component_placement.test_worker: placement '0-3' names resource 3 of node group 'a800', "
        "which has one resource (the node): rank 0; to put 4 processes there, write `0:0-3`"
    )
    config["cluster"]["component_placement"]["test_worker"]["placement"] = "0:0-3"
    placement = ComponentPlacement(config, none)
    placements = placement.get_strategy("test_worker").get_placement(none)
    assert [(entry.cluster_node_rank, entry.local_rank, entry.local_world_size) for entry in placements] == [
        (0, rank, 4) for rank in range(4)
    ]


def test_the_heterogeneous_cluster() -> None:
    config = yaml.safe_load(HETEROGENEOUS)
    cluster = described(config, yaml.safe_load(NODES))
    planned = plan(config, cluster)
    by_name = {component.name: component.placements for component in planned.components}
    assert {name: len(placements) for name, placements in by_name.items()} == {
        "actor": 64,
        "rollout": 64,
        "env": 2,
        "agent": 400,
    }
    assert [(p.cluster_node_rank, p.local_accelerator_rank) for p in by_name["actor"]] == [
        (rank // 8, rank % 8) for rank in range(64)
    ]
    assert [p.cluster_node_rank for p in by_name["rollout"]] == [8 + rank // 8 for rank in range(64)]
    assert [(p.cluster_node_rank, p.local_hardware_ranks) for p in by_name["env"]] == [(16, [0]), (17, [0])]
    assert [p.cluster_node_rank for p in by_name["agent"]] == [rank // 100 for rank in range(400)]
    assert planned.placement_mode is PlacementMode.DISAGGREGATED
    actor = planned.environment("actor", 9)
    assert actor["GLOO_SOCKET_IFNAME"] == "eth0"
    assert (actor["CUDA_VISIBLE_DEVICES"], actor["NODE_RANK"], actor["ACCELERATOR_MODEL"]) == ("1", "1", "A800")
    rollout = planned.environment("rollout", 63, group_name="rollouts")
    assert (rollout["GLOO_SOCKET_IFNAME"], rollout["WORKER_NAME"], rollout["NODE_RANK"]) == ("eth1", "rollouts:63", "7")
    agent = planned.environment("agent", 399)
    assert (agent["LOCAL_RANK"], agent["LOCAL_WORLD_SIZE"], agent["CUDA_VISIBLE_DEVICES"]) == (
        "99",
        "100",
        "0,1,2,3,4,5,6,7",
    )
    assert "GLOO_SOCKET_IFNAME" not in agent
    env = planned.environment("env", 1)
    assert (env["CLUSTER_NODE_RANK"], env["LOCAL_HARDWARE_RANKS"], env["ACCELERATOR_TYPE"]) == ("17", "0", "NO_ACCEL")
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_the_plan_as_text_and_as_values() -> None:
    config = {
        "num_nodes": 3,
        "component_placement": {
            "actor,critic": {"node_group": "gpu", "placement": "all:0-1"},
            "shared": {"node_group": "gpu", "placement": "0-1:0-3"},
            "arm": {"node_group": "lab", "placement": 0},
            "tool": {"node_group": "node", "placement": "2:0-2"},
        },
        "node_groups": [
            {"label": "gpu", "node_ranks": "0-1", "env_configs": [{"node_ranks": 1, "python_interpreter_path": "/py"}]},
            {"label": "lab", "node_ranks": 2, "hardware": {"type": "Arm", "configs": [{"node_rank": 2}]}},
        ],
    }
    planned = plan(config, described(config, [{"count": 2, "ip": "10.0.0.9", "accelerator": {"number": 2}}, {}]))
    assert planned.render() == (
        "3 nodes, 4 accelerators; hybrid\n"
        "\n"
        "actor: 2 processes on gpu (all:0-1)\n"
        "  NODE  ADDRESS    RANKS  RESOURCES   INTERPRETER\n"
        "  0     10.0.0.9   0      NV_GPU 0-1  -\n"
        "  1     10.0.0.10  1      NV_GPU 0-1  /py\n"
        "\n"
        "critic: 2 processes on gpu (all:0-1)\n"
        "  NODE  ADDRESS    RANKS  RESOURCES   INTERPRETER\n"
        "  0     10.0.0.9   0      NV_GPU 0-1  -\n"
        "  1     10.0.0.10  1      NV_GPU 0-1  /py\n"
        "\n"
        "shared: 4 processes on gpu (0-1:0-3)\n"
        "  NODE  ADDRESS   RANKS  RESOURCES                        INTERPRETER\n"
        "  0     10.0.0.9  0-3    NV_GPU 0-1, 2 processes on each  -\n"
        "\n"
        "arm: 1 process on lab (0)\n"
        "  NODE  ADDRESS  RANKS  RESOURCES  INTERPRETER\n"
        "  2     node-2   0      Arm 0      -\n"
        "\n"
        "tool: 3 processes on node (2:0-2)\n"
        "  NODE  ADDRESS  RANKS  RESOURCES              INTERPRETER\n"
        "  2     node-2   0-2    the node, shared by 3  -\n"
    )
    values = json.loads(json.dumps(planned.to_dict()))
    assert list(values) == ["num_nodes", "num_accelerators", "placement_mode", "nodes", "components"]
    assert values["nodes"][2]["hardware"] == {"Arm": 1}
    assert values["components"][0]["workers"][1] == {
        "rank": 1,
        "cluster_node_rank": 1,
        "node_ip": "10.0.0.10",
        "placement_node_rank": 1,
        "node_group_label": "gpu",
        "local_hardware_ranks": [0, 1],
        "accelerator_type": "NV_GPU",
        "local_accelerator_rank": 0,
        "visible_accelerators": ["0", "1"],
        "isolate_accelerator": True,
        "local_rank": 0,
        "local_world_size": 1,
        "python_interpreter_path": "/py",
        "env_vars": {},
    }


def test_components_that_share_a_rule_share_the_strategy() -> None:
    placement = components(
        {"a,b": "0-1", "c": "0-1", "n": {"node_group": "node", "placement": "0:0-2"}}, DescribedCluster.identical(1, 4)
    )
    assert placement.components == ["a", "b", "c", "n"]
    assert placement.get_strategy("a") is placement.get_strategy("b")
    assert placement.get_strategy("a") is not placement.get_strategy("c")
    assert isinstance(placement.get_strategy("a"), FlexiblePlacementStrategy)
    assert isinstance(placement.get_strategy("n"), NodePlacementStrategy)
    assert placement.get_hardware_ranks("a") == [0, 1]
    assert placement.get_hardware_ranks("n") == [0]
    assert placement.get_world_size("n") == 3


@pytest.mark.parametrize(
    ("rules", "mode"),
    [
        ({"a": "0-3"}, "collocated"),
        ({"a": "0-3", "b": "0-3:0-7"}, "collocated"),
        ({"a": "0-1", "b": "2-3"}, "disaggregated"),
        ({"a": "0-2", "b": "2-3"}, "hybrid"),
    ],
)
def test_placement_mode(rules: dict[str, Any], mode: str) -> None:
    assert components(rules, DescribedCluster.identical(1, 4)).placement_mode == mode


def test_every_form_of_a_configuration_is_read(tmp_path: Path) -> None:
    cluster = DescribedCluster.identical(1, 2)
    config = {"cluster": {"num_nodes": 1, "component_placement": {"a": "0-1"}}}
    file = tmp_path / "conf.yaml"
    file.write_text(yaml.safe_dump(config))
    checked = ClusterConfig.from_any(config)
    for source in (
        config,
        config["cluster"],
        OmegaConf.create(config),
        OmegaConf.create(config).cluster,
        file,
        checked,
    ):
        assert ComponentPlacement(source, cluster).get_world_size("a") == 2


def test_each_fault_starts_with_its_config_path() -> None:
    cluster = DescribedCluster.identical(1, 2)
    with pytest.raises(ConfigError, match="there is no component_placement; add one"):
        ComponentPlacement({"num_nodes": 1}, cluster)
    with pytest.raises(
        PlacementError, match=r"cluster\.component_placement\.a: there is no node group 'x' in this cluster"
    ):
        components({"a": {"node_group": "x", "placement": "0"}}, cluster)
    with pytest.raises(PlacementError, match=r"cluster\.component_placement\.a: part '0-1:0-2' of"):
        components({"a": "0-1:0-2"}, cluster)
    with pytest.raises(PlacementError, match="if 1:0 was meant, YAML read it in base 60"):
        components({"a": 60}, cluster)
    with pytest.raises(PlacementError, match=r"process 0 would hold resources 0-3 .* lie on nodes 0 and 1"):
        components({"a": "0-3:0"}, DescribedCluster.identical(2, 2))
    with pytest.raises(PlacementError, match="name at least as many processes as nodes"):
        components({"a": {"node_group": "node", "placement": "0-1:0"}}, DescribedCluster.identical(2, 2))
    placement = components({"actor": "0"}, cluster)
    for ask in (placement.get_strategy, placement.get_world_size, placement.get_hardware_ranks):
        with pytest.raises(PlacementError, match="no component 'actr'; did you mean 'actor'"):
            ask("actr")


def test_ten_thousand_processes_on_a_thousand_nodes() -> None:
    cluster = DescribedCluster.identical(1000, 8)
    placement = components({"env": {"node_group": "node", "placement": "all:0-9999"}, "actor": "all"}, cluster)
    placements = placement.get_strategy("env").get_placement(cluster)
    assert (len(placements), placements[-1].cluster_node_rank, placements[-1].local_world_size) == (10_000, 999, 10)
    assert len(placement.get_strategy("actor").get_placement(cluster)) == 8000


@pytest.mark.parametrize(
    ("description", "path", "message"),
    [
        ({"node": []}, "node", "did you mean 'nodes'"),
        ({"nodes": {}}, "nodes", "must be a list"),
        ([], "nodes", "has no node"),
        ([3], "nodes[0]", "must be a mapping"),
        ([{"counts": 2}], "nodes[0].counts", "did you mean 'count'"),
        ([{"count": 0}], "nodes[0].count", "from 1 up"),
        ([{"ip": "ten"}], "nodes[0].ip", "no IP address"),
        ([{"accelerator": {"type": "NVGPU"}}], "nodes[0].accelerator.type", "did you mean 'NV_GPU'"),
        ([{"accelerator": {"numbr": 1}}], "nodes[0].accelerator.numbr", "did you mean 'number'"),
        (
            [{"robots": [{"number": 1}]}],
            "nodes[0].robots[0]",
            "has no type; it must be a mapping such as {type: Franka",
        ),
        ([{"robots": [{"type": 1}]}], "nodes[0].robots[0].type", "the name of a hardware type"),
    ],
)
def test_bad_descriptions(description: Any, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DescribedCluster.from_any(description)
    assert caught.value.path == path
    assert message in str(caught.value)


def test_descriptions(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes:\n- {count: 2, ip: 10.0.0.255, cpus: 4, robots: [{type: Arm, number: 2, model: X}]}\n")
    cluster = DescribedCluster.from_any(file)
    assert [cluster.get_node_info(rank).node_ip for rank in range(2)] == ["10.0.0.255", "10.0.1.0"]
    assert cluster.get_node_info(1).get_hw_resource_count("Arm") == 2
    assert (cluster.num_nodes, cluster.num_accelerators) == (2, 0)
    assert list(cluster.node_groups) == ["cluster", "node"]
    with pytest.raises(PlacementError, match="no node 2; the described cluster has 2 nodes"):
        cluster.get_node_info(2)
    with pytest.raises(ConfigError, match="is 3, but the described cluster has 2 nodes"):
        DescribedCluster.from_any(file, ClusterConfig.from_any({"num_nodes": 3}))
    first = DescribedCluster.from_any(file, ClusterConfig.from_any({"num_nodes": 1}))
    assert first.num_nodes == 1
    node = cluster.get_node_info(1)
    with pytest.raises(ConfigError, match=r"have ranks \[1\]; they must be 0-0"):
        DescribedCluster([node])


@pytest.mark.parametrize("whole", [True, False])
def test_a_misspelt_section_is_named_with_what_is_meant(whole):
    section = {"num_nodes": 1, "component_placment": {"actor": "0"}}
    config = {"cluster": section} if whole else section
    with pytest.raises(
        ConfigError, match=r"^cluster.component_placment: unknown key; did you mean 'component_placement'"
    ):
        ComponentPlacement(config, DescribedCluster.identical(1, 1))
