"""DOSW1: two arms, and the two that lead them, behind a server for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_config import CameraSet, Link, RobotConfig, host_of
from rlinf_actors.model.hardware import HardwareInfo


@dataclass
class DOSW1Config(RobotConfig):
    """One robot with two arms.

    Attributes:
        robot_url: host of its servers, or their URL.
        left_arm_port, right_arm_port: TCP ports of the arms' servers.
        left_lead_port, right_lead_port: TCP ports of the servers of the arms that lead them by hand.
        camera_serials: serial numbers of its cameras; None for all of that type that are connected.
        camera_type: realsense, zed or lumos.
    """

    robot_url: str = ""
    left_arm_port: int = 50051
    right_arm_port: int = 50053
    left_lead_port: int = 50050
    right_lead_port: int = 50052
    camera_serials: list[str] | None = None
    camera_type: str = "realsense"

    REQUIRED: ClassVar[tuple[str, ...]] = ("robot_url",)

    def links(self) -> list[Link]:
        """The arms' servers. Those of the leading arms only run while somebody leads."""
        host = host_of(self.robot_url)
        return [Link(field, host, getattr(self, field), True) for field in ("left_arm_port", "right_arm_port")]

    def cameras(self) -> list[CameraSet]:
        """Its cameras."""
        return [CameraSet("camera_serials", self.camera_type, self.camera_serials)]


@dataclass
class DOSW1HWInfo(HardwareInfo):
    """One robot with two arms, as its worker gets it."""

    config: DOSW1Config

    @property
    def identity(self) -> str:
        """Its host; "" where that is this machine for everybody."""
        host = host_of(self.config.robot_url)
        return "" if host in ("localhost", "::1") or host.startswith("127.") else host


class DOSW1(Robot):
    """Robots with two arms behind servers."""

    HW_TYPE: ClassVar[str] = "DOSW1"
    CONFIG: ClassVar[type[RobotConfig]] = DOSW1Config
    INFO: ClassVar[type[HardwareInfo]] = DOSW1HWInfo
