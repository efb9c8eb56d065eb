"""Find Ascend's NPUs with ``npu-smi``: ``info -m`` lists the chips, ``info`` their state.

The index of an NPU is its logic id, as in ASCEND_RT_VISIBLE_DEVICES. npu-smi prints no UUIDs, and that variable accepts
none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from rlinf_actors.hardware.vendors.catalog import FoundAccelerators, only_visible
from rlinf_actors.hardware.vendors.machine import Machine, Ran
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_KIND = AcceleratorType.NPU
_HEALTHY = ("OK", "NA", "")
_PAIR = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})")

Chip = tuple[int, int]
"""NPU id (of the card), and id of the chip on that card."""


class Mapped(msgspec.Struct, frozen=True):
    """A chip in the output of ``npu-smi info -m``: its logic id, which becomes AcceleratorInfo.index, and its name."""

    logic_id: int
    name: str


class ChipState(msgspec.Struct, frozen=True):
    """A chip in the output of ``npu-smi info``: its health and its properties.

    Its AcceleratorInfo has index 0, because this output has no logic ids.
    """

    health: str
    info: AcceleratorInfo


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the NPUs of this machine that ASCEND_RT_VISIBLE_DEVICES in *environ* does not hide."""
    mapping, table = Machine.of(environ).run_all([("npu-smi", "info", "-m"), ("npu-smi", "info")])
    return only_visible(described(mapping, table), _KIND, environ)


def described(mapping: Ran, table: Ran) -> FoundAccelerators:
    """Return the NPUs in the output of ``npu-smi info -m`` (*mapping*) and ``npu-smi info`` (*table*). Pure."""
    chips, states = parse_mapping(mapping.output), parse_table(table.output)
    nothing = "printed no table of NPUs"
    faults = list(dict.fromkeys([*mapping.faults(chips, nothing), *table.faults(states, nothing)]))
    if not chips and states:
        faults.append("the order of the NPUs is that of npu-smi info, since their logic ids are not known")
        chips = {chip: Mapped(index, state.info.model) for index, (chip, state) in enumerate(sorted(states.items()))}
    infos = []
    for chip, mapped in sorted(chips.items(), key=lambda entry: entry[1].logic_id):
        state = states.get(chip, ChipState("", AcceleratorInfo(_KIND.value, "")))
        if state.health.upper() not in _HEALTHY:
            faults.append(f"NPU {chip[0]}, chip {chip[1]} (logic id {mapped.logic_id}) has health {state.health}")
        infos.append(replace(state.info, model=mapped.name or state.info.model, index=mapped.logic_id))
    return FoundAccelerators(infos, faults)


def parse_mapping(text: str) -> dict[Chip, Mapped]:
    """Return the chips in the output of ``npu-smi info -m``, by NPU id and chip id. Pure.

    Chips without a logic id are left out, because they do not compute. Columns are found by their headings, because
    newer versions have one more column (Chip Phy-ID).
    """
    columns: list[str] = []
    found: dict[Chip, Mapped] = {}
    for line in text.splitlines():
        cells = re.split(r"\s{2,}|\t", line.strip())
        if {"NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"} <= set(cells):
            columns = cells
            continue
        row = dict(zip(columns, cells, strict=False))
        numbers = [_number(row.get(name, "")) for name in ("NPU ID", "Chip ID", "Chip Logic ID")]
        if len(cells) == len(columns) and min(numbers, default=-1) >= 0:
            found[numbers[0], numbers[1]] = Mapped(numbers[2], row["Chip Name"])
    return found


def parse_table(text: str) -> dict[Chip, ChipState]:
    """Return the chips in the output of ``npu-smi info``, by NPU id and chip id. Pure.

    A chip has two lines of three cells. First line: NPU and name; health; power and temperature. Second line: chip;
    bus; utilization and memory, with ``used / total`` in MB for memory and then for HBM if the chip has any. The table
    of processes below has four cells a line, so it is not read.
    """
    found: dict[Chip, ChipState] = {}
    first: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if len(cells) != 3:
            first = []
            continue
        if not first:
            first = cells if re.match(r"\d{1,6}\s+\D", cells[0]) else []
            continue
        upper, first = first, []
        npu, name = upper[0].split(None, 1)
        measures = upper[2].split()
        chip = _number((cells[0].split() or [""])[0])
        if chip < 0 or not re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]|NA", cells[1]):
            continue
        totals = [int(total) for _, total in _PAIR.findall(cells[2]) if int(total)]
        info = AcceleratorInfo(
            type=_KIND.value,
            model=name.split()[0],
            temperature=_number(measures[1]) if len(measures) > 1 else -1,
            pci_bus=cells[1].lower() if cells[1] != "NA" else "",
            utilization=_number((cells[2].split() or [""])[0]),
            memory_bytes=(totals[-1] if totals else 0) << 20,
        )
        found[int(npu), chip] = ChipState(upper[1], info)
    return found


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
