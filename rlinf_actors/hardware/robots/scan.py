"""Scan this machine for robots: cameras, CAN buses, serial devices, and robots in environment variables.

`rlinf-actors hw scan --robots` runs `main` in a child process, because a camera maker's SDK may hang or crash.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.probe_child import contain, finish
from rlinf_actors.hardware.robots.dosw1 import DOSW1Config
from rlinf_actors.hardware.robots.franka import DualFrankaConfig, FrankaConfig
from rlinf_actors.hardware.robots.gim_arm import GimArmConfig
from rlinf_actors.hardware.robots.robot import RobotAutoConfig
from rlinf_actors.hardware.robots.robot_checks import (
    CAMERAS,
    CheckedMachine,
    can_faults,
    can_interfaces,
    connected,
    faults_of,
    usb_cameras,
)
from rlinf_actors.hardware.robots.robot_config import RobotConfig

_NAMED: Mapping[str, type[RobotConfig]] = {
    "Franka": FrankaConfig,
    "DualFranka": DualFrankaConfig,
    "GimArm": GimArmConfig,
    "DOSW1": DOSW1Config,
}
"""The types that environment variables can describe. A Turtle2 has no required field, so no variable shows one."""


@dataclass(frozen=True)
class FoundCamera:
    """A connected camera that the scan found."""

    serial: str  # "" if the camera has none
    kind: str  # its camera_type, "" for an unknown maker
    name: str = ""  # product name on USB, "" if the SDK found the camera
    source: str = "usb"  # "sdk" or "usb"
    video: list[str] = field(default_factory=list)  # names of its video devices, such as video0


@dataclass(frozen=True)
class FoundRobot:
    """A robot that environment variables of this machine describe.

    ``values`` has its fields as text, ``faults`` a sentence for each fault, ``identity`` what tells it from all others.
    """

    type: str
    values: dict[str, str]
    faults: list[str] = field(default_factory=list)
    identity: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RobotScan:
    """The result of a scan, which `hw scan --robots` shows."""

    cameras: list[FoundCamera] = field(default_factory=list)
    can: dict[str, str] = field(default_factory=dict)  # each CAN interface to its fault, "" if it has none
    serial: dict[str, str] = field(default_factory=dict)  # each name in /dev/serial/by-id to the device file
    robots: list[FoundRobot] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # the environment variables for robots that are set
    faults: list[str] = field(default_factory=list)  # a sentence for each kind or type that could not be read


def scan(environ: Mapping[str, str], machine: CheckedMachine) -> RobotScan:
    """Return the cameras, CAN buses, serial devices and robots that this machine has.

    Loads the camera makers' SDKs, which may crash the process, and connects to the robot addresses that are in
    *environ*.
    """
    known = {spec.name.upper() for kind in _NAMED.values() for spec in dataclasses.fields(kind)} - {"NODE_RANK"}
    found = RobotScan(variables={name: environ[name] for name in sorted(known) if environ.get(name)})
    _cameras(found, machine)
    for name in can_interfaces(machine.sys):
        found.can[name] = "; ".join(text.removeprefix(f"is {name}, which ") for text in can_faults(name, machine.sys))
    for link in sorted((machine.dev / "serial/by-id").glob("*")):
        found.serial[str(link)] = str(link.resolve())
    for kind, config_class in _NAMED.items():
        try:
            named = RobotAutoConfig.from_environ(config_class, environ).robots(0)
            robots = [(robot, robot.identities()) for robot in named]
        except ConfigError as error:
            if any(name.upper() in found.variables for name in config_class.REQUIRED):
                found.faults.append(f"{kind}: {error}")
            continue
        for robot, identities in robots:
            values = {name: _text(value) for name, value in robot.as_values().items() if name != "node_rank"}
            faults = [] if robot.disable_validate else faults_of(robot, machine)
            identity = [one.name if one.node_rank is None else f"{one.name} of this node" for one in identities]
            found.robots.append(FoundRobot(kind, values, [f"{fault.field} {fault.text}" for fault in faults], identity))
    return found


def _cameras(found: RobotScan, machine: CheckedMachine) -> None:
    usb = usb_cameras(machine.sys)
    by_sdk: set[str] = set()
    for name, kind in CAMERAS.items():
        if not kind.sdk:
            continue
        there = connected(name, machine.sys)
        if there.from_sdk:
            found.cameras.extend(FoundCamera(serial, name, source="sdk") for serial in there.serials)
            by_sdk.update(kind.vendors)
        elif there.problem and any(one.vendor in kind.vendors for one in usb):
            found.faults.append(f"{name} cameras are shown as USB has them: {there.problem}")
    for one in usb:
        kinds = [name for name, kind in CAMERAS.items() if one.vendor in kind.vendors]
        if one.vendor not in by_sdk:
            found.cameras.append(FoundCamera(one.serial, kinds[0] if kinds else "", one.name, "usb", list(one.video)))


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def main(argv: list[str]) -> None:
    """Scan this machine, and write the RobotScan to standard output as JSON. *argv* has the parent's pid."""
    answer = contain(int(argv[0]))
    finish(answer, msgspec.json.encode(scan(os.environ, CheckedMachine())))
