"""Which vendors' libraries to ask on this machine, decided from files alone: nothing is loaded here.

A row is all that the probe needs to know of a vendor. Its module is imported in a subprocess of its own, and has one
function, ``find(environ) -> Found``.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

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
class Found:
    """What a vendor's library said.

    Attributes:
        infos: the accelerators that may be used, in the order of their local ranks.
        faults: what could not be read.
    """

    infos: list[AcceleratorInfo] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Vendor:
    """How to find out whether a vendor's accelerators can be here, and who asks its library.

    Attributes:
        kind: the accelerator type.
        devices: glob patterns of the device files of its driver.
        libraries: file names of the library that is asked.
        module: the module with ``find(environ)``.
    """

    kind: AcceleratorType
    devices: tuple[str, ...]
    libraries: tuple[str, ...]
    module: str

    def may_be_present(self, environ: Mapping[str, str]) -> bool:
        """Whether a device file or the library is there. Reads directories only; takes microseconds."""
        if any(glob.glob(pattern) for pattern in self.devices):
            return True
        searched = [entry for entry in environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
        return any(
            os.path.exists(os.path.join(directory, name))
            for directory in (*searched, *_LIBRARY_DIRECTORIES)
            for name in self.libraries
        )


VENDORS: tuple[Vendor, ...] = (
    Vendor(
        AcceleratorType.NV_GPU,
        devices=("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/dxg"),
        libraries=("libnvidia-ml.so.1",),
        module="rlinf_actors.hardware.nvidia",
    ),
)


def vendor_of(kind: AcceleratorType) -> Vendor | None:
    """The row of an accelerator type, None while nobody can probe it."""
    return next((vendor for vendor in VENDORS if vendor.kind is kind), None)
