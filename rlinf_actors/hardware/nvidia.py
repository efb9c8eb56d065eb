"""NVIDIA's accelerators, by NVML. Imported only in the probe's child for this vendor: NVML may hang or crash it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pynvml

from rlinf_actors.hardware.vendors import Found
from rlinf_actors.hardware.visibility import visible_devices
from rlinf_actors.model.accelerator_table import VISIBILITY_VARIABLES
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_MAX_DEVICES = 256
"""More than the kernel driver has minor numbers for; a larger count is a broken library."""

_Value = TypeVar("_Value")


def find(environ: Mapping[str, str]) -> Found:
    """The GPUs that CUDA_VISIBLE_DEVICES in *environ* leaves.

    A GPU that cannot be read is a fault and costs only itself. A library that is missing, does not match the driver
    or refuses to start is a fault too.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return Found(faults=[f"NVML does not start: {error}"])
    if count > _MAX_DEVICES:
        return Found(faults=[f"NVML says that there are {count} devices, which cannot be"])
    infos: list[AcceleratorInfo] = []
    faults: list[str] = []
    for index in range(count):
        try:
            infos.append(_device(index))
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            faults.append(f"device {index} cannot be used: {error}")
    variable = VISIBILITY_VARIABLES[AcceleratorType.NV_GPU]
    chosen, wrong = visible_devices(infos, environ.get(variable), variable)
    return Found(chosen, faults + wrong + _order_faults(infos, environ, variable))


def _device(index: int) -> AcceleratorInfo:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    bus = _optional(lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower(), "")
    # NVML pads the PCI domain to eight digits, the kernel to four.
    bus = bus[4:] if len(bus) == len("00000000:17:00.0") and bus.startswith("0000") else bus
    sensor = pynvml.NVML_TEMPERATURE_GPU
    return AcceleratorInfo(
        type=AcceleratorType.NV_GPU.value,
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        pci_bus=bus,
        memory_bytes=_optional(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0),
        numa_node=_numa_node(bus),
        utilization=_optional(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), -1),
        temperature=_optional(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, sensor)), -1),
    )


def _optional(read: Callable[[], _Value], unknown: _Value) -> _Value:
    """What *read* gives, *unknown* where this device or driver does not have it."""
    try:
        return read()
    except pynvml.NVMLError:
        return unknown


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _numa_node(bus: str) -> int:
    try:
        with open(f"/sys/bus/pci/devices/{bus}/numa_node") as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


def _order_faults(infos: list[AcceleratorInfo], environ: Mapping[str, str], variable: str) -> list[str]:
    """CUDA numbers the fastest device 0 unless told otherwise, NVML goes by bus: with mixed models they disagree."""
    listed = [entry.strip() for entry in environ.get(variable, "").split(",")]
    by_index = any(entry.isdigit() for entry in listed)
    if by_index and len({info.model for info in infos}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [
            f"{variable} lists indices on a node with different models, where CUDA's order is not the bus order "
            "used here; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or list UUIDs"
        ]
    return []
