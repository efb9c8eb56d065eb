"""Find Kunlun's XPUs with Baidu's ``xpu_smi``, which newer drivers call ``xpu-smi``.

Intel's tool is called ``xpu-smi`` too. This module runs only on a machine with Kunlun's device files. It prefers
`xpu_smi`, and accepts the output of `xpu-smi` only if that is Kunlun's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlinf_actors.hardware.vendors.catalog import FoundAccelerators, only_visible
from rlinf_actors.hardware.vendors.machine import PCI_ADDRESS, Machine, Ran, leading_number
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType

_KIND = AcceleratorType.KUNLUN_XPU
_TOTAL_MB = re.compile(r"\d{1,9}\s*(?:MiB|MB)?\s*/\s*(\d{1,9})\s*(?:MiB|MB)", re.IGNORECASE)


def find(environ: Mapping[str, str]) -> FoundAccelerators:
    """Return the XPUs of this machine that CUDA_VISIBLE_DEVICES in *environ* does not hide."""
    machine = Machine.of(environ)
    return only_visible(described(machine.run("xpu_smi" if machine.tool("xpu_smi") else "xpu-smi")), _KIND, environ)


def described(ran: Ran) -> FoundAccelerators:
    """Return the XPUs that the output of ``xpu_smi`` lists. Pure."""
    if "Intel" in ran.output:
        return FoundAccelerators(faults=[f"{ran.command} is Intel's tool here; put Kunlun's xpu_smi on PATH"])
    infos = parse_devices(ran.output) or parse_boxes(ran.output)
    return FoundAccelerators(infos, ran.faults(infos, "printed no table of XPUs"))


def parse_devices(text: str) -> list[AcceleratorInfo]:
    """Return the XPUs in the table DEVICES that older versions of ``xpu_smi`` print. Pure."""
    columns: list[str] = []
    found: dict[int, AcceleratorInfo] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "DevID" in cells:
            columns = cells if "PCI Addr" in cells else []  # other tables follow (VIDEO, PROCESSES)
            continue
        row = dict(zip(columns, cells, strict=False))
        index, bus = row.get("DevID", ""), PCI_ADDRESS.fullmatch(row.get("PCI Addr", ""))
        if len(cells) != len(columns) or not bus or not re.fullmatch(r"[0-9]{1,4}", index):
            continue
        found[int(index)] = AcceleratorInfo(
            type=_KIND.value,
            model=row.get("Model", ""),
            index=int(index),
            uuid=row.get("SN", ""),
            pci_bus=bus.group(1).lower(),
            memory_bytes=_memory_bytes(row.get("Memory", "")),
            utilization=leading_number(row.get("UseRate", "")),
            temperature=leading_number(row.get("Temp", "")),
        )
    return [info for _, info in sorted(found.items())]


def parse_boxes(text: str) -> list[AcceleratorInfo]:
    """Return the XPUs in the output of newer versions of ``xpu_smi``: a box for each XPU, as nvidia-smi prints. Pure.

    A box has two lines of three cells. The first line has index, model and bus; the second line has temperature, memory
    (after the L3 cache) and utilization.
    """
    found: dict[int, AcceleratorInfo] = {}
    last: AcceleratorInfo | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        first = re.match(r"(\d{1,4})\s+(\S.*?)(?:\s{2,}.*|\s+(?:On|Off|N/A))?$", cells[0]) if len(cells) == 3 else None
        bus = PCI_ADDRESS.match(cells[1]) if first else None
        if first and bus:
            last = found[int(first.group(1))] = AcceleratorInfo(
                type=_KIND.value, model=first.group(2), index=int(first.group(1)), pci_bus=bus.group(1).lower()
            )
        elif last is not None and len(cells) == 3:
            celsius, percent = re.search(r"\b(\d{1,3})C\b", cells[0]), re.search(r"(\d{1,3})%", cells[2])
            last.memory_bytes = _memory_bytes(line)
            last.temperature = int(celsius.group(1)) if celsius else -1
            last.utilization = int(percent.group(1)) if percent else -1
            last = None
        else:
            last = None
    return [info for _, info in sorted(found.items())]


def _memory_bytes(text: str) -> int:
    totals = _TOTAL_MB.findall(text)  # not "86W / 400W", the power, which may stand in a cell of its own
    return int(totals[-1]) << 20 if totals else 0
