"""The cameras of this machine: through their makers' SDKs where those are installed, else as /sys shows USB devices."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class CameraKind:
    """How one maker's cameras are found.

    Attributes:
        name: as in ``camera_type``.
        sdk: module of its SDK, "" for cameras that any video program can use.
        install: what to install to get that module.
        vendors: USB vendor ids of the maker (usb.org), in hexadecimal; empty for any.
        serials: asks the SDK, given its module.
        usb_differs: whether the serial number on USB is another than the SDK's.
    """

    name: str
    sdk: str
    install: str
    vendors: tuple[str, ...]
    serials: Callable[[Any], list[str]]
    usb_differs: bool = False


@dataclass(frozen=True)
class UsbCamera:
    """A camera as /sys shows it.

    Attributes:
        serial: of the USB device, "" if it has none.
        name: what the device calls itself.
        vendor: USB vendor id, in hexadecimal.
        video: its video devices, such as ``video0``.
    """

    serial: str
    name: str
    vendor: str
    video: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cameras:
    """The cameras of one kind that are connected.

    Attributes:
        kind: which.
        serials: their serial numbers.
        from_sdk: whether the SDK said so.
        problem: why the SDK was not asked or failed, "" if it answered or there is none.
    """

    kind: CameraKind
    serials: tuple[str, ...]
    from_sdk: bool
    problem: str = ""


def connected(kind: str, sys_root: Path) -> Cameras:
    """The cameras of one kind. Loads its SDK, which may take seconds or crash: run it in a process of its own.

    Args:
        kind: one of robots.config.CAMERA_TYPES.
        sys_root: where sysfs is.
    """
    camera = CAMERAS[kind]
    problem = ""
    if camera.sdk:
        if _is_installed(camera.sdk):
            try:
                serials = camera.serials(importlib.import_module(camera.sdk))
                return Cameras(camera, tuple(sorted(str(serial) for serial in serials)), True)
            except Exception as error:  # noqa: BLE001 - whatever an SDK raises becomes the message
                problem = f"{camera.sdk} failed: {type(error).__name__}: {error}"
        else:
            problem = f"{camera.sdk} is not installed for {sys.executable}: {camera.install}"
    found = [one for one in usb_cameras(sys_root) if one.vendor in camera.vendors]
    if not camera.vendors:  # a kind without a vendor id of its own: what is no other kind's
        others = {vendor for other in CAMERAS.values() for vendor in other.vendors}
        found = [one for one in usb_cameras(sys_root) if one.vendor not in others]
    return Cameras(camera, tuple(sorted({one.serial for one in found if one.serial})), False, problem)


def usb_cameras(sys_root: Path) -> list[UsbCamera]:
    """All USB devices that have a video device (uvcvideo makes one for each of these cameras)."""
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
    """The USB device that a video device's ``device`` link leads to: the interface's parent."""
    resolved = device.resolve()
    return next((path for path in (resolved, *resolved.parents) if (path / "idVendor").exists()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # it has none, or was unplugged meanwhile
        return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


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
"""Kind to how its cameras are found; the names are robots.config.CAMERA_TYPES."""
