"""The hardware type ``SimulatedArm``. Importing this module makes it available to node groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_actors.hardware.identity import address_identities
from rlinf_actors.hardware.registry import Hardware, NodeHardwareConfig
from rlinf_actors.model.hardware import HardwareConfig, HardwareInfo, HardwareResource
from rlinf_actors.net.host import split_address

HW_TYPE = "SimulatedArm"


@NodeHardwareConfig.register_hardware_config(HW_TYPE)
@dataclass
class SimulatedArmConfig(HardwareConfig):
    """Configuration of one simulated arm of a node. ``address`` is the ``HOST:PORT`` at which the node reaches
    the arm.
    """

    address: str


@dataclass
class SimulatedArmInfo(HardwareInfo):
    """Description of one simulated arm for the worker that uses it. ``address`` is the ``HOST:PORT`` of the arm."""

    address: str

    @property
    def identity(self) -> str:
        """The address of the arm, as the configuration has it."""
        return self.address


@Hardware.register()
class SimulatedArmHardware(Hardware):
    """The hardware type of simulated arms. Every configured arm counts as present, because no hardware is probed."""

    HW_TYPE = HW_TYPE

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[SimulatedArmConfig] | None = None) -> HardwareResource | None:
        """Return the simulated arms that are configured for a node, or None if there are none."""
        infos = [SimulatedArmInfo(cls.HW_TYPE, "simulated", arm.address) for arm in configs or ()]
        for index, info in enumerate(infos):
            host, port = split_address(info.address, path := f"configs[{index}].address")
            info.identities = address_identities(host, node_rank, port, path=path)
        return HardwareResource(cls.HW_TYPE, infos) if infos else None
