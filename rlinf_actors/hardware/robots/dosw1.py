"""DOSW1: a robot with two arms and two leader arms. Each arm has a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_config import RobotConfig, TcpPort, host_of
from rlinf_actors.model.hardware import HardwareInfo
from rlinf_actors.wire.values import Identity


@dataclass
class DOSW1Config(RobotConfig):
    """Configuration of one DOSW1, a robot with two arms.

    Attributes:
        robot_url: host or URL of the robot's servers.
        left_arm_port, right_arm_port: TCP ports of the arms' servers.
        left_lead_port, right_lead_port: TCP ports of the servers of the leader arms, which a person moves.
        camera_serials: serial numbers of the robot's cameras; None for all connected cameras of type ``camera_type``.
        camera_type: realsense, zed or lumos.
        disable_validate: False to let the node check servers and cameras. By default it does not, because the servers
            of this robot may start later than the cluster.
    """

    disable_validate: bool = True
    robot_url: str = "localhost"
    left_arm_port: int = 50051
    right_arm_port: int = 50053
    left_lead_port: int = 50050
    right_lead_port: int = 50052
    camera_serials: list[str] | None = None
    camera_type: str = "realsense"

    REQUIRED: ClassVar[tuple[str, ...]] = ("robot_url",)

    def identities(self, path: str = "") -> list[Identity]:
        """Return those of the arms' servers: one host may have the servers of several robots."""
        return [one for arm in self.links() for one in self._at(arm.host, f"{path}robot_url", self.node_rank, arm.port)]

    def links(self) -> list[TcpPort]:
        """Return the ports of the two arms' servers, which the robot's node tries to reach.

        The ports of the leader arms are left out, because their servers run only during teleoperation.
        """
        host = host_of(self.robot_url)
        return [TcpPort(field, host, getattr(self, field), True) for field in ("left_arm_port", "right_arm_port")]


@dataclass
class DOSW1HWInfo(HardwareInfo):
    """A DOSW1 robot. The worker that is placed on the robot reads addresses and cameras from ``config``."""

    config: DOSW1Config

    @property
    def identity(self) -> str:
        """The robot's host, as the configuration has it."""
        return host_of(self.config.robot_url)


class DOSW1(Robot):
    """The hardware type DOSW1, whose ``enumerate`` finds the robots of a node."""

    HW_TYPE: ClassVar[str] = "DOSW1"
    CONFIG: ClassVar[type[RobotConfig]] = DOSW1Config
    INFO: ClassVar[type[HardwareInfo]] = DOSW1HWInfo
