"""The hardware type DeskArm: its configuration, its enumeration on a node, and its description for workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from desk_arm.link import ask
from rlinf_actors import (
    ConfigError,
    Hardware,
    HardwareConfig,
    HardwareInfo,
    HardwareResource,
    NodeHardwareConfig,
    device_identity,
)


@NodeHardwareConfig.register_hardware_config("DeskArm")
@dataclass
class DeskArmConfig(HardwareConfig):
    """An entry of ``hardware.configs``. An invalid entry raises ConfigError before anything starts.

    Attributes:
        port: the serial device on the node.
        reach_mm: largest distance of the arm from its base, in millimeters.
        disable_validate: True to skip the check that the arm answers.
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
    """An arm in ``self.hardware_infos`` of a worker.

    Attributes:
        serial: the arm's serial number, "" if the check was skipped.
        config: the arm's entry in the configuration.
    """

    serial: str
    config: DeskArmConfig

    @property
    def identity(self) -> str:
        """The serial number, for people."""
        return self.serial


@Hardware.register()
class DeskArm(Hardware):
    """Finds the arms of a node. The node runs this in a separate process, before placement."""

    HW_TYPE = "DeskArm"

    @classmethod
    def enumerate(cls, node_rank: int, configs: Sequence[DeskArmConfig] | None = None) -> HardwareResource | None:
        """Ask each arm for its serial number. An error names the entry; the caller adds the node.

        The device tells an arm from others, under whatever name a job knows it, and also if the check is skipped.
        """
        infos = []
        for index, config in enumerate(configs or ()):
            try:
                serial = "" if config.disable_validate else ask(config.port, "ID")
            except OSError as error:
                raise ConfigError(f"no arm answers at {config.port}: {error}", path=f"configs[{index}].port") from None
            infos.append(DeskArmInfo(cls.HW_TYPE, "Desk 1", serial, config))
            infos[-1].identities = [device_identity(config.port, node_rank)]
        return HardwareResource(cls.HW_TYPE, infos) if infos else None


def register() -> None:
    """Do nothing: the import of this module has registered the type. RLINF_EXT_MODULE needs this function."""
