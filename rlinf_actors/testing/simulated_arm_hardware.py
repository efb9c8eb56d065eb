"""The hardware type of simulated arms: importing this module lets node groups own ``SimulatedArm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_actors.hardware.registry import Hardware, NodeHardwareConfig
from rlinf_actors.model.hardware import HardwareConfig, HardwareInfo, HardwareResource

HW_TYPE = "SimulatedArm"


@NodeHardwareConfig.register_hardware_config(HW_TYPE)
@dataclass
class SimulatedArmConfig(HardwareConfig):
    """One arm: ``address`` is its ``HOST:PORT`` as seen from its node."""

    address: str


@dataclass
class SimulatedArmInfo(HardwareInfo):
    """One arm, as its worker gets it."""

    address: str

    @property
    def identity(self) -> str:
        """Its address: only one group may use an arm at a time."""
        return self.address


@Hardware.register()
class SimulatedArmHardware(Hardware):
    """Reports each configured arm as present."""

    HW_TYPE = HW_TYPE

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[SimulatedArmConfig] | None = None) -> HardwareResource | None:
        """Return the arms of a node."""
        infos = [SimulatedArmInfo(cls.HW_TYPE, "simulated", arm.address) for arm in configs or ()]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None
