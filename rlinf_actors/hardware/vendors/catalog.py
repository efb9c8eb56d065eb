"""The catalog of vendors: recognise each vendor's accelerators from files. Loads no library and starts no process.

To add a vendor, add a row here, a row in model.accelerator_table, and a module in this package with one function,
``find(environ) -> FoundAccelerators``, which the probe runs in a child process. Other packages add a vendor with
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
"""Directories where drivers and container runtimes put libraries. ld.so's cache is not read: its format is binary."""


@dataclass(frozen=True)
class FoundAccelerators:
    """The accelerators of one vendor on this machine.

    Attributes:
        infos: the visible accelerators, in the order of their local ranks.
        faults: a sentence for each device or list of devices that could not be read.
    """

    infos: list[AcceleratorInfo] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def only_visible(
    found: FoundAccelerators,
    kind: AcceleratorType,
    environ: Mapping[str, str],
    read: Callable[..., tuple[list[AcceleratorInfo], list[str]]] = visible_devices,
) -> FoundAccelerators:
    """Return *found* without the accelerators that the visibility variable of type *kind* hides.

    *read* interprets the variable: it takes the accelerators, the value and the name of the variable, and returns the
    visible accelerators and the faults.
    """
    variable = facts_of(kind).visibility_variable
    chosen, faults = read(found.infos, environ.get(variable), variable)
    return FoundAccelerators(chosen, [*found.faults, *faults])


Find = Callable[[Mapping[str, str]], FoundAccelerators]


@dataclass(frozen=True)
class Vendor:
    """How to recognise a vendor's accelerators, and the module that queries them.

    Attributes:
        kind: the accelerator type.
        devices: glob patterns of the device files that the vendor's driver makes.
        libraries: file names of the vendor's library.
        pci: pairs of PCI vendor id and beginning of the PCI class of the vendor's devices.
        integrated: PCI addresses of devices that are part of the processor; these are not accelerators.
        module: name of the module with ``find(environ)``.
        hint: advice for the user if the query timed out.
    """

    kind: AcceleratorType
    devices: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    module: str = ""
    pci: tuple[tuple[str, str], ...] = ()
    integrated: tuple[str, ...] = ()
    hint: str = ""

    def may_be_present(self, environ: Mapping[str, str], machine: Machine | None = None) -> bool:
        """True if a device file, a library or a PCI device of the vendor exists. Takes a millisecond."""
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
"""The built-in vendors. No two vendors share a device file, library or PCI id, so each is recognised alone."""


@dataclass(frozen=True)
class RegisteredVendor:
    """A vendor that another package has registered, and the function that finds its accelerators."""

    vendor: Vendor
    find: Find


_registered: dict[str, RegisteredVendor] = {}


def add(vendor: Vendor, find: Find) -> None:
    """Register a vendor in this process. The public function for it is ``AcceleratorUtil.register_accelerator``."""
    _registered[vendor.kind.value] = RegisteredVendor(vendor, find)


def registered_vendors() -> dict[str, RegisteredVendor]:
    """Return the vendors that other packages have registered in this process, by the name of their type."""
    return dict(_registered)


def vendor_of(kind: str) -> Vendor | None:
    """Return the vendor of a built-in accelerator type, None for other types."""
    return next((vendor for vendor in VENDORS if vendor.kind.value == kind), None)
