"""The catalog of vendors: how to recognise each one's accelerators from files alone. Loads and starts nothing.

A new vendor is a row here, a row in model.accelerator_table, and a module in this package with one function,
``find(environ) -> FoundAccelerators``, which the probe runs in a child process. A package adds a row with
``AcceleratorUtil.register_accelerator``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlinf_actors.hardware.vendors.machine import Machine
from rlinf_actors.hardware.visibility import visible_devices
from rlinf_actors.model.accelerator_table import facts_of
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_LIBRARY_DIRECTORIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/lib",
    "/usr/local/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
)
"""Where drivers and container runtimes put their libraries; ld.so's cache would need a parser of its own."""


@dataclass(frozen=True)
class FoundAccelerators:
    """Result of a vendor's library.

    Attributes:
        infos: the accelerators that may be used, in the order of their local ranks.
        faults: devices and lists that could not be read, a sentence each.
    """

    infos: list[AcceleratorInfo] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def only_visible(
    found: FoundAccelerators,
    kind: AcceleratorType,
    environ: Mapping[str, str],
    read: Callable[..., tuple[list[AcceleratorInfo], list[str]]] = visible_devices,
) -> FoundAccelerators:
    """Return the accelerators that the visibility variable of their type leaves; *read* interprets the variable."""
    variable = facts_of(kind).visibility_variable
    chosen, faults = read(found.infos, environ.get(variable), variable)
    return FoundAccelerators(chosen, [*found.faults, *faults])


Find = Callable[[Mapping[str, str]], FoundAccelerators]


@dataclass(frozen=True)
class Vendor:
    """How to recognise a vendor's accelerators, and the module that queries them.

    Attributes:
        kind: the accelerator type.
        devices: glob patterns of the device files of its driver.
        libraries: file names of its library.
        pci: vendor id and the beginning of the class of its devices on the PCI bus.
        integrated: PCI addresses of devices that are part of the processor, and no accelerators.
        module: the module with ``find(environ)``.
        hint: advice for a query that timed out.
    """

    kind: AcceleratorType
    devices: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    module: str = ""
    pci: tuple[tuple[str, str], ...] = ()
    integrated: tuple[str, ...] = ()
    hint: str = ""

    def may_be_present(self, environ: Mapping[str, str], machine: Machine | None = None) -> bool:
        """Return True if a device file, the library or a PCI device exists. Reads files only; takes a millisecond."""
        machine = machine or Machine(environ)
        if any(machine.glob(pattern) for pattern in self.devices):
            return True
        if any(
            device.vendor == vendor and device.kind.startswith(kind) and device.bus not in self.integrated
            for vendor, kind in self.pci
            for device in machine.pci_devices
        ):
            return True
        searched = [entry for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
        return any(
            os.path.exists(os.path.join(directory, name)) for name in self.libraries for directory in searched
        ) or any(machine.glob(f"{directory}/{name}") for name in self.libraries for directory in _LIBRARY_DIRECTORIES)


_PACKAGE = __name__.rpartition(".")[0]

VENDORS: tuple[Vendor, ...] = (
    Vendor(
        AcceleratorType.NV_GPU,
        devices=("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/dxg"),
        libraries=("libnvidia-ml.so.1",),
        module=f"{_PACKAGE}.nvidia",
        hint="NVIDIA's persistence daemon (nvidia-persistenced) keeps the driver from waking each GPU anew",
    ),
    Vendor(AcceleratorType.AMD_GPU, devices=("/dev/kfd",), module=f"{_PACKAGE}.amd"),
    Vendor(
        AcceleratorType.INTEL_GPU,
        pci=(("0x8086", "0x03"),),
        integrated=("0000:00:02.0",),
        module=f"{_PACKAGE}.intel",
    ),
    Vendor(AcceleratorType.NPU, devices=("/dev/davinci[0-9]*", "/dev/davinci_manager"), module=f"{_PACKAGE}.ascend"),
    Vendor(
        AcceleratorType.MUSA_GPU,
        devices=("/dev/mtgpu*",),
        pci=(("0x1ed5", "0x03"), ("0x1ed5", "0x12")),
        module=f"{_PACKAGE}.moore_threads",
    ),
    Vendor(AcceleratorType.KUNLUN_XPU, devices=("/dev/xpu[0-9]*", "/dev/xpuctrl"), module=f"{_PACKAGE}.kunlun"),
)
"""The built-in ones. Two vendors never share a sign; Intel's and Kunlun's tools have one name, their devices do not."""


@dataclass(frozen=True)
class RegisteredVendor:
    """A vendor that a package has added, and its function."""

    vendor: Vendor
    find: Find


_registered: dict[str, RegisteredVendor] = {}


def add(vendor: Vendor, find: Find) -> None:
    """Add a vendor to this process's probe; ``AcceleratorUtil.register_accelerator`` is the public way."""
    _registered[vendor.kind.value] = RegisteredVendor(vendor, find)


def registered_vendors() -> dict[str, RegisteredVendor]:
    """Return the vendors that packages have added in this process, by the name of their type."""
    return dict(_registered)


def vendor_of(kind: str) -> Vendor | None:
    """Return the row of a built-in accelerator type, None for another."""
    return next((vendor for vendor in VENDORS if vendor.kind.value == kind), None)
