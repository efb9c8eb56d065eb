"""What rlinf-actors has to know of the arm: how it is configured, how a node finds it, what a worker is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from desk_arm.link import ask
from rlinf_actors import ConfigError, Hardware, HardwareConfig, HardwareInfo, HardwareResource, NodeHardwareConfig


@NodeHardwareConfig.register_hardware_config("DeskArm")
@dataclass
class DeskArmConfig(HardwareConfig):
    """An entry of ``hardware.configs``; what is wrong with one is said before anything is started.

    Attributes:
        port: the serial device on the node.
        reach_mm: how far the arm may go from its base, in millimeters.
        disable_validate: whether the arm is believed to be there without being asked.
    """

    port: str
    reach_mm: float = 300.0
    disable_validate: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 < self.reach_mm <= 450:
            raise ValueError(f"reach_mm is {self.reach_mm:g}; the arm reaches 450 mm")


@dataclass
class DeskArmInfo(HardwareInfo):
    """What a worker finds in ``self.hardware_infos``.

    Attributes:
        serial: the arm's serial number, "" if it was not asked.
        config: as configured.
    """

    serial: str
    config: DeskArmConfig

    @property
    def identity(self) -> str:
        """Two groups that claim the arm of one serial number claim one arm, whatever cable it is on."""
        return self.serial


@Hardware.register()
class DeskArm(Hardware):
    """Finds the arms of a node. Runs there, in a process of its own, before anything is placed."""

    HW_TYPE = "DeskArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[DeskArmConfig] | None = None) -> HardwareResource | None:
        """Ask each arm who it is. A fault names the entry, and the caller adds the node."""
        infos = []
        for index, config in enumerate(configs or ()):
            try:
                serial = "" if config.disable_validate else ask(config.port, "ID")
            except OSError as error:
                raise ConfigError(
                    f"is {config.port}, where no arm is: {error}", path=f"configs[{index}].port"
                ) from None
            infos.append(DeskArmInfo(cls.HW_TYPE, "Desk 1", serial, config))
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


def register() -> None:
    """Called where RLINF_EXT_MODULE names this module; being imported, it has registered the type already."""
