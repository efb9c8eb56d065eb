"""Find AMD's accelerators. The kernel's KFD topology lists them, in the order in which ROCm numbers them.

Their properties come from amdsmi if that Python package is installed, else from /sys, and from ``rocm-smi --json`` for
values that /sys lacks. ROCm uses integrated graphics in the KFD topology as accelerators, so this module does too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlinf_actors.hardware.vendors.catalog import FoundAccelerators
from rlinf_actors.hardware.vendors.machine import Machine
from rlinf_actors.hardware.visibility import visible_devices
from rlinf_actors.model.accelerator_table import facts_of
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"
_ROCM_SMI = (
    "rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--showuse", "--showtemp",
    "--json",
)  # fmt: skip
_BELOW, _OLDER_NAME = "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_BUS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


Properties = dict[str, Any]
"""Properties of one GPU that one source knows: fields of AcceleratorInfo by name."""


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the GPUs of this machine that ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES in *environ* do not hide.

    The index of a GPU is HIP's index, which counts only the devices that ROCR_VISIBLE_DEVICES does not hide.
    """
    machine = Machine.of(environ)
    infos = from_topology(machine)
    if not infos:
        return FoundAccelerators()  # the driver is there, and lists no GPU that this process may use
    faults: list[str] = []
    seen = {info.pci_bus: _from_sysfs(machine, info.pci_bus) for info in infos}
    sources = [seen, _from_amdsmi(faults)]  # the later ones take precedence
    if not sources[1] and not all({"model", "memory_bytes"} <= found.keys() for found in seen.values()):
        ran = machine.run(*_ROCM_SMI)
        printed = parse_rocm_smi(ran.output)
        wrong = ran.faults(printed, "printed nothing that describes a GPU")
        faults += [f"{fault}; what /sys does not say of the GPUs (their names) is unknown" for fault in wrong]
        sources = [printed, seen]
    described = []
    for info in infos:
        known = {name: value for source in sources for name, value in source.get(info.pci_bus, {}).items()}
        described.append(replace(info, **{**known, "uuid": info.uuid or known.get("uuid", "")}))
    chosen, wrong_lists = left(described, environ)
    return FoundAccelerators(chosen, faults + wrong_lists)


def left(infos: Sequence[AcceleratorInfo], environ: Mapping[str, str]) -> tuple[list[AcceleratorInfo], list[str]]:
    """Return the devices that ROCm's visibility variables do not hide, with HIP's indices, and a list of faults.

    A fault is a sentence about a wrong entry in a variable. ROCR_VISIBLE_DEVICES applies first, and HIP numbers the
    remaining devices. Then HIP_VISIBLE_DEVICES applies, or CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is not set or
    empty. Pure.
    """
    below, faults = visible_devices(infos, environ.get(_BELOW), _BELOW)
    counted = [replace(info, index=number) for number, info in enumerate(below)]
    variable = facts_of(AcceleratorType.AMD_GPU).visibility_variable
    name = variable if environ.get(variable) else _OLDER_NAME
    chosen, wrong = visible_devices(counted, environ.get(name), name)
    return chosen, faults + wrong


def _known(model: str, uuid: str, memory_bytes: int, utilization: int, temperature: int) -> Properties:
    texts = {"model": model, "uuid": uuid, "memory_bytes": max(0, memory_bytes)}
    numbers = {"utilization": utilization, "temperature": temperature}
    return {name: value for name, value in texts.items() if value} | {
        name: value for name, value in numbers.items() if value >= 0
    }


def measure(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return what `find` returns, with the memory in use."""
    machine, found = Machine.of(environ), find(environ)
    for info in found.infos:
        info.memory_used_bytes = machine.number(f"/sys/bus/pci/devices/{info.pci_bus}/mem_info_vram_used", -1)
    return found


# --- the kernel ---


def from_topology(machine: Machine) -> list[AcceleratorInfo]:
    """Return the GPUs that the kernel's KFD topology lists, in ROCm's order. Unreadable entries are skipped."""
    nodes = sorted(machine.glob(f"{_TOPOLOGY}/[0-9]*"), key=lambda path: int(path.rpartition("/")[2]))
    found = [parse_properties(machine.read(f"{path}/properties")) for path in nodes]
    gpus = [info for info in found if info is not None]
    return [replace(info, index=index, numa_node=machine.numa_node(info.pci_bus)) for index, info in enumerate(gpus)]


def parse_properties(text: str) -> AcceleratorInfo | None:
    """Return the GPU that the ``properties`` file of a KFD node describes; None for a CPU or other text. Pure."""
    values = dict(re.findall(r"^(\w+) (\d{1,20})$", text, re.MULTILINE))
    if not int(values.get("simd_count", "0")):
        return None
    place = int(values.get("location_id", "0"))
    version = int(values.get("gfx_target_version", "0"))
    unique = int(values.get("unique_id", "0"))
    return AcceleratorInfo(
        type=AcceleratorType.AMD_GPU.value,
        model=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else "AMD GPU",
        uuid=_uuid(unique),
        pci_bus=f"{int(values.get('domain', '0')):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}",
    )


def _from_sysfs(machine: Machine, bus: str) -> Properties:
    # amdgpu's attributes: Documentation/gpu/amdgpu/driver-misc.rst of the kernel
    device = f"/sys/bus/pci/devices/{bus}"
    try:
        unique = int(machine.read(f"{device}/unique_id") or "0", 16)
    except ValueError:
        unique = 0
    return _known(
        model=machine.read(f"{device}/product_name"),
        uuid=_uuid(unique),
        memory_bytes=machine.number(f"{device}/mem_info_vram_total", 0),
        utilization=machine.number(f"{device}/gpu_busy_percent", -1),
        temperature=machine.hwmon_celsius(bus),
    )


def _uuid(unique: int) -> str:
    return f"GPU-{unique:016x}" if unique else ""


# --- amdsmi ---


def _from_amdsmi(faults: list[str]) -> dict[str, Properties]:
    """Return the properties of GPUs that amdsmi reports, by PCI address; {} if amdsmi is not installed or fails.

    If amdsmi fails, a sentence about it is appended to *faults*.
    """
    try:
        smi = importlib.import_module("amdsmi")
    except ModuleNotFoundError:
        return {}
    except Exception as error:  # noqa: BLE001 - without its library, amdsmi raises OSError, KeyError and others
        faults.append(f"amdsmi cannot be imported ({type(error).__name__}: {error}); /sys and rocm-smi are asked")
        return {}
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
        return {_bus(smi.amdsmi_get_gpu_device_bdf(handle)): _by_amdsmi(smi, handle) for handle in handles}
    except Exception as error:  # noqa: BLE001 - its exceptions have no common base besides Exception
        faults.append(f"amdsmi does not answer ({type(error).__name__}: {error}); /sys and rocm-smi are asked")
        return {}


def _by_amdsmi(smi: Any, handle: Any) -> Properties:
    asic = _optional(lambda: smi.amdsmi_get_gpu_asic_info(handle), {})
    activity = _optional(lambda: smi.amdsmi_get_gpu_activity(handle), {})
    sensor = (smi.AmdSmiTemperatureType.EDGE, smi.AmdSmiTemperatureType.HOTSPOT)
    current = smi.AmdSmiTemperatureMetric.CURRENT
    measured = (_optional(partial(smi.amdsmi_get_temp_metric, handle, kind, current), -1) for kind in sensor)
    name = str(asic.get("market_name", ""))
    serial = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,16})", str(asic.get("asic_serial", "")))
    return _known(
        model="" if name == "N/A" else name,
        uuid=_uuid(int(serial.group(1), 16)) if serial else "",
        memory_bytes=_whole(
            _optional(lambda: smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM), 0), 0
        ),
        utilization=_whole(activity.get("gfx_activity"), -1),
        temperature=next((value for found in measured if (value := _whole(found, -1)) >= 0), -1),
    )


def _optional(read: Callable[[], Any], unknown: Any) -> Any:
    """Return the result of *read*; *unknown* if it raises, because this device or version of amdsmi lacks the value."""
    with contextlib.suppress(Exception):
        return read()
    return unknown


def _whole(value: Any, unknown: int) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return unknown


def _bus(text: str) -> str:
    bus = text.strip().lower()
    return bus if _BUS.fullmatch(bus) else ""


# --- rocm-smi ---


def parse_rocm_smi(text: str) -> dict[str, Properties]:
    """Return the properties of GPUs in the output of ``rocm-smi --json``, by PCI address; {} for other text. Pure."""
    start = text.find("{")  # warnings may precede it
    try:
        cards = json.loads(text[start:]) if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    found: dict[str, Properties] = {}
    for card in cards.values() if isinstance(cards, dict) else ():
        if not isinstance(card, dict):
            continue
        values = {str(name).lower(): str(value) for name, value in card.items()}  # its versions differ in case
        bus = _bus(values.get("pci bus", ""))
        if bus:
            found[bus] = _by_rocm_smi(values)
    return found


def _by_rocm_smi(values: Mapping[str, str]) -> Properties:
    names = (values.get(key, "") for key in ("card series", "device name", "card model"))
    unique = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", values.get("unique id", ""))
    temperatures = (values.get(f"temperature (sensor {sensor}) (c)") for sensor in ("edge", "junction"))
    return _known(
        model=next((name for name in names if name and name != "N/A" and not name.startswith("0x")), ""),
        uuid=_uuid(int(unique.group(1), 16)) if unique else "",
        memory_bytes=_whole(values.get("vram total memory (b)"), 0),
        utilization=_whole(values.get("gpu use (%)"), -1),
        temperature=next((value for text in temperatures if (value := _whole(text, -1)) >= 0), -1),
    )
