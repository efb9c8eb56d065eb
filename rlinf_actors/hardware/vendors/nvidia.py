"""NVIDIA's accelerators, by NVML. Imported only in the probe's child for this vendor: NVML may hang or crash it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pynvml

from rlinf_actors.hardware.vendors.catalog import FoundAccelerators, only_visible
from rlinf_actors.hardware.vendors.machine import Machine
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_MAX_DEVICES = 256
"""More than the kernel driver has minor numbers for; a larger count is a broken library."""
_MAX_SLICES = 64
"""Of one GPU; today's have seven."""

_Value = TypeVar("_Value")


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the GPUs that CUDA_VISIBLE_DEVICES in *environ* leaves; the slices of a GPU in MIG mode stand in its
    place.

    An unreadable GPU is a fault and loses only itself. A library that is missing, does not match the driver or refuses
    to start is a fault too.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return FoundAccelerators(faults=[f"NVML does not start: {error}"])
    if count > _MAX_DEVICES:
        return FoundAccelerators(faults=[f"NVML says that there are {count} devices, which cannot be"])
    machine = Machine.of(environ)
    infos: list[AcceleratorInfo] = []
    faults: list[str] = []
    for index in range(count):
        try:
            infos += _devices(index, machine, faults)
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            faults.append(f"device {index} cannot be used: {error}")
    found = only_visible(FoundAccelerators(infos, faults), AcceleratorType.NV_GPU, environ)
    found.faults.extend(_order_faults(infos, environ))
    return found


def _devices(index: int, machine: Machine, faults: list[str]) -> list[AcceleratorInfo]:
    """Return the GPU, or its slices if it is in MIG mode (none without any: such a GPU runs nothing)."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    whole = _device(index, handle, machine)
    if not _optional(lambda: int(pynvml.nvmlDeviceGetMigMode(handle)[0]), 0):
        return [whole]
    slices: list[AcceleratorInfo] = []
    for number in range(min(int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)), _MAX_SLICES)):
        try:
            slices.append(_slice(whole, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
        except pynvml.NVMLError_NotFound:
            continue  # numbers of slices that were not made
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            faults.append(f"MIG slice {number} of device {index} cannot be used: {error}")
    if not slices:
        faults.append(
            f"device {index} is in MIG mode and has no slice: make some (nvidia-smi mig -cgi), or leave the mode"
        )
    return slices


def _slice(whole: AcceleratorInfo, handle: Any) -> AcceleratorInfo:
    return replace(
        whole,
        model=_optional(lambda: _text(pynvml.nvmlDeviceGetName(handle)), f"{whole.model} MIG"),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=_optional(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), 0),
        utilization=-1,  # NVML has it for whole devices that are not in MIG mode
        parent_uuid=whole.uuid,
    )


def _device(index: int, handle: Any, machine: Machine) -> AcceleratorInfo:
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
        numa_node=machine.numa_node(bus),
        utilization=_optional(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), -1),
        temperature=_optional(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, sensor)), -1),
    )


def _optional(read: Callable[[], _Value], unknown: _Value) -> _Value:
    """Return the value that *read* returns, *unknown* if this device or driver lacks it."""
    try:
        return read()
    except pynvml.NVMLError:
        return unknown


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _order_faults(infos: list[AcceleratorInfo], environ: Mapping[str, str]) -> list[str]:
    """Report mixed models addressed by index: CUDA numbers the fastest device 0 by default, NVML goes by bus."""
    variable = "CUDA_VISIBLE_DEVICES"
    listed = [entry.strip() for entry in environ.get(variable, "").split(",")]
    by_index = any(entry.isdigit() for entry in listed)
    models = {info.model for info in infos if not info.parent_uuid}
    if by_index and len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [
            f"{variable} lists indices on a node with different models, where CUDA's order is not the bus order "
            "used here; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or list UUIDs"
        ]
    return []
