"""Check a robot's configuration on this machine: addresses, CAN buses, device files and cameras.

Cameras are found by their maker's SDK if it is installed, else as USB devices in /sys. An SDK may hang or crash, so
this code runs in a child process (probe_child), never in a daemon. The functions block.
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlinf_actors.hardware.robots.robot_config import CameraSet, RobotConfig, TcpPort


@dataclass(frozen=True)
class CameraKind:
    """One kind of camera, and how to find cameras of that kind."""

    name: str  # value of camera_type for this kind
    sdk: str  # Python module of the maker's SDK, "" for cameras that need none
    install: str  # command or advice that installs the module
    vendors: tuple[str, ...]  # USB vendor ids of the maker (usb.org); empty for all ids that no other kind has
    serials: Callable[[Any], list[str]]  # returns the serial numbers of the connected cameras, given the SDK's module
    usb_differs: bool = False  # True if the serial number on USB is not the one that the SDK reports


@dataclass(frozen=True)
class UsbCamera:
    """A USB camera, with the properties that sysfs shows."""

    serial: str  # "" if the USB device has none
    name: str  # product name that the device reports
    vendor: str  # USB vendor id, in hexadecimal
    video: tuple[str, ...] = ()  # names of its video devices, such as video0


@dataclass(frozen=True)
class Cameras:
    """The connected cameras of one kind."""

    serials: tuple[str, ...]
    from_sdk: bool  # False if they were found as USB devices
    problem: str = ""  # why the SDK is missing or failed, "" if it answered or the kind has no SDK


def connected(kind: str, sys_root: Path) -> Cameras:
    """Return the connected cameras of *kind*, one of CAMERA_TYPES. *sys_root* is where sysfs is mounted.

    Loads the maker's SDK, which may crash the process.
    """
    camera = CAMERAS[kind]
    problem = ""
    if camera.sdk:
        try:
            serials = camera.serials(importlib.import_module(camera.sdk))
            return Cameras(tuple(sorted(map(str, serials))), True)
        except Exception as error:  # noqa: BLE001 - whatever an SDK raises becomes the message
            problem = f"{camera.sdk} failed: {type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError) and camera.sdk.startswith(error.name or " "):
                problem = f"{camera.sdk} is not installed for {sys.executable}: {camera.install}"
    found = [one for one in usb_cameras(sys_root) if one.vendor in camera.vendors]
    if not camera.vendors:  # a kind without vendor ids has the cameras that belong to no other kind
        others = {vendor for other in CAMERAS.values() for vendor in other.vendors}
        found = [one for one in usb_cameras(sys_root) if one.vendor not in others]
    return Cameras(tuple(sorted({one.serial for one in found if one.serial})), False, problem)


def usb_cameras(sys_root: Path) -> list[UsbCamera]:
    """Return the connected USB cameras: all USB devices that have a video device, which uvcvideo makes for a camera.

    *sys_root* is the directory where sysfs is mounted.
    """
    video: dict[Path, list[str]] = {}
    for entry in sorted((sys_root / "class/video4linux").glob("video*")):
        device = _usb_device(entry / "device")
        if device is not None:
            video.setdefault(device, []).append(entry.name)
    return [
        UsbCamera(_text(device / "serial"), _text(device / "product"), _text(device / "idVendor"), tuple(names))
        for device, names in video.items()
    ]


def _usb_device(device: Path) -> Path | None:
    """Return the directory in sysfs of the USB device that a video device belongs to; None if there is none.

    *device* is the link ``device`` in the directory of the video device.
    """
    resolved = device.resolve()
    return next((path for path in (resolved, *resolved.parents) if (path / "idVendor").exists()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # no such attribute, or the device was unplugged meanwhile
        return ""


def _realsense(rs: Any) -> list[str]:
    return [device.get_info(rs.camera_info.serial_number) for device in rs.context().query_devices()]


def _zed(sl: Any) -> list[str]:
    return [str(device.serial_number) for device in sl.Camera.get_device_list()]


CAMERAS: Mapping[str, CameraKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            # librealsense: the USB serial is rs2_camera_info's ASIC_SERIAL_NUMBER, not its SERIAL_NUMBER
            CameraKind("realsense", "pyrealsense2", "pip install pyrealsense2", ("8086",), _realsense, True),
            CameraKind("zed", "pyzed.sl", "install the ZED SDK, then run its get_python_api.py", ("2b03",), _zed),
            CameraKind("lumos", "", "", (), lambda _: []),
        )
    }
)
"""Each kind of camera by its name. The names are robot_config.CAMERA_TYPES."""

_ARPHRD_CAN = "280"
"""linux/if_arp.h: the type of a CAN interface."""
_IFF_UP = 0x1
"""linux/if.h: flag of an interface that is up."""


@dataclass(frozen=True)
class CheckedMachine:
    """The directories in which robots' configurations are checked, and the time limit of the checks.

    Tests give directories of their own.
    """

    sys: Path = Path("/sys")  # where sysfs is mounted
    dev: Path = Path("/dev")  # directory of device files
    reach_s: float = 2.0  # seconds that all addresses together may take; a robot nearby needs milliseconds


@dataclass(frozen=True)
class ConfigFault:
    """A fault of one field of a robot's configuration.

    ``text`` continues a sentence that begins with the field's name.
    """

    field: str
    text: str


def faults_of(config: RobotConfig, machine: CheckedMachine) -> list[ConfigFault]:
    """Return all faults of one robot's configuration. Blocks while camera SDKs search and while addresses are tried."""
    found = [ConfigFault(name, f"is not given: {why}") for name, why in config.missing().items()]
    found += link_faults(config.links(), machine.reach_s)
    for name, interface in config.can_interfaces().items():
        found += [ConfigFault(name, text) for text in can_faults(interface, machine.sys)]
    for name, device in config.devices().items():
        path = machine.dev / Path(device).relative_to("/dev") if device.startswith("/dev/") else Path(device)
        if not path.exists():
            found.append(ConfigFault(name, f"is {device}, which is not there: is it plugged in and switched on?"))
        elif not os.access(path, os.R_OK | os.W_OK):
            found.append(
                ConfigFault(name, f"is {device}, which this user may not use: usermod -aG dialout {os.getuid()}")
            )
    for wanted in config.cameras():
        found += camera_faults(wanted, connected(wanted.kind, machine.sys)) if wanted.serials else []
    return found


def link_faults(links: Sequence[TcpPort], within_s: float) -> list[ConfigFault]:
    """Connect to all ports at once; return a fault for each port that does not answer within *within_s* seconds."""
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
        pass  # links that have not answered keep the text from above
    advice = {True: "is the robot's server running?", False: "is it switched on, and is this node on its network?"}
    return [
        ConfigFault(link.field, f"{link.host} port {link.port} {texts[index]}: {advice[link.must_listen]}")
        for index, link in enumerate(links)
        if texts[index]
    ]


def _try(index: int, link: TcpPort, within_s: float, answer: Callable[[tuple[int, str]], None]) -> None:
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


def can_faults(interface: str, sys_root: Path) -> list[str]:
    """Return a text for each reason why *interface* cannot be used as a CAN interface; [] if it can be used.

    *sys_root* is the directory where sysfs is mounted.
    """
    directory = sys_root / "class/net" / interface
    if not directory.exists():
        there = ", ".join(can_interfaces(sys_root)) or "none"
        return [f"is {interface}, which this node does not have; its CAN interfaces: {there}"]
    if (kind := _text(directory / "type")) != _ARPHRD_CAN:
        return [f"is {interface}, which is no CAN interface (its type is {kind}, not {_ARPHRD_CAN})"]
    if not int(_text(directory / "flags") or "0", 16) & _IFF_UP:
        return [f"is {interface}, which is down: ip link set {interface} up type can bitrate 1000000"]
    if _text(directory / "operstate") in ("down", "lowerlayerdown", "dormant"):
        return [f"is {interface}, which is up but has no carrier: is the bus connected and powered?"]
    return []


def can_interfaces(sys_root: Path) -> list[str]:
    return sorted(d.name for d in (sys_root / "class/net").glob("*") if _text(d / "type") == _ARPHRD_CAN)


def camera_faults(wanted: CameraSet, found: Cameras) -> list[ConfigFault]:
    """Return one fault that lists the *wanted* cameras that are not connected; [] if all of them are. Pure.

    *found* has the connected cameras.
    """
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
    return [ConfigFault(wanted.field, text)]
