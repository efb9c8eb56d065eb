"""What there is for robots on this machine: cameras, CAN buses, serial devices, and what the environment names.

`rlinf-actors hw scan --robots` runs it in a process of its own, because a camera maker's SDK may hang or crash.
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
from rlinf_actors.hardware.robots.robot import RobotAutoConfig, variable
from rlinf_actors.hardware.robots.robot_checks import (
    CAMERAS,
    Machine,
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
"""The types that an environment can name; a Turtle2 is its node, so that there is nothing to tell it by."""


@dataclass(frozen=True)
class FoundCamera:
    """A camera. `kind` is its ``camera_type``, "" if no maker's; `source` is ``sdk`` or ``usb``."""

    serial: str
    kind: str
    name: str = ""
    source: str = "usb"
    video: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FoundRobot:
    """A robot that the environment names, with what is wrong with it."""

    type: str
    values: dict[str, str]
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RobotScan:
    """Everything for robots on a machine.

    Attributes:
        cameras: those that are connected.
        can: CAN interface to what is wrong with it, "" for nothing.
        serial: names of serial devices that stay the same (``/dev/serial/by-id``) to the device.
        robots: what the environment names, by the types that it fits.
        variables: the environment's variables for robots, as they are set.
        faults: what could not be found out.
    """

    cameras: list[FoundCamera] = field(default_factory=list)
    can: dict[str, str] = field(default_factory=dict)
    serial: dict[str, str] = field(default_factory=dict)
    robots: list[FoundRobot] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def scan(environ: Mapping[str, str], machine: Machine) -> RobotScan:
    """Look at this machine. Loads the SDKs that are installed; tries the addresses that the environment names."""
    found = RobotScan(variables=_variables(environ))
    _cameras(found, machine)
    for name in can_interfaces(machine.sys):
        found.can[name] = "; ".join(text.removeprefix(f"is {name}, which ") for text in can_faults(name, machine.sys))
    for link in sorted((machine.dev / "serial/by-id").glob("*")):
        found.serial[str(link)] = str(link.resolve())
    for kind, config_class in _NAMED.items():
        try:
            robots = RobotAutoConfig.from_environ(config_class, environ).robots(0)
        except ConfigError as error:
            if any(variable(name) in found.variables for name in config_class.REQUIRED):
                found.faults.append(f"{kind}: {error}")
            continue
        for robot in robots:
            values = {name: _text(value) for name, value in robot.as_values().items() if name != "node_rank"}
            faults = [] if robot.disable_validate else faults_of(robot, machine)
            found.robots.append(FoundRobot(kind, values, [f"{fault.field} {fault.text}" for fault in faults]))
    return found


def _cameras(found: RobotScan, machine: Machine) -> None:
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


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    known = {variable(spec.name) for kind in _NAMED.values() for spec in dataclasses.fields(kind)}
    return {name: environ[name] for name in sorted(known - {"NODE_RANK"}) if environ.get(name)}


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def main(argv: list[str]) -> None:
    """Write the scan as JSON.

    Args:
        argv: the parent's pid.
    """
    answer = contain(int(argv[0]))
    finish(answer, msgspec.json.encode(scan(os.environ, Machine())))
