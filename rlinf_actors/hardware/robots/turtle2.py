"""Turtle2: a robot with two arms whose own computer is the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_config import CameraSet, RobotConfig
from rlinf_actors.model.hardware import HardwareInfo


@dataclass
class Turtle2Config(RobotConfig):
    """One robot; the node is its computer, so it has no address.

    Attributes:
        camera_serials: serial numbers of its cameras; None for all connected ones of that type.
        camera_type: realsense, zed or lumos.
    """

    camera_serials: list[str] | None = None
    camera_type: str = "realsense"

    def cameras(self) -> list[CameraSet]:
        """Its cameras."""
        return [CameraSet("camera_serials", self.camera_type, self.camera_serials)]


@dataclass
class Turtle2HWInfo(HardwareInfo):
    """One robot, as its worker gets it."""

    config: Turtle2Config


class Turtle2(Robot):
    """Robots whose own computers are nodes."""

    HW_TYPE: ClassVar[str] = "Turtle2"
    CONFIG: ClassVar[type[RobotConfig]] = Turtle2Config
    INFO: ClassVar[type[HardwareInfo]] = Turtle2HWInfo
