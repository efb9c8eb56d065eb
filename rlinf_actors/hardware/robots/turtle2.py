"""The hardware type Turtle2: a robot with two arms. The robot's own computer is the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_config import RobotConfig
from rlinf_actors.model.hardware import HardwareInfo


@dataclass
class Turtle2Config(RobotConfig):
    """Configuration of one Turtle2. It has no address, because the node is the robot's own computer.

    Attributes:
        camera_serials: serial numbers of the robot's cameras; None for all connected cameras of type ``camera_type``.
        camera_type: realsense, zed or lumos.
    """

    camera_serials: list[str] | None = None
    camera_type: str = "realsense"


@dataclass
class Turtle2HWInfo(HardwareInfo):
    """A Turtle2 robot. The worker that is placed on the robot reads its cameras from ``config``."""

    config: Turtle2Config


class Turtle2(Robot):
    """The hardware type Turtle2, whose ``enumerate`` finds the robot of a node."""

    HW_TYPE: ClassVar[str] = "Turtle2"
    CONFIG: ClassVar[type[RobotConfig]] = Turtle2Config
    INFO: ClassVar[type[HardwareInfo]] = Turtle2HWInfo
