"""The hardware type GimArm: an arm on a CAN bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_config import CameraSet, RobotConfig
from rlinf_actors.model.hardware import HardwareInfo
from rlinf_actors.wire.values import Identity


@dataclass
class GimArmConfig(RobotConfig):
    """Configuration of one GimArm, an arm on a CAN bus.

    Attributes:
        can_interface: network interface of the bus.
        arm_variant: gim_arm or gim_arm_xl.
        camera_serials: serial numbers of the arm's cameras; None for no cameras.
        camera_type: realsense, zed or lumos.
        enable_gripper: True if the arm has a gripper that the worker shall use.
        gripper_type: parallel or single_side.
        controller_node_rank: cluster rank of the node that drives the arm; None for the arm's own node. If another node
            drives the arm, the arm's own node does not check the bus.
    """

    can_interface: str = "can0"
    arm_variant: str = "gim_arm_xl"
    camera_serials: list[str] | None = None
    camera_type: str = "realsense"
    enable_gripper: bool = True
    gripper_type: str = "parallel"
    controller_node_rank: int | None = None

    REQUIRED: ClassVar[tuple[str, ...]] = ("can_interface",)
    FREE_TEXT: ClassVar[frozenset[str]] = frozenset({"gripper_type"})
    VARIANTS: ClassVar[tuple[str, ...]] = ("gim_arm", "gim_arm_xl")

    def __post_init__(self) -> None:
        """Check every field. Raises ConfigError."""
        super().__post_init__()
        if self.arm_variant not in self.VARIANTS:
            raise ConfigError(
                f"is {self.arm_variant!r}; it must be one of {', '.join(self.VARIANTS)}", path="arm_variant"
            )

    def variant(self) -> list[str]:
        """Return the arm's variant."""
        return [self.arm_variant]

    def cameras(self) -> list[CameraSet]:
        """Return the cameras whose serial numbers are given."""
        return [cameras for cameras in super().cameras() if cameras.serials is not None]

    def identities(self, path: str = "") -> list[Identity]:
        """Return that of the CAN interface, on the node that drives the arm."""
        return [Identity(self.can_interface, self._driver())]

    def can_interfaces(self) -> Mapping[str, str]:
        """Return a mapping of the field's name to the CAN interface, which has to be up on the arm's node.

        Return {} if another node drives the arm.
        """
        return {"can_interface": self.can_interface} if self._driver() == self.node_rank else {}


@dataclass
class GimArmHWInfo(HardwareInfo):
    """A GimArm. The worker that is placed on the arm reads its CAN interface and cameras from ``config``."""

    config: GimArmConfig


class GimArm(Robot):
    """The hardware type GimArm, whose ``enumerate`` finds the arms of a node."""

    HW_TYPE: ClassVar[str] = "GimArm"
    CONFIG: ClassVar[type[RobotConfig]] = GimArmConfig
    INFO: ClassVar[type[HardwareInfo]] = GimArmHWInfo
