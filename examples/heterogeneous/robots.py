"""A hardware type of one's own: how an arm is configured, and what its workers are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlinf_actors import Hardware, HardwareConfig, HardwareInfo, HardwareResource, NodeHardwareConfig


@NodeHardwareConfig.register_hardware_config("Franka")
@dataclass
class FrankaConfig(HardwareConfig):
    robot_ip: str
    camera_serials: list[str] = field(default_factory=list)


@dataclass
class FrankaInfo(HardwareInfo):
    robot_ip: str
    camera_serials: list[str]


@Hardware.register()
class Franka(Hardware):
    HW_TYPE = "Franka"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[FrankaConfig] | None = None) -> HardwareResource | None:
        infos = [FrankaInfo(cls.HW_TYPE, "Panda", arm.robot_ip, arm.camera_serials) for arm in configs or ()]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None
