"""Nodes that differ: accelerators, interpreters, variables; and one node in two groups."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hetero_workers
import pytest

from rlinf_actors import (
    ComponentPlacement,
    ConfigError,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
)
from rlinf_actors.template import child_setup

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

HERE = str(Path(__file__).parent)


def other_interpreter() -> str:
    """Another Python that can run workers; made by the tests in tests/netns."""
    found = Path(os.environ.get("RLINF_TEST_VENVS", "/nowhere"), "other", "bin", "python")
    if not found.exists():
        pytest.skip("RLINF_TEST_VENVS has no environment `other`: tests/netns makes it")
    return str(found)


def group(label: str, ranks: int | str, interpreter: str | None = None, **variables: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"node_ranks": ranks, "env_vars": [{name: value} for name, value in variables.items()]}
    if interpreter:
        entry["python_interpreter_path"] = interpreter
    return {"label": label, "node_ranks": ranks, "env_configs": [entry]}


def config(num_nodes: int, placements: dict[str, dict[str, str]], *groups: dict[str, Any]) -> dict[str, Any]:
    return {"cluster": {"num_nodes": num_nodes, "component_placement": placements, "node_groups": list(groups)}}


def launch(cluster: Any, cfg: dict[str, Any]) -> dict[str, Any]:
    placement = ComponentPlacement(cfg, cluster)
    return {
        name: hetero_workers.Teller.create_group().launch(cluster, placement.get_strategy(name), name=name)
        for name in placement.components
    }


def test_node_in_two_groups_uses_the_interpreter_of_each(local_cluster: Any) -> None:
    other = other_interpreter()
    cfg = config(
        1,
        {"left": {"node_group": "one", "placement": "0-1"}, "right": {"node_group": "two", "placement": "0-1"}},
        group("one", 0, ONLY_ONE="1", SHARED="one", OMP_NUM_THREADS="3", CUDA_VISIBLE_DEVICES="0,1"),
        group("two", 0, other, ONLY_TWO="2", SHARED="two", OMP_NUM_THREADS="5", LD_BIND_NOW="1",
              CUDA_VISIBLE_DEVICES="3,2", PYTHONPATH=HERE),
    )  # fmt: skip
    local = local_cluster(1, [{"accelerators": 4, "model": "A800", "env": {"SHARED": "node", "SIDE": "all"}}])
    groups = launch(local.cluster(cluster_cfg=cfg), cfg)
    names = ("ONLY_ONE", "ONLY_TWO", "SHARED", "SIDE", "OMP_NUM_THREADS", "LD_BIND_NOW", "CUDA_VISIBLE_DEVICES")
    left, right = (groups[name].tell(*names).wait(60) for name in ("left", "right"))
    assert [list(one["env"].values()) for one in left] == [
        ["1", None, "one", "all", "3", None, "0"],
        ["1", None, "one", "all", "3", None, "1"],
    ]
    assert [list(one["env"].values()) for one in right] == [
        [None, "2", "two", "all", "5", "1", "3"],
        [None, "2", "two", "all", "5", "1", "2"],
    ]
    assert {one["prefix"] for one in left} == {sys.prefix}
    assert {one["prefix"] for one in right} == {str(Path(other).parent.parent)}
    assert not {one["template"] for one in left} & {one["template"] for one in right}
    assert groups["left"].loaded_with("LD_BIND_NOW").wait(30) == [None, None]
    assert groups["right"].loaded_with("LD_BIND_NOW").wait(30) == ["1", "1"]


def test_load_time_variables_of_one_group_do_not_reach_the_other(local_cluster: Any) -> None:
    """Both groups use one interpreter: their templates differ only by these variables."""
    cfg = config(
        1,
        {"left": {"node_group": "one", "placement": "0:0-1"}, "right": {"node_group": "two", "placement": "0:0-1"}},
        group("one", 0, MALLOC_ARENA_MAX="2"),
        group("two", 0),
    )
    groups = launch(local_cluster(1).cluster(cluster_cfg=cfg), cfg)
    assert groups["left"].loaded_with("MALLOC_ARENA_MAX").wait(60) == ["2", "2"]
    assert groups["right"].loaded_with("MALLOC_ARENA_MAX").wait(60) == [None, None]
    told = [one["env"]["MALLOC_ARENA_MAX"] for one in groups["right"].tell("MALLOC_ARENA_MAX").wait(30)]
    assert told == [None, None]


def test_workers_get_the_settings_of_different_nodes(local_cluster: Any) -> None:
    cfg = config(
        3,
        {
            "train": {"node_group": "big", "placement": "0-1"},
            "serve": {"node_group": "npus", "placement": "0-1"},
            "tool": {"node_group": "cpu", "placement": "0:0-1"},
            "all": {"node_group": "node", "placement": "0-2"},
        },
        group("big", 0, SIDE="big"),
        group("npus", 1, SIDE="npus"),
        group("cpu", 2, SIDE="cpu"),
    )
    hardware = [{"accelerators": 2, "model": "A800"}, {"accelerators": 2, "type": "NPU", "model": "910B"}, None]
    groups = launch(local_cluster(3, hardware).cluster(cluster_cfg=cfg), cfg)
    names = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "SIDE", "LOCAL_RANK")
    said = {name: found.tell(*names).wait(60) for name, found in groups.items()}
    env = {name: [list(one["env"].values()) for one in told] for name, told in said.items()}
    outside = os.environ.get(names[0]), os.environ.get(names[1])  # a node keeps what agentd was started with
    assert env["train"] == [["0", outside[1], "big", "0"], ["1", outside[1], "big", "0"]]
    assert env["serve"] == [[outside[0], "0", "npus", "0"], [outside[0], "1", "npus", "0"]]
    assert env["tool"] == [[*outside, "cpu", "0"], [*outside, "cpu", "1"]]
    assert env["all"] == [["0,1", outside[1], None, "0"], [outside[0], "0,1", None, "0"], [*outside, None, "0"]]
    assert [one["accelerator"] for one in said["all"]] == [["NV_GPU", "A800"], ["NPU", "910B"], ["NO_ACCEL", ""]]
    assert [one["node"] for one in said["all"]] == [0, 1, 2]


def test_contradictory_settings_start_nothing(local_cluster: Any) -> None:
    local = local_cluster(1, [{"accelerators": 2}])
    cfg = config(1, {"w": {"node_group": "g", "placement": "0"}}, group("g", 0, CUDA_VISIBLE_DEVICES="5"))
    with pytest.raises(ConfigError, match=r"env_vars.CUDA_VISIBLE_DEVICES: does not fit node 0: .* names 5"):
        local.cluster(cluster_cfg=cfg)
    cluster = local.cluster()
    with pytest.raises(ConfigError, match=r"launch\(env_vars\).CUDA_VISIBLE_DEVICES: is '1', but worker 0"):
        hetero_workers.Teller.create_group().launch(
            cluster, PackedPlacementStrategy(0, 0), name="one", env_vars={"CUDA_VISIBLE_DEVICES": "1"}
        )
    agreed = hetero_workers.Teller.create_group().launch(
        cluster,
        PackedPlacementStrategy(0, 0),
        name="one",  # the name is free: the refused group did not take it
        env_vars={"CUDA_VISIBLE_DEVICES": "described-0-0"},
    )
    assert agreed.tell("CUDA_VISIBLE_DEVICES").wait(60)[0]["env"] == {"CUDA_VISIBLE_DEVICES": "described-0-0"}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_are_bound_to_numa_nodes(local_cluster: Any, start_method: str) -> None:
    local = local_cluster(1, [{"accelerators": 2, "numa_nodes": [0, -1]}])
    cluster = local.cluster()
    bound, unbound = (
        hetero_workers.Teller.create_group().launch(
            cluster, PackedPlacementStrategy(0, 1), name=name, numa_bind=bind, start_method=start_method
        )
        for name, bind in (("bound", True), ("unbound", False))
    )
    mine = os.sched_getaffinity(0)
    on_node_0 = sorted(child_setup.decide([0], child_setup.SYSFS, mine).cpus)
    assert bound.affinity().wait(60) == [[on_node_0, "prefer:0"], [sorted(mine), "default"]]
    assert unbound.affinity().wait(60) == [[sorted(mine), "default"]] * 2
    on_the_node = hetero_workers.Teller.create_group().launch(
        cluster, NodePlacementStrategy([0]), name="node", numa_bind=True
    )
    assert on_the_node.affinity().wait(60) == [[sorted(mine), "default"]]
    logs = {path.name: path.read_text() for path in Path(local.nodes[0].log_dir).rglob("bound-*.err")}
    said = "numa_bind: the NUMA node of its accelerators is not known; this worker is not bound\n"
    assert {name: said in text for name, text in logs.items()} == {"bound-0.err": False, "bound-1.err": True}


def make_nodes(root: Path, *cpulists: str) -> dict[str, str]:
    """A machine with these NUMA nodes; returns the environment of a node that is to be on it."""
    for number, text in enumerate(cpulists):
        directory = root / "sys/devices/system/node" / f"node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{text}\n")
    return {"RLINF_ACTORS_PROBE_ROOT": str(root)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_worker_can_be_bound_to_several_numa_nodes(local_cluster: Any, tmp_path: Path) -> None:
    first, second, *rest = sorted(os.sched_getaffinity(0))
    env = make_nodes(tmp_path, str(first), ",".join(map(str, [second, *rest])))
    cluster = local_cluster(1, [{"accelerators": 2, "numa_nodes": [0, 1]}], env=env).cluster()
    each, both = (
        hetero_workers.Teller.create_group().launch(
            cluster, FlexiblePlacementStrategy(ranks), name=f"g{len(ranks)}", numa_bind=True
        )
        for ranks in ([[0], [1]], [[0, 1]])
    )
    assert [cpus for cpus, _ in each.affinity().wait(60)] == [[first], [second, *rest]]
    assert [cpus for cpus, _ in both.affinity().wait(60)] == [[first, second, *rest]]


@pytest.mark.torch
def test_thread_pools_follow_the_binding(local_cluster: Any, tmp_path: Path) -> None:
    env = make_nodes(tmp_path, str(min(os.sched_getaffinity(0))))
    cluster = local_cluster(1, [{"accelerators": 1, "numa_nodes": [0]}], env=env).cluster()
    bound = hetero_workers.Teller.create_group().launch(cluster, name="bound", numa_bind=True, preload=["torch"])
    assert bound.threads().wait(60) == [1]
