"""Find Intel's discrete GPUs with ``xpu-smi`` if it is installed, else in /sys.

Integrated graphics do not count as accelerators. They have PCI address 0000:00:02.0 in every Intel processor; a
discrete card is behind a bridge, and so on another bus.

Kunlun's tool has the same name. If the output of `xpu-smi` is not Intel's JSON, it is ignored and /sys is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlinf_actors.hardware.vendors.catalog import VENDORS, FoundAccelerators, only_visible
from rlinf_actors.hardware.vendors.machine import Machine
from rlinf_actors.hardware.visibility import selected_devices
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_KIND = AcceleratorType.INTEL_GPU
_ROW = next(vendor for vendor in VENDORS if vendor.kind is _KIND)
_MAX_DEVICES = 64


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the GPUs of this machine that ONEAPI_DEVICE_SELECTOR in *environ* selects.

    The index of a GPU is its number in Level Zero, as xpu-smi prints it. Without xpu-smi, GPUs are numbered in the
    order of their PCI addresses.
    """
    machine = Machine.of(environ)
    infos, faults = from_sysfs(machine), []
    if machine.tool("xpu-smi"):
        printed = machine.run("xpu-smi", "discovery", "-j")
        listed = parse_discovery(printed.output)
        if printed.fault or listed is None:
            others = "did not print Intel's list of devices (Kunlun's tool has the same name)"
            faults = [f"{fault}; /sys is read instead" for fault in printed.faults(listed is not None, others)]
        else:
            by_bus = {info.pci_bus: info for info in infos}  # has memory, NUMA node and temperature
            listed = [
                replace(by_bus.get(info.pci_bus, info), model=info.model, index=info.index, uuid=info.uuid)
                for info in listed
                if info.pci_bus not in _ROW.integrated
            ]
            infos = _measured(machine, listed, faults)
    return only_visible(FoundAccelerators(infos, faults), _KIND, environ, selected_devices)


def _measured(machine: Machine, infos: list[AcceleratorInfo], faults: list[str]) -> list[AcceleratorInfo]:
    asked = [("xpu-smi", "stats", "-d", str(info.index), "-j") for info in infos]
    lacking = [("xpu-smi", "discovery", "-d", str(info.index), "-j") for info in infos if not info.memory_bytes]
    ran = machine.run_all([*asked, *lacking])
    faults += [one.fault for one in ran if one.fault]
    sizes = iter(ran[len(asked) :])
    result = []
    for info, stats in zip(infos, ran, strict=False):  # the later entries of `ran` belong to `lacking`
        utilization, temperature = parse_stats(stats.output)
        memory = info.memory_bytes or parse_memory(next(sizes).output)
        celsius = temperature if temperature >= 0 else info.temperature
        result.append(replace(info, memory_bytes=memory, utilization=utilization, temperature=celsius))
    return result


# --- the kernel ---


def from_sysfs(machine: Machine) -> list[AcceleratorInfo]:
    """Return the discrete GPUs that the kernel lists: those on the PCI bus with a display driver (i915, xe)."""
    infos: list[AcceleratorInfo] = []
    for device in machine.pci_devices:
        if device.vendor != "0x8086" or not device.kind.startswith("0x03") or device.bus in _ROW.integrated:
            continue
        where = f"/sys/bus/pci/devices/{device.bus}"
        if not machine.glob(f"{where}/drm/card[0-9]*"):
            continue
        identity = machine.read(f"{where}/device") or "of unknown kind"
        infos.append(
            AcceleratorInfo(
                type=_KIND.value,
                model=f"Intel GPU {identity}",
                index=len(infos),
                pci_bus=device.bus,
                memory_bytes=_memory(machine, where),
                numa_node=machine.numa_node(device.bus),
                temperature=machine.hwmon_celsius(device.bus),
            )
        )
    return infos


def _memory(machine: Machine, where: str) -> int:
    whole = max((machine.number(path, 0) for path in machine.glob(f"{where}/drm/card*/lmem_total_bytes")), default=0)
    tiles = machine.glob(f"{where}/tile[0-9]*/physical_vram_size_bytes")  # i915 has the line above, xe this one
    return max(0, whole) or sum(max(0, machine.number(path, 0)) for path in tiles)


# --- xpu-smi ---


def parse_discovery(text: str) -> list[AcceleratorInfo] | None:
    """Return the GPUs in the output of ``xpu-smi discovery -j``; None for other text. Pure."""
    printed = _json(text)
    listed = printed.get("device_list")
    if not isinstance(listed, list):
        return None
    infos = []
    for entry in listed[:_MAX_DEVICES]:
        if not isinstance(entry, dict) or entry.get("device_id") not in range(_MAX_DEVICES):
            return None
        if entry.get("device_type", "GPU") != "GPU" or entry.get("device_function_type", "physical") == "virtual":
            continue
        infos.append(
            AcceleratorInfo(
                type=_KIND.value,
                model=str(entry.get("device_name", "")),
                index=int(entry["device_id"]),
                uuid=str(entry.get("uuid", "")),
                pci_bus=str(entry.get("pci_bdf_address", "")).lower(),
            )
        )
    return infos


def parse_memory(text: str) -> int:
    """Return the memory size in bytes from the output of ``xpu-smi discovery -d N -j``, 0 if unknown. Pure."""
    try:
        return max(0, int(_json(text).get("memory_physical_size_byte", 0)))
    except (TypeError, ValueError, OverflowError):
        return 0


def parse_stats(text: str) -> tuple[int, int]:
    """Return utilization (percent) and temperature (degrees Celsius) from ``xpu-smi stats -d N -j``. Pure.

    An unknown value is -1. If a device has several tiles, the values are those of the busiest and the hottest tile.
    """
    printed = _json(text)
    tiles = printed.get("tile_level")
    lists = [printed.get("device_level"), *(tile.get("data_list") for tile in _dicts(tiles))]
    found = {"XPUM_STATS_GPU_UTILIZATION": -1, "XPUM_STATS_GPU_CORE_TEMPERATURE": -1}
    for entry in (entry for one in lists for entry in _dicts(one)):
        name, value = entry.get("metrics_type"), entry.get("value")
        if isinstance(name, str) and name in found and isinstance(value, (int, float)) and 0 <= value < 1000:
            found[name] = max(found[name], int(value))
    return found["XPUM_STATS_GPU_UTILIZATION"], found["XPUM_STATS_GPU_CORE_TEMPERATURE"]


def _json(text: str) -> dict[str, Any]:
    try:
        printed = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return printed if isinstance(printed, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
