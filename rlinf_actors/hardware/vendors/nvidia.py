"""Find NVIDIA's accelerators with NVML. Imported only in a child process of the probe, since NVML may hang or crash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pynvml

from rlinf_actors.hardware import egl
from rlinf_actors.hardware.vendors.catalog import FoundAccelerators, only_visible
from rlinf_actors.hardware.vendors.machine import Machine
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_MAX_DEVICES = 256
"""The kernel driver has minor numbers for fewer devices. If NVML reports more, it is broken."""
_MAX_SLICES = 64
"""Largest number of MIG slices that are read from one GPU; today's GPUs have at most seven."""

_MAX_HOLDERS = 256
"""Most processes of one GPU that are read."""

_EGL_LIMIT_S = 3.0
"""Longest time for the query of EGL devices, which may load a vendor's library that hangs."""

_Value = TypeVar("_Value")


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the GPUs that CUDA_VISIBLE_DEVICES in *environ* does not hide. A GPU in MIG mode is replaced by its
    slices.

    A GPU that cannot be read is left out and becomes a fault. If NVML is missing, does not match the driver or does not
    start, the result is one fault.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return FoundAccelerators(faults=[f"NVML does not start: {error}"])
    if count > _MAX_DEVICES:
        return FoundAccelerators(faults=[f"NVML says that there are {count} devices, which cannot be"])
    infos: list[AcceleratorInfo] = []
    faults: list[str] = []
    for index in range(count):
        try:
            infos += _devices(index, faults)
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            faults.append(f"device {index} cannot be used: {error}")
    if infos:
        _add_egl_indices(infos, environ)
    found = only_visible(FoundAccelerators(infos, faults), AcceleratorType.NV_GPU, environ)
    found.faults.extend(_order_faults(infos, environ))
    return found


def measure(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the GPUs that `find` returns, with the memory in use, and without what takes long to find out."""
    pynvml.nvmlInit()
    infos: list[AcceleratorInfo] = []
    for index in range(min(pynvml.nvmlDeviceGetCount(), _MAX_DEVICES)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        used = _optional(lambda handle=handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), -1)  # type: ignore[misc]
        infos += [info if info.parent_uuid else replace(info, memory_used_bytes=used) for info in _devices(index, [])]
    return only_visible(FoundAccelerators(infos), AcceleratorType.NV_GPU, environ)


def holders() -> list[tuple[int, int, int]]:
    """Return the processes that hold memory of each GPU: its index, the pid, and the bytes (0 if unknown)."""
    pynvml.nvmlInit()
    found = []
    for index in range(min(pynvml.nvmlDeviceGetCount(), _MAX_DEVICES)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[:_MAX_HOLDERS]:
            found.append((index, int(one.pid), int(one.usedGpuMemory or 0)))
    return found


def _add_egl_indices(infos: list[AcceleratorInfo], environ: Mapping[str, str]) -> None:
    """Set the EGL device index of each GPU. It stays unknown on a node without EGL, which many nodes do not need."""
    # all devices, numbered as NVML does
    everything = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    machine = Machine({**everything, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, _EGL_LIMIT_S)
    known = egl.parse(machine.run(sys.executable, egl.__file__).output)
    for info in infos:
        if not info.parent_uuid:
            info.egl_index = known.get(info.index, -1)


def _devices(index: int, faults: list[str]) -> list[AcceleratorInfo]:
    """Return the GPU with index *index*, or its slices if it is in MIG mode, because nothing can run outside of slices.

    A sentence for each slice that cannot be read is appended to *faults*.
    """
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    whole = _device(index, handle)
    if not _optional(lambda: int(pynvml.nvmlDeviceGetMigMode(handle)[0]), 0):
        return [whole]
    slices: list[AcceleratorInfo] = []
    for number in range(min(int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)), _MAX_SLICES)):
        try:
            slices.append(_slice(whole, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
        except pynvml.NVMLError_NotFound:
            continue  # there is no slice with this number
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


def _device(index: int, handle: Any) -> AcceleratorInfo:
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
        utilization=_optional(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), -1),
        temperature=_optional(lambda: int(pynvml.nvmlDeviceGetTemperature(handle, sensor)), -1),
    )


def _optional(read: Callable[[], _Value], unknown: _Value) -> _Value:
    """Return the result of *read*; *unknown* if this device or driver does not have the value."""
    try:
        return read()
    except pynvml.NVMLError:
        return unknown


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _order_faults(infos: list[AcceleratorInfo], environ: Mapping[str, str]) -> list[str]:
    """Return a fault if the indices in CUDA_VISIBLE_DEVICES of *environ* may mean other devices than NVML's indices.

    That can happen on a node with different GPU models: by default CUDA gives the fastest GPU index 0, but NVML numbers
    GPUs by PCI bus.
    """
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
