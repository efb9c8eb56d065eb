"""What is wrong with a robot's configuration on this machine: addresses, cameras, buses, devices.

Everything here looks at the machine it runs on. It may load a camera maker's SDK, so that it runs in a process that may
hang or crash.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_actors.hardware.robots.cameras import CAMERAS, Cameras, connected
from rlinf_actors.hardware.robots.robot_config import CameraSet, Link, RobotConfig

REACH_S = 2.0
"""How long all addresses together may take to answer. A robot is a switch or two away: milliseconds."""

_ARPHRD_CAN = "280"
"""linux/if_arp.h: the type of a CAN interface."""
_IFF_UP = 0x1
"""linux/if.h."""


@dataclass(frozen=True)
class Machine:
    """Where the checks look.

    Attributes:
        sys: where sysfs is.
        dev: where device files are.
        reach_s: seconds that all addresses together may take.
    """

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    reach_s: float = REACH_S


@dataclass(frozen=True)
class Fault:
    """Something that is wrong. *field* is the configuration's."""

    field: str
    text: str


def faults_of(config: RobotConfig, machine: Machine) -> list[Fault]:
    """All that is wrong with one robot, in the order of its fields' importance.

    Takes as long as the camera's SDK, and at most ``machine.reach_s`` for the addresses.
    """
    found = [Fault(name, f"is not given: {why}") for name, why in config.missing().items()]
    found += link_faults(config.links(), machine.reach_s)
    for name, interface in config.can_interfaces().items():
        found += [Fault(name, text) for text in can_faults(interface, machine.sys)]
    for name, device in config.devices().items():
        path = machine.dev / Path(device).relative_to("/dev") if device.startswith("/dev/") else Path(device)
        if not path.exists():
            found.append(Fault(name, f"is {device}, which is not there: is it plugged in and switched on?"))
        elif not os.access(path, os.R_OK | os.W_OK):
            found.append(Fault(name, f"is {device}, which this user may not use: usermod -aG dialout {os.getuid()}"))
    for wanted in config.cameras():
        found += camera_faults(wanted, connected(wanted.kind, machine.sys)) if wanted.serials else []
    return found


def link_faults(links: Sequence[Link], within_s: float) -> list[Fault]:
    """Which of *links* do not answer within *within_s* seconds; all are tried at once."""
    answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for index, link in enumerate(links):
        # daemons: a name server that does not answer holds a thread longer than we wait
        threading.Thread(target=_try, args=(index, link, within_s, answers.put), daemon=True, name="reach").start()
    deadline = time.monotonic() + within_s
    texts = dict.fromkeys(range(len(links)), f"does not answer within {within_s:g} s")
    try:
        for _ in links:
            index, text = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            texts[index] = text
    except queue.Empty:
        pass  # those that have not answered keep that text
    return [
        Fault(link.field, f"{link.host} port {link.port} {texts[index]}: {_advice(link)}")
        for index, link in enumerate(links)
        if texts[index]
    ]


def _try(index: int, link: Link, within_s: float, answer: Callable[[tuple[int, str]], None]) -> None:
    try:
        socket.create_connection((link.host, link.port), within_s).close()
    except ConnectionRefusedError:
        answer((index, "refuses the connection" if link.must_listen else ""))
    except TimeoutError:
        answer((index, f"does not answer within {within_s:g} s"))
    except OSError as error:
        answer((index, f"cannot be reached ({error.strerror or error})"))
    else:
        answer((index, ""))


def _advice(link: Link) -> str:
    if link.must_listen:
        return "is the robot's server running?"
    return "is it switched on, and is this node on its network?"


def can_faults(interface: str, sys_root: Path) -> list[str]:
    """What is wrong with a CAN interface of this machine."""
    directory = sys_root / "class/net" / interface
    if not directory.exists():
        there = ", ".join(can_interfaces(sys_root)) or "none"
        return [f"is {interface}, which this node does not have; its CAN interfaces: {there}"]
    if (kind := _read(directory / "type")) != _ARPHRD_CAN:
        return [f"is {interface}, which is no CAN interface (its type is {kind}, not {_ARPHRD_CAN})"]
    if not is_up(directory):
        return [f"is {interface}, which is down: ip link set {interface} up type can bitrate 1000000"]
    if _read(directory / "operstate") in ("down", "lowerlayerdown", "dormant"):
        return [f"is {interface}, which is up but has no carrier: is the bus connected and powered?"]
    return []


def can_interfaces(sys_root: Path) -> list[str]:
    """The CAN interfaces of this machine."""
    return sorted(d.name for d in (sys_root / "class/net").glob("*") if _read(d / "type") == _ARPHRD_CAN)


def is_up(directory: Path) -> bool:
    """Whether the network interface that sysfs shows in *directory* is set up."""
    return bool(int(_read(directory / "flags") or "0", 16) & _IFF_UP)


def camera_faults(wanted: CameraSet, found: Cameras) -> list[Fault]:
    """Which of *wanted* are not among *found*. Pure."""
    missing = [serial for serial in wanted.serials or () if serial not in found.serials]
    if not missing:
        return []
    kind = CAMERAS[wanted.kind]
    there = ", ".join(found.serials) or "none"
    text = f"names {', '.join(missing)}, and no such {kind.name} camera is connected; connected: {there}"
    if found.problem:
        text += f" (as USB shows them: {found.problem})"
        if kind.usb_differs:
            text += f"; a {kind.name}'s serial number on USB is not the one that its SDK and its label say"
    return [Fault(wanted.field, text)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
