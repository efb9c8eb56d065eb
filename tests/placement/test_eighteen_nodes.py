"""The heterogeneous cluster of examples/heterogeneous: the environment of each of its 530 workers.

What is expected is written down from the documentation's rules, one worker at a time, and shares no code with the
planner: `expected` is a function of a component and a rank alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlinf_actors.config.cluster_config import ClusterConfig
from rlinf_actors.group.group_spec import worker_specs
from rlinf_actors.hardware.registry import lookup
from rlinf_actors.placement.component import ComponentPlacement
from rlinf_actors.placement.described import DescribedCluster
from rlinf_actors.wire.values import WorkerSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "heterogeneous"
SIZES = {"actor": 64, "rollout": 64, "env": 2, "agent": 400}


@pytest.fixture(scope="module")
def launched() -> dict[str, list[WorkerSpec]]:
    """What the agents would be asked to start, by component."""
    lookup("Franka")
    config = ClusterConfig.from_any(yaml.safe_load((EXAMPLE / "cluster.yaml").read_text()))
    cluster = DescribedCluster.from_any(str(EXAMPLE / "nodes.yaml"), config)
    placement = ComponentPlacement(config, cluster)
    return {
        name: worker_specs(
            WorkerSpec("", name, "lab", -1, 0, -1, {}), placement.get_strategy(name).get_placement(cluster), cluster
        )
        for name in placement.components
    }


def expected(component: str, rank: int) -> tuple[int, str | None, dict[str, str]]:
    """Node, interpreter and environment of one worker."""
    common = {
        "GROUP_NAME": component,
        "WORKER_NAME": f"{component}:{rank}",
        "WORLD_SIZE": str(SIZES[component]),
        "RANK": str(rank),
        "CLUSTER_NAMESPACE": "lab",
    }
    if component in ("actor", "rollout"):
        among, device = divmod(rank, 8)
        node = among if component == "actor" else 8 + among
        return (
            node,
            "/opt/venv/openpi/bin/python3" if component == "actor" else None,
            {
                **common,
                "NODE_GROUP_LABEL": "a800" if component == "actor" else "4090",
                "GLOO_SOCKET_IFNAME": "eth0" if component == "actor" else "eth1",
                "ACCELERATOR_MODEL": "A800" if component == "actor" else "RTX 4090",
                "ACCELERATOR_TYPE": "NV_GPU",
                "CLUSTER_NODE_RANK": str(node),
                "NODE_RANK": str(among),
                "NODE_LOCAL_RANK": str(device),
                "NODE_LOCAL_WORLD_SIZE": "8",
                "LOCAL_RANK": "0",  # it is alone with the one device that it sees
                "LOCAL_WORLD_SIZE": "1",
                "LOCAL_ACCELERATOR_RANK": str(device),
                "LOCAL_HARDWARE_RANKS": str(device),
                "VISIBLE_DEVICES": str(device),
                "CUDA_VISIBLE_DEVICES": str(device),
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "NCCL_CUMEM_ENABLE": "0",
                "MUJOCO_EGL_DEVICE_ID": str(device),
                "EGL_DEVICE_ID": str(device),
                "ISOLATE_ACCELERATOR": "1",
            },
        )
    if component == "env":
        return (
            16 + rank,
            None,
            {
                **common,
                "NODE_GROUP_LABEL": "franka",
                "ACCELERATOR_MODEL": "",
                "ACCELERATOR_TYPE": "NO_ACCEL",
                "CLUSTER_NODE_RANK": str(16 + rank),
                "NODE_RANK": str(rank),
                "NODE_LOCAL_RANK": "0",
                "NODE_LOCAL_WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "LOCAL_ACCELERATOR_RANK": "-1",
                "LOCAL_HARDWARE_RANKS": "0",  # the arm
                "VISIBLE_DEVICES": "",
                "ISOLATE_ACCELERATOR": "0",
            },
        )
    node, local = divmod(rank, 100)
    return node, None, {
        **common,
        "NODE_GROUP_LABEL": "node",
        "ACCELERATOR_MODEL": "A800",
        "ACCELERATOR_TYPE": "NV_GPU",
        "CLUSTER_NODE_RANK": str(node),
        "NODE_RANK": str(node),
        "NODE_LOCAL_RANK": str(local),
        "NODE_LOCAL_WORLD_SIZE": "100",
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": "100",
        "LOCAL_ACCELERATOR_RANK": "-1",
        "LOCAL_HARDWARE_RANKS": "",
        "VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_CUMEM_ENABLE": "0",
        "MUJOCO_EGL_DEVICE_ID": "0",
        "EGL_DEVICE_ID": "0",
        "ISOLATE_ACCELERATOR": "0",
    }  # fmt: skip


@pytest.mark.parametrize("component", SIZES)
def test_every_worker(launched: dict[str, list[WorkerSpec]], component: str) -> None:
    specs = launched[component]
    assert [spec.rank for spec in specs] == list(range(SIZES[component]))
    found = [(spec.node_rank, spec.interpreter, spec.env) for spec in specs]
    assert found == [expected(component, rank) for rank in range(SIZES[component])]
    assert {spec.world_size for spec in specs} == {SIZES[component]}


def test_each_arm_is_claimed_by_its_worker(launched: dict[str, list[WorkerSpec]]) -> None:
    assert list(launched) == list(SIZES)
    assert [len(spec.claims) for spec in launched["env"]] == [1, 1]
    assert len({claim.key for spec in launched["env"] for claim in spec.claims}) == 2
    assert not any(spec.claims for name in ("actor", "rollout", "agent") for spec in launched[name])
