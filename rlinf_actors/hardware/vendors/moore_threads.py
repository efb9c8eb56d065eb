"""Find Moore Threads' GPUs with ``mthreads-gmi``: ``-L`` lists them, ``-q`` prints their state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from rlinf_actors.hardware.vendors.catalog import FoundAccelerators, only_visible
from rlinf_actors.hardware.vendors.machine import PCI_ADDRESS, Machine, Ran, leading_number
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_KIND = AcceleratorType.MUSA_GPU
_LISTED = re.compile(r"GPU\s*(\d{1,4})\s*:\s*(\S.*?)\s*\(UUID:\s*([^)\s]+)\s*\)\s*")
_BLOCK = re.compile(r"GPU\s*(\d{1,4})?\s*:?\s*(\S+:\S+\.\d)?\s*")
_AMOUNT = re.compile(r"(\d{1,9})\s*(KiB|MiB|GiB|KB|MB|GB)", re.IGNORECASE)


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the GPUs of this machine that MUSA_VISIBLE_DEVICES in *environ* does not hide."""
    listing, details = Machine.of(environ).run_all([("mthreads-gmi", "-L"), ("mthreads-gmi", "-q")])
    return only_visible(described(listing, details), _KIND, environ)


def described(listing: Ran, details: Ran) -> FoundAccelerators:
    """Return the GPUs in the output of ``mthreads-gmi -L`` (*listing*) and ``-q`` (*details*). Pure."""
    listed, states = parse_list(listing.output), parse_details(details.output)
    nothing = "printed nothing that describes a GPU"
    faults = list(dict.fromkeys([*listing.faults(listed, nothing), *details.faults(states, nothing)]))
    if not listed:
        listed = {index: (state.model, state.uuid) for index, state in enumerate(states)}
    by_uuid = {state.uuid: state for state in states if state.uuid}
    infos = []
    for position, (index, (model, uuid)) in enumerate(sorted(listed.items())):
        in_order = states[position] if len(states) == len(listed) and not by_uuid else AcceleratorInfo(_KIND.value, "")
        state = by_uuid.get(uuid, in_order)
        infos.append(replace(state, model=model or state.model, index=index, uuid=uuid))
    return FoundAccelerators(infos, faults)


def parse_list(text: str) -> dict[int, tuple[str, str]]:
    """Return model and UUID of each GPU in the output of ``mthreads-gmi -L``, by index. Pure."""
    matches = (_LISTED.fullmatch(line.strip()) for line in text.splitlines())
    return {int(match.group(1)): (match.group(2), match.group(3)) for match in matches if match}


def parse_details(text: str) -> list[AcceleratorInfo]:
    """Return the GPUs in the output of ``mthreads-gmi -q``, in the order of the output. Pure.

    Their indices are 0; `described` sets them.
    """
    blocks: list[dict[str, str]] = []
    section = ""
    for line in text.splitlines():
        name, colon, value = (part.strip() for part in line.partition(" : " if " : " in line else ":"))
        start = _BLOCK.fullmatch(line.strip())
        if start and line.strip() != "GPU":
            blocks.append({"bus id": start.group(2) or ""})
            section = ""
        elif line.strip() and blocks and not colon:
            section = line.strip().lower()
        elif blocks and colon:
            block, key = blocks[-1], name.lower()
            block.setdefault(f"{section}/{key}", value)
            if value or key not in block:
                block[key] = block.get(key) or value
    return [_state(block) for block in blocks]


def _state(block: Mapping[str, str]) -> AcceleratorInfo:
    bus = PCI_ADDRESS.fullmatch(block.get("bus id", ""))
    return AcceleratorInfo(
        type=_KIND.value,
        uuid=_first(block, "gpu uuid", "uuid"),
        model=_first(block, "product name", "model"),
        pci_bus=bus.group(1).lower() if bus else "",
        memory_bytes=_bytes(_first(block, "fb memory usage/total", "memory usage/total", "memory/total")),
        utilization=leading_number(_first(block, "utilization/gpu", "gpu utilization")),
        temperature=leading_number(
            _first(block, "temperature/gpu current temp", "gpu current temp", "temperature/gpu")
        ),
    )


def _first(block: Mapping[str, str], *names: str) -> str:
    return next((block[name] for name in names if block.get(name) not in (None, "", "N/A")), "")


def _bytes(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    return int(match.group(1)) << {"k": 10, "m": 20, "g": 30}[match.group(2)[0].lower()] if match else 0
