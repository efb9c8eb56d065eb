"""Plan and launch a job on eighteen nodes of four kinds. Usage: main.py [--small] [--plan-only].

All nodes run on this machine. Each is an agentd that reports the accelerators in nodes.yaml. On a real cluster, connect
by ``Cluster.connect(cluster_cfg=..., head="HOST:PORT")`` and keep `launch`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from rlinf_actors import Cluster, ClusterConfig, ComponentPlacement, Worker
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.placement.plan import plan
from rlinf_actors.testing import LocalCluster

HERE = Path(__file__).parent
ASKED = ("CLUSTER_NODE_RANK", "NODE_GROUP_LABEL", "ACCELERATOR_MODEL", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")


class Member(Worker):
    """A worker that reports its node and its environment."""

    def where(self) -> dict[str, str]:
        told = {name: os.environ[name] for name in ASKED if os.environ.get(name)}
        if self.hardware_type == "Franka":
            told["robot_ip"] = self.hardware_infos[0].config.robot_ip
        return told


def smaller(config: dict[str, Any], nodes: dict[str, Any]) -> None:
    """Reduce the cluster to one accelerator on each GPU node, and two agents on each of their nodes."""
    placements = config["cluster"]["component_placement"]
    placements["actor"]["placement"] = placements["rollout"]["placement"] = "0-7"
    placements["agent"]["placement"] = "0-1:0-3,2-3:4-7"
    for node in nodes["nodes"]:
        if "accelerator" in node:
            node["accelerator"]["number"] = 1


def for_this_machine(config: dict[str, Any]) -> dict[str, Any]:
    """Return *config* with this interpreter for those that are missing here, and without checks of arms and cameras."""
    config = copy.deepcopy(config)
    for group in config["cluster"]["node_groups"]:
        for entry in group.get("env_configs", ()):
            path = entry.get("python_interpreter_path")
            if path and not os.path.exists(path):
                print(f"{path} is not on this machine: workers of {group['label']} get {sys.executable}")
                entry["python_interpreter_path"] = sys.executable
        for arm in group.get("hardware", {}).get("configs", ()):
            arm["disable_validate"] = True
    return config


def hardware_of(nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the description of the nodes to LocalCluster's form: one entry for each node."""
    hardware: list[dict[str, Any]] = []
    for node in nodes["nodes"]:
        accelerator = node.get("accelerator", {})
        described = {"accelerators": accelerator.get("number", 0), "cpus": node["cpus"]}
        if accelerator:
            described.update(type=accelerator["type"], model=accelerator["model"])
        hardware += [described] * node["count"]
    return hardware


async def launch(config: dict[str, Any], cluster: Cluster) -> None:
    placement = ComponentPlacement(config, cluster)
    groups = {
        name: Member.create_group().launch(cluster, placement.get_strategy(name), name=name)
        for name in placement.components
    }
    for name, group in groups.items():  # all groups start at the same time
        told = await group.where()
        nodes = Counter(int(one["CLUSTER_NODE_RANK"]) for one in told)
        print(f"{name}: {len(told)} workers on nodes {', '.join(f'{node} ({n})' for node, n in sorted(nodes.items()))}")
        print(f"  rank 0: {told[0]}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="26 workers instead of 530: one accelerator a node")
    parser.add_argument("--plan-only", action="store_true", help="start nothing")
    options = parser.parse_args()

    config = yaml.safe_load((HERE / "cluster.yaml").read_text())
    nodes = yaml.safe_load((HERE / "nodes.yaml").read_text())
    if options.small:
        smaller(config, nodes)
    checked = ClusterConfig.from_any(config)
    print(plan(checked, DescribedCluster.from_any(nodes, checked)).render())
    if options.plan_only:
        return

    config = for_this_machine(config)
    local = LocalCluster(num_nodes=18, hardware=hardware_of(nodes), timeout=120)
    async with local, local.connect(cluster_cfg=config) as cluster:
        await launch(config, cluster)


if __name__ == "__main__":
    asyncio.run(main())
