"""The hardware type ``SimulatedArm``. Importing this module makes it available to node groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_actors.hardware.registry import Hardware, NodeHardwareConfig
from rlinf_actors.model.hardware import HardwareConfig, HardwareInfo, HardwareResource

HW_TYPE = "SimulatedArm"


@NodeHardwareConfig.register_hardware_config(HW_TYPE)
@dataclass
class SimulatedArmConfig(HardwareConfig):
    """Configuration of one arm. ``address`` is the ``HOST:PORT`` at which its node reaches the arm."""

    address: str


@dataclass
class SimulatedArmInfo(HardwareInfo):
    """One arm, as its worker sees it. ``address`` is its ``HOST:PORT``."""

    address: str

    @property
    def identity(self) -> str:
        """The arm's address, so that only one group at a time may use the arm."""
        return self.address


@Hardware.register()
class SimulatedArmHardware(Hardware):
    """Hardware type whose configured arms always count as present."""

    HW_TYPE = HW_TYPE

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[SimulatedArmConfig] | None = None) -> HardwareResource | None:
        """Return the configured arms of a node, None if it has none."""
        infos = [SimulatedArmInfo(cls.HW_TYPE, "simulated", arm.address) for arm in configs or ()]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None
