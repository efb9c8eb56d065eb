"""The catalog of vendors: tells from files which vendors are present. It loads no library and starts no process.

To add a vendor, add a row here, a row in model.accelerator_table, and a module in this package with a function
``find(environ) -> FoundAccelerators``, which the probe runs in a child process. Other packages add a vendor with
``AcceleratorUtil.register_accelerator``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

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
"""Directories where drivers and container runtimes put libraries. Others in /etc/ld.so.conf are not searched."""


@dataclass(frozen=True)
class FoundAccelerators:
    """The accelerators of one vendor on this machine: the result of a vendor's ``find``.

    Attributes:
        infos: the visible accelerators, which are numbered on the node in this order.
        faults: a sentence for each device, tool or visibility list that could not be read.
    """

    infos: list[AcceleratorInfo] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def only_visible(
    found: FoundAccelerators,
    kind: AcceleratorType,
    environ: Mapping[str, str],
    read: Callable[..., tuple[list[AcceleratorInfo], list[str]]] = visible_devices,
) -> FoundAccelerators:
    """Return *found* without the accelerators that the visibility variable of *kind* hides, and with their NUMA nodes.

    *read* applies the value of the variable to accelerators: `visible_devices`, or `selected_devices` for Intel's
    variable.
    """
    machine = Machine(environ)
    for info in found.infos:
        if info.numa_node < 0:
            info.numa_node = machine.numa_node(info.pci_bus)
    variable = facts_of(kind).visibility_variable
    chosen, faults = read(found.infos, environ.get(variable), variable)
    return FoundAccelerators(chosen, [*found.faults, *faults])


Find = Callable[[Mapping[str, str]], FoundAccelerators]


class Vendor(msgspec.Struct, frozen=True):
    """How the probe recognizes a vendor's accelerators, and how it finds them. One row of the catalog."""

    kind: AcceleratorType
    devices: tuple[str, ...] = ()  # glob patterns of the device files that the vendor's driver makes
    libraries: tuple[str, ...] = ()  # file names of the vendor's library
    module: str = ""  # module with find(environ); of a registered vendor, the module that registered it
    pci: tuple[tuple[str, str], ...] = ()  # pairs of PCI vendor id and beginning of the PCI class
    integrated: tuple[str, ...] = ()  # PCI addresses of graphics in the processor, which are no accelerators
    hint: str = ""  # advice for the user if find(environ) exceeded its time limit
    find: Find | None = None  # of a registered vendor

    def may_be_present(self, environ: Mapping[str, str], machine: Machine | None = None) -> bool:
        """Return True if a device file, a library or a PCI device of the vendor exists on this machine.

        Only files are looked up, so this takes a millisecond.
        """
        machine = machine or Machine(environ)
        searched = [entry for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
        return (
            any(machine.glob(pattern) for pattern in self.devices)
            or any(
                device.vendor == vendor and device.kind.startswith(kind) and device.bus not in self.integrated
                for vendor, kind in self.pci
                for device in machine.pci_devices
            )
            or any(os.path.exists(os.path.join(directory, name)) for name in self.libraries for directory in searched)
            or any(machine.glob(f"{directory}/{name}") for name in self.libraries for directory in _LIBRARY_DIRECTORIES)
        )


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
"""The built-in vendors. No two share a device file, library or PCI id, so each is recognized alone."""


_registered: dict[str, Vendor] = {}


def add(vendor: Vendor) -> None:
    """Register a vendor in this process. Users call ``AcceleratorUtil.register_accelerator`` instead."""
    _registered[vendor.kind.value] = vendor


def registered_vendors() -> list[Vendor]:
    """Return the vendors that other packages have registered in this process."""
    return list(_registered.values())


def vendor_of(kind: str) -> Vendor | None:
    """Return the vendor of accelerator type *kind*, built in or registered in this process; None for other types."""
    return next((vendor for vendor in (*VENDORS, *_registered.values()) if vendor.kind.value == kind), None)
