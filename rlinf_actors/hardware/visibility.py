"""Which of a node's devices its visibility variable leaves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_actors.model.hardware import AcceleratorInfo

_HIDE_THE_REST = ("-1", "NoDevFiles")
"""CUDA shows no device from such an entry on; that is how people hide all of them."""


def visible_devices(
    infos: Sequence[AcceleratorInfo], value: str | None, variable: str
) -> tuple[list[AcceleratorInfo], list[str]]:
    """The devices that *value* lists, in its order, and what is wrong with the list.

    Args:
        infos: all devices, each with the vendor's index and UUID.
        value: of the visibility variable: indices or UUIDs (also their first characters, as CUDA allows);
            None if it is not set: all are visible.
        variable: its name, for messages.
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
            what = "no device that can be read has" if not matching else f"{len(matching)} devices have"
            faults.append(f"{variable}={value} names {entry}, which {what}; devices: {_spell(infos)}")
        elif matching[0] in chosen:
            faults.append(f"{variable}={value} names device {matching[0].index} twice; it counts once")
        else:
            chosen.append(matching[0])
    return chosen, faults


def _matching(infos: Sequence[AcceleratorInfo], entry: str) -> list[AcceleratorInfo]:
    if entry.isascii() and entry.isdigit():
        return [info for info in infos if info.index == int(entry)]
    return [info for info in infos if info.uuid and info.uuid.startswith(entry)]


def _spell(infos: Sequence[AcceleratorInfo]) -> str:
    return ", ".join(f"{info.index} ({info.uuid})" if info.uuid else str(info.index) for info in infos) or "none"
