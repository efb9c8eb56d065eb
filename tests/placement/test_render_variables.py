"""Variables for renderers and for NCCL that workers on NVIDIA's GPUs get by default."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rlinf_actors.hardware.egl import egl_indices, parse
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareResource
from rlinf_actors.model.node import NodeEnvConfig, NodeGroupInfo, NodeInfo
from rlinf_actors.placement.environment import worker_environment
from rlinf_actors.placement.resolver import ResourceTable, place

EGL = {0: 2, 1: 3, 2: 0, 3: 1}


def environment(
    ranks: list[int], kind: str = "NV_GPU", node_env: Mapping[str, str] | None = None, known: bool = True, **env: str
) -> dict[str, str]:
    infos = [AcceleratorInfo(kind, "X", index=n, egl_index=EGL[n] if known else -1) for n in range(4)]
    node = NodeInfo(hardware_resources=[HardwareResource(kind, infos)], env_vars=dict(node_env or {}))
    group = NodeGroupInfo("g", [node], env_configs=[NodeEnvConfig([0], env_vars=[env])] if env else None)
    placements = place([ranks], ResourceTable([group]))
    return worker_environment("w", placements[0], placements, node, group, "job")


def test_the_renderer_gets_the_egl_index_of_the_first_gpu() -> None:
    found = environment([3, 1])
    assert found["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert (found["MUJOCO_EGL_DEVICE_ID"], found["EGL_DEVICE_ID"]) == ("1", "1")


def test_an_unknown_egl_index_is_the_index_of_the_gpu() -> None:
    assert environment([3], known=False)["MUJOCO_EGL_DEVICE_ID"] == "3"


@pytest.mark.parametrize("renderer", ["osmesa", "glx"])
def test_renderers_on_the_cpu_get_no_device(renderer: str) -> None:
    assert "EGL_DEVICE_ID" not in environment([0], MUJOCO_GL=renderer)
    assert "EGL_DEVICE_ID" not in environment([0], node_env={"MUJOCO_GL": renderer})
    assert environment([0], MUJOCO_GL="egl")["EGL_DEVICE_ID"] == "2"


def test_what_is_set_already_stays() -> None:
    assert environment([0], EGL_DEVICE_ID="7")["EGL_DEVICE_ID"] == "7"
    assert "NCCL_CUMEM_ENABLE" not in environment([0], node_env={"NCCL_CUMEM_ENABLE": "1"})
    assert environment([0], NCCL_CUMEM_ENABLE="1")["NCCL_CUMEM_ENABLE"] == "1"


def test_only_nvidias_workers_get_them() -> None:
    assert environment([0])["NCCL_CUMEM_ENABLE"] == "0"
    assert not {"NCCL_CUMEM_ENABLE", "EGL_DEVICE_ID", "MUJOCO_EGL_DEVICE_ID"} & environment([0], kind="NPU").keys()


def test_the_output_of_the_query_is_read() -> None:
    assert parse("0 2\nlibEGL warning: no DRI2\n1 3\n") == {0: 2, 1: 3}


def test_a_machine_without_nvidias_egl_knows_no_device() -> None:
    try:
        found = egl_indices()
    except (OSError, RuntimeError):
        return
    assert all(index >= 0 for index in found.values())
