"""The hardware types Franka (one arm) and DualFranka (two arms that work as one robot)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.robots.robot import Robot
from rlinf_actors.hardware.robots.robot_config import CameraSet, RobotConfig, TcpPort, host_of, port_of
from rlinf_actors.model.hardware import HardwareInfo
from rlinf_actors.wire.values import Identity

CONTROL_PORT = 1337
"""TCP port of an arm's control box (libfranka, research_interface::robot::kCommandPort)."""
MODBUS_TCP_PORT = 502
"""Default port of Modbus/TCP, the protocol of Robotiq grippers over Ethernet."""


class _FrankaArms(RobotConfig):
    """Base of FrankaConfig and DualFrankaConfig: lists what the robot's node checks on the arms.

    SIDES has the prefix of each arm's fields, such as ``left_``.
    """

    SIDES: ClassVar[tuple[str, ...]] = ("",)

    def required(self) -> list[str]:
        """Return the address of each arm that this node drives. Another node knows the addresses of its own arms."""
        return [f"{side}robot_ip" for side in self._driven_here()]

    def missing(self) -> Mapping[str, str]:
        """Return the fields in which the connection of a Robotiq gripper is missing.

        Each field is mapped to a text that says why the gripper needs the connection.
        """
        why = "a Robotiq gripper needs its serial device (/dev/ttyUSB0) or host[:port]"
        return {field: why for field, connection in self._robotiq(self.SIDES) if not connection}

    def identities(self, path: str = "") -> list[Identity]:
        """Return those of the arms. An arm whose address only the node that drives it knows is that node's Franka."""
        found: set[Identity] = set()
        for side in self.SIDES:
            field, driver = f"{side}robot_ip", self._driver(side)
            address = getattr(self, field)
            arm = self._at(address, path + field, driver) if address else [Identity("Franka", driver)]
            if address and not found.isdisjoint(arm):
                raise ConfigError(f"is {address}, which is the arm of {self.SIDES[0]}robot_ip", path=path + field)
            found.update(arm)
        return sorted(found, key=str)

    def links(self) -> list[TcpPort]:
        """Return the TCP ports of control boxes and of grippers on the network, which the robot's node tries to reach.

        Arms that another node drives are left out.
        """
        sides = self._driven_here()
        arms = [TcpPort(f"{side}robot_ip", getattr(self, f"{side}robot_ip"), CONTROL_PORT) for side in sides]
        grippers = [
            TcpPort(field, host_of(connection), port_of(connection) or MODBUS_TCP_PORT)
            for field, connection in self._robotiq(sides)
            if connection and not connection.startswith("/")
        ]
        return arms + grippers

    def devices(self) -> Mapping[str, str]:
        """Return the device files of grippers on a serial line, by the name of the field that has the device file.

        Arms that another node drives are left out.
        """
        connections = self._robotiq(self._driven_here())
        return {field: connection for field, connection in connections if connection and connection.startswith("/")}

    def _driven_here(self) -> list[str]:
        return [side for side in self.SIDES if self._driver(side) == self.node_rank]

    def _robotiq(self, sides: Sequence[str]) -> list[tuple[str, str | None]]:
        fields = [f"{side}gripper_connection" for side in sides if getattr(self, f"{side}gripper_type") == "robotiq"]
        return [(field, getattr(self, field)) for field in fields]


@dataclass
class FrankaConfig(_FrankaArms):
    """Configuration of one Franka arm.

    Attributes:
        robot_ip: address of the arm's control box; None if the node's environment has it, or another node drives the
            arm.
        camera_serials: serial numbers of the arm's cameras; None for all connected cameras of type ``camera_type``.
        camera_type: realsense, zed or lumos.
        gripper_type: franka or robotiq.
        gripper_connection: connection of a Robotiq gripper: a serial device (``/dev/ttyUSB0``) or ``host[:port]``.
        controller_node_rank: cluster rank of the node that drives the arm; None for the arm's own node. If another node
            drives the arm, the arm's own node does not check arm and gripper.
    """

    robot_ip: str | None = None
    camera_serials: list[str] | None = None
    camera_type: str = "realsense"
    gripper_type: str = "franka"
    gripper_connection: str | None = None
    controller_node_rank: int | None = None

    REQUIRED: ClassVar[tuple[str, ...]] = ("robot_ip",)


@dataclass
class FrankaHWInfo(HardwareInfo):
    """A Franka arm. The worker that is placed on the arm reads its address and cameras from ``config``."""

    config: FrankaConfig

    @property
    def identity(self) -> str:
        """Address of the arm's control box, as the configuration has it."""
        return self.config.robot_ip or ""


class Franka(Robot):
    """The hardware type Franka, whose ``enumerate`` finds the arms of a node."""

    HW_TYPE: ClassVar[str] = "Franka"
    CONFIG: ClassVar[type[RobotConfig]] = FrankaConfig
    INFO: ClassVar[type[HardwareInfo]] = FrankaHWInfo


@dataclass
class DualFrankaConfig(_FrankaArms):
    """Configuration of two Franka arms that work as one robot.

    Each arm has the fields of FrankaConfig, prefixed with left_ or right_.

    Attributes:
        left_robot_ip, right_robot_ip: addresses of the arms' control boxes.
        left_camera_serials, right_camera_serials: serial numbers of the cameras on each arm.
        left_camera_type, right_camera_type, base_camera_type: realsense, zed or lumos; None for ``camera_type``.
        left_gripper_type, right_gripper_type: franka or robotiq.
        left_gripper_connection, right_gripper_connection: connections of Robotiq grippers: a serial device or
            ``host[:port]``.
        left_controller_node_rank, right_controller_node_rank: cluster rank of the node that drives the arm; None for
            the robot's own node.
        base_camera_serials: serial numbers of the cameras that are on neither arm.
        camera_type: type of the cameras whose own type is None.
    """

    left_robot_ip: str | None = None
    right_robot_ip: str | None = None
    left_camera_serials: list[str] | None = None
    right_camera_serials: list[str] | None = None
    left_camera_type: str | None = None
    right_camera_type: str | None = None
    left_gripper_type: str = "franka"
    right_gripper_type: str = "franka"
    left_gripper_connection: str | None = None
    right_gripper_connection: str | None = None
    left_controller_node_rank: int | None = None
    right_controller_node_rank: int | None = None
    base_camera_serials: list[str] | None = None
    base_camera_type: str | None = None
    camera_type: str = "realsense"

    REQUIRED: ClassVar[tuple[str, ...]] = ("left_robot_ip", "right_robot_ip")
    SIDES: ClassVar[tuple[str, ...]] = ("left_", "right_")

    def __post_init__(self) -> None:
        """Check every field, and that the arms share no address and no camera.

        Raises:
            ConfigError: a check failed.
        """
        super().__post_init__()
        if self.left_robot_ip and self.left_robot_ip == self.right_robot_ip:
            raise ConfigError(f"is {self.right_robot_ip}, as is left_robot_ip: two arms", path="right_robot_ip")
        seen: dict[str, str] = {}
        for cameras in self.cameras():
            for serial in cameras.serials or ():
                if serial in seen:
                    raise ConfigError(f"names camera {serial}, as does {seen[serial]}", path=cameras.field)
                seen[serial] = cameras.field

    def cameras(self) -> list[CameraSet]:
        """Return the cameras whose serial numbers are given.

        If a field has no serial numbers, no camera is searched for it, because a camera that is found could be on
        either arm.
        """
        return [cameras for cameras in super().cameras() if cameras.serials is not None]


@dataclass
class DualFrankaHWInfo(HardwareInfo):
    """Two Franka arms. The worker that is placed on them reads their addresses and cameras from ``config``."""

    config: DualFrankaConfig

    @property
    def identity(self) -> str:
        """Addresses of both control boxes, as the configuration has them, joined by ``+``."""
        addresses = (self.config.left_robot_ip, self.config.right_robot_ip)
        return "+".join(map(str, addresses)) if all(addresses) else ""


class DualFranka(Robot):
    """The hardware type DualFranka, whose ``enumerate`` finds the pairs of arms of a node."""

    HW_TYPE: ClassVar[str] = "DualFranka"
    CONFIG: ClassVar[type[RobotConfig]] = DualFrankaConfig
    INFO: ClassVar[type[HardwareInfo]] = DualFrankaHWInfo
