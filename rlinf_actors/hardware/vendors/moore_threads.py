"""Moore Threads' GPUs, by ``mthreads-gmi``: which there are by ``-L``, how they are by ``-q``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf_actors.hardware.vendors.catalog import FoundAccelerators
from rlinf_actors.hardware.vendors.machine import Machine, Ran
from rlinf_actors.hardware.visible_devices import visible_devices
from rlinf_actors.model.accelerator_table import facts_of
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_KIND = AcceleratorType.MUSA_GPU
_LISTED = re.compile(r"GPU\s*(\d{1,4})\s*:\s*(\S.*?)\s*\(UUID:\s*([^)\s]+)\s*\)\s*")
_BUS = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)
_BLOCK = re.compile(r"GPU\s*(\d{1,4})?\s*:?\s*(\S+:\S+\.\d)?\s*")
_AMOUNT = re.compile(r"(\d{1,9})\s*(KiB|MiB|GiB|KB|MB|GB)", re.IGNORECASE)


@dataclass(frozen=True)
class State:
    """A device in ``mthreads-gmi -q``; "", 0 or -1 where it does not say."""

    uuid: str = ""
    model: str = ""
    pci_bus: str = ""
    memory_bytes: int = 0
    utilization: int = -1
    temperature: int = -1


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """The GPUs that MUSA_VISIBLE_DEVICES in *environ* leaves."""
    machine = Machine.of(environ)
    found = described(*machine.run_all([("mthreads-gmi", "-L"), ("mthreads-gmi", "-q")]))
    for info in found.infos:
        info.numa_node = machine.numa_node(info.pci_bus)
    variable = facts_of(_KIND).visibility_variable
    chosen, wrong = visible_devices(found.infos, environ.get(variable), variable)
    return FoundAccelerators(chosen, found.faults + wrong)


def described(listing: Ran, details: Ran) -> FoundAccelerators:
    """The GPUs, from what the tool printed. Pure."""
    listed, states = parse_list(listing.output), parse_details(details.output)
    faults: list[str] = []
    for ran, read in ((listing, bool(listed)), (details, bool(states))):
        if ran.fault or not read:
            fault = ran.fault or f"{ran.command} printed nothing that describes a GPU: {ran.output[:80]!r}"
            if fault not in faults:
                faults.append(fault)
    if not listed:
        listed = {index: (state.model, state.uuid) for index, state in enumerate(states)}
    by_uuid = {state.uuid: state for state in states if state.uuid}
    infos = []
    for position, (index, (model, uuid)) in enumerate(sorted(listed.items())):
        in_order = states[position] if len(states) == len(listed) and not by_uuid else State()
        state = by_uuid.get(uuid, in_order)
        infos.append(
            AcceleratorInfo(
                type=_KIND.value,
                model=model or state.model,
                index=index,
                uuid=uuid,
                pci_bus=state.pci_bus,
                memory_bytes=state.memory_bytes,
                utilization=state.utilization,
                temperature=state.temperature,
            )
        )
    return FoundAccelerators(infos, faults)


def parse_list(text: str) -> dict[int, tuple[str, str]]:
    """Index to model and UUID, of the GPUs in ``mthreads-gmi -L``. Pure."""
    matches = (_LISTED.fullmatch(line.strip()) for line in text.splitlines())
    return {int(match.group(1)): (match.group(2), match.group(3)) for match in matches if match}


def parse_details(text: str) -> list[State]:
    """The GPUs in ``mthreads-gmi -q``, in its order. Pure.

    ``name : value`` lines below a line per GPU, in sections that are told by their indentation.
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


def _state(block: Mapping[str, str]) -> State:
    bus = _BUS.fullmatch(block.get("bus id", ""))
    return State(
        uuid=_first(block, "gpu uuid", "uuid"),
        model=_first(block, "product name", "model"),
        pci_bus=bus.group(1).lower() if bus else "",
        memory_bytes=_bytes(_first(block, "fb memory usage/total", "memory usage/total", "memory/total")),
        utilization=_leading(_first(block, "utilization/gpu", "gpu utilization")),
        temperature=_leading(_first(block, "temperature/gpu current temp", "gpu current temp", "temperature/gpu")),
    )


def _first(block: Mapping[str, str], *names: str) -> str:
    return next((block[name] for name in names if block.get(name) not in (None, "", "N/A")), "")


def _leading(text: str) -> int:
    match = re.match(r"\d{1,4}", text)
    return int(match.group()) if match else -1


def _bytes(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    return int(match.group(1)) << {"k": 10, "m": 20, "g": 30}[match.group(2)[0].lower()] if match else 0
