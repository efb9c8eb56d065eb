"""Which vendors to ask on this machine, decided from files alone: nothing is loaded or started here.

A row is all that the probe needs to know of a vendor. Its module is imported in a process of its own, and has one
function, ``find(environ) -> FoundAccelerators``. A package adds a row with ``AcceleratorUtil.register_accelerator``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlinf_actors.hardware.vendors.machine import Machine
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
    """What a vendor's library said.

    Attributes:
        infos: the accelerators that may be used, in the order of their local ranks.
        faults: what could not be read.
    """

    infos: list[AcceleratorInfo] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


Find = Callable[[Mapping[str, str]], FoundAccelerators]


@dataclass(frozen=True)
class Vendor:
    """How to find out whether a vendor's accelerators can be here, and who asks for them.

    Attributes:
        kind: the accelerator type.
        devices: glob patterns of the device files of its driver.
        libraries: file names of the library that is asked.
        pci: vendor id and the beginning of the class of its devices on the PCI bus.
        integrated: PCI addresses where that vendor's devices are part of the processor, and no accelerators.
        module: the module with ``find(environ)``.
        hint: what to do when it gives no answer in time.
    """

    kind: AcceleratorType
    devices: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    module: str = ""
    pci: tuple[tuple[str, str], ...] = ()
    integrated: tuple[str, ...] = ()
    hint: str = ""

    def may_be_present(self, environ: Mapping[str, str], machine: Machine | None = None) -> bool:
        """Whether a device file, the library or a PCI device is there. Reads files only; takes a millisecond."""
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
class Registered:
    """A vendor that a package has added, and the function that asks it."""

    vendor: Vendor
    find: Find


_registered: dict[str, Registered] = {}


def add(vendor: Vendor, find: Find) -> None:
    """Let this process's probe ask one more vendor; ``AcceleratorUtil.register_accelerator`` is the public way."""
    _registered[vendor.kind.value] = Registered(vendor, find)


def registered_vendors() -> dict[str, Registered]:
    """The vendors that packages have added in this process, by the name of their type."""
    return dict(_registered)


def vendor_of(kind: str) -> Vendor | None:
    """The row of an accelerator type that is built in, None for another."""
    return next((vendor for vendor in VENDORS if vendor.kind.value == kind), None)
