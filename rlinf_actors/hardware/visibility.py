"""Apply visibility variables, such as CUDA_VISIBLE_DEVICES, to the accelerators of a node. Pure.

Vendors' modules and packages that add a vendor call this in the probe; placement.environment calls it in the driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlinf_actors.model.hardware import AcceleratorInfo

_HIDE_THE_REST = ("-1", "NoDevFiles")
"""CUDA hides the devices of such an entry and of all entries after it. Users hide all devices this way."""


def visible_devices(
    infos: Sequence[AcceleratorInfo], value: str | None, variable: str
) -> tuple[list[AcceleratorInfo], list[str]]:
    """Return the devices that a visibility variable shows, in the order of its list, and the faults of the list.

    Args:
        infos: all devices, each with the vendor's index and UUID.
        value: value of the variable: indices, UUIDs or the first characters of UUIDs, separated by commas. A MIG slice
            can be named by UUID only. None if the variable is not set: then all devices are visible.
        variable: name of the variable, for the faults.

    Returns:
        The visible devices, and a sentence for each entry that is wrong. A wrong entry shows no device.
    """
    if value is None:
        return list(infos), []
    chosen: list[AcceleratorInfo] = []
    faults: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry in _HIDE_THE_REST:
            break
        if not entry:
            continue
        matching = _matching(infos, entry)
        if len(matching) != 1:
            faults.append(f"{variable}={value} names {entry}, which {_what(infos, entry, matching)}")
        elif matching[0] in chosen:
            name = matching[0].uuid if matching[0].parent_uuid else matching[0].index
            faults.append(f"{variable}={value} names device {name} twice; it counts once")
        else:
            chosen.append(matching[0])
    return chosen, faults


def hides_all(value: str | None, hide_all: str) -> bool:
    """Return True if a visibility variable with this value shows no device, whichever devices there are.

    Args:
        value: value of the variable, None if it is not set.
        hide_all: the value by which the vendor's variable hides all devices.
    """
    if value is None:
        return False
    if hide_all and value.strip() == hide_all:
        return True
    if hide_all.startswith("!"):  # a selector, not a list
        return False
    first = next((part.strip() for part in value.split(",") if part.strip()), "")
    return not first or first in _HIDE_THE_REST


def _matching(infos: Sequence[AcceleratorInfo], entry: str) -> list[AcceleratorInfo]:
    if entry.isascii() and entry.isdigit():
        return [info for info in infos if info.index == int(entry) and not info.parent_uuid]
    return [info for info in infos if info.uuid and info.uuid.startswith(entry)]


def _what(infos: Sequence[AcceleratorInfo], entry: str, matching: Sequence[AcceleratorInfo]) -> str:
    if matching:
        return f"{len(matching)} devices have; devices: {_spell(infos)}"
    slices = [
        info.uuid
        for info in infos
        if info.parent_uuid and (entry == str(info.index) or info.parent_uuid.startswith(entry))
    ]
    if slices:
        return f"is a device in MIG mode; list its slices by UUID: {', '.join(slices)}"
    return f"no device that can be read has; devices: {_spell(infos)}"


def _spell(infos: Sequence[AcceleratorInfo]) -> str:
    return ", ".join(f"{info.index} ({info.uuid})" if info.uuid else str(info.index) for info in infos) or "none"


# --- SYCL's selector ---

_BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu")
_SEEN_BY = ("*", "level_zero")
"""Backends of terms that concern torch, which takes its xpu devices from Level Zero."""
_DEVICE = re.compile(r"\*|gpu|cpu|fpga|acc|[0-9]{1,4}")


def selected_devices(
    infos: Sequence[AcceleratorInfo], value: str | None, variable: str
) -> tuple[list[AcceleratorInfo], list[str]]:
    """Return the GPUs that a ONEAPI_DEVICE_SELECTOR shows, in the order of *infos*, and the faults of the selector.

    The selector has terms ``backend:devices``, separated by ``;``: ``level_zero:0,1``, ``level_zero:gpu``, ``*:gpu``,
    ``*:*``. A term that begins with ``!`` removes devices from the selected ones, or from all devices if every term
    begins with ``!``. Case does not matter. A term that is not understood shows no device and becomes a fault; parts of
    a device (``level_zero:0.1``) are not understood.

    Args:
        infos: all devices, each with its number in Level Zero as index.
        value: value of the variable. If it is None or empty, all devices are visible.
        variable: name of the variable, for the faults.

    Returns:
        The visible devices, and a sentence for each term that is wrong.
    """
    if not (value or "").strip():
        return list(infos), []
    accepted: set[int] = set()
    removed: set[int] = set()
    accepts = False
    faults: list[str] = []
    for term in filter(None, (part.strip() for part in str(value).split(";"))):
        takes_away = term.startswith("!")
        accepts = accepts or not takes_away
        indices, wrong = _term(infos, term.removeprefix("!"))
        (removed if takes_away else accepted).update(indices)
        faults += [f"{variable}={value} has {term}, {text}" for text in wrong]
    kept = (accepted if accepts else {info.index for info in infos}) - removed
    return [info for info in infos if info.index in kept], faults


def _term(infos: Sequence[AcceleratorInfo], term: str) -> tuple[set[int], list[str]]:
    backend, colon, devices = (part.strip().lower() for part in term.partition(":"))
    if not colon or backend not in _BACKENDS:
        return set(), [f"which is not BACKEND:DEVICES with a backend of {', '.join(_BACKENDS)}"]
    everything = {info.index for info in infos}
    chosen: set[int] = set()
    faults: list[str] = []
    for device in (part.strip() for part in devices.split(",")):
        if not _DEVICE.fullmatch(device):
            faults.append(f"where {device!r} is not understood: it may be a number, *, gpu, cpu or fpga")
        elif backend not in _SEEN_BY:
            continue
        elif device in ("*", "gpu"):
            chosen |= everything
        elif device.isdigit() and backend == "level_zero":
            if int(device) not in everything:
                faults.append(f"where no device that can be read has number {device}; devices: {_spell(infos)}")
            chosen |= {int(device)} & everything
        elif device.isdigit():
            faults.append("which numbers devices of several backends; write level_zero:NUMBER")
    return chosen, faults
