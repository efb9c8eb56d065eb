"""The hardware type LeRobotArm, so that a node group owns the arms and an arm has one group at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_actors import Hardware, HardwareConfig, HardwareInfo, HardwareResource, NodeHardwareConfig, device_identity

HW_TYPE = "LeRobotArm"


@NodeHardwareConfig.register_hardware_config(HW_TYPE)
@dataclass
class LeRobotArmConfig(HardwareConfig):
    """An entry of ``hardware.configs``: LeRobot's *id* of the arm, which names its calibration, and its *port*."""

    id: str
    port: str


@dataclass
class LeRobotArmInfo(HardwareInfo):
    """An arm in ``self.hardware_infos`` of a worker."""

    config: LeRobotArmConfig

    @property
    def identity(self) -> str:
        """LeRobot's id of the arm, for people."""
        return self.config.id


@Hardware.register()
class LeRobotArm(Hardware):
    """Takes each configured arm as present."""

    HW_TYPE = HW_TYPE

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[LeRobotArmConfig] | None = None) -> HardwareResource | None:
        """Return the arms that are configured for a node. Its serial device tells an arm from others."""
        infos = [LeRobotArmInfo(cls.HW_TYPE, "SO-101", entry) for entry in configs or ()]
        for info in infos:
            info.identities = [device_identity(info.config.port, node_rank)]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


def register() -> None:
    """Do nothing: the import of this module has registered the type. RLINF_EXT_MODULE needs this function."""
