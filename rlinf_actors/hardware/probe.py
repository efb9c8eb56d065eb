"""The hardware probe: find the accelerators of this node. ``python -m rlinf_actors.hardware.probe`` prints them (JSON).

agentd runs the probe before it registers; `hw scan` and `doctor` run it too. The probe starts a child process for each
vendor whose device files or library exist, and for each extension (RLINF_EXT_MODULE, entry points). The children run
side by side. An extension may register further vendors; each of these gets a child after that. If a child hangs,
crashes or prints nonsense, the report has a fault and lacks only the devices of that child. Without accelerators and
extensions no process is started.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from rlinf_actors.compat import TaskGroup
from rlinf_actors.hardware.child_process import ChildEnd, fault_of, run_child
from rlinf_actors.hardware.extensions import installed, title_of
from rlinf_actors.hardware.interfaces import ipv4_interfaces
from rlinf_actors.hardware.probe_child import EXTENSION
from rlinf_actors.hardware.probe_report import ProbeReport, resource_to_report
from rlinf_actors.hardware.vendors.catalog import VENDORS, vendor_of
from rlinf_actors.hardware.vendors.machine import LONGER, PROBE_TIMEOUT_S, Machine
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareResource
from rlinf_actors.settings import EXT_MODULE, PROBE_LIMIT
from rlinf_actors.wire.values import Extension

_CHILD = "rlinf_actors.hardware.probe_child"


class ChildReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The report of one child process of the probe, which queried one vendor or loaded one extension."""

    infos: list[AcceleratorInfo] = []
    faults: list[str] = []  # a sentence for each thing that could not be read
    types: list[str] = []  # hardware types that the extension registered
    vendors: dict[str, str] = {}  # accelerator types that it registered and that may be present, to their module
    held: list[tuple[int, int, int]] = []  # accelerators' memory by process: index of the device, pid, bytes


async def run_probe(
    python: str | None = None, timeout_s: float = PROBE_TIMEOUT_S, env: Mapping[str, str] | None = None
) -> ProbeReport:
    """Return the hardware of this node.

    If a vendor's library or an extension fails, no exception is raised; the report has a fault instead. Call this from
    the main thread, because the children are killed when the thread that started them ends. They are also killed if
    this call is cancelled.

    Args:
        python: interpreter of the children, this one by default. It needs nvidia-ml-py for NVIDIA.
        timeout_s: seconds until children that still run are killed. This function returns at most about a second later.
        env: environment of the children, os.environ by default. Accelerators that its visibility variables hide are not
            reported.
    """
    environ = dict(os.environ if env is None else env)
    machine = Machine(environ)
    children: list[tuple[str, Extension | None]] = [
        (vendor.kind.value, None) for vendor in VENDORS if vendor.may_be_present(environ, machine)
    ]
    module = environ.get(EXT_MODULE)
    extensions = [*([Extension(module, EXT_MODULE)] if module else []), *installed()]
    children += [(EXTENSION, extension) for extension in extensions]
    interpreter = python or sys.executable
    queries = _Queries(interpreter, environ, asyncio.get_running_loop().time() + timeout_s, timeout_s)
    async with TaskGroup() as tasks:
        started = [
            tasks.create_task(queries.query(name, extension), name=f"probe {extension.name if extension else name}")
            for name, extension in children
        ]
    answers = [answer for task in started for answer in task.result()]
    return ProbeReport(
        hostname=os.uname().nodename,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=sys.version.split()[0],
        interpreter=interpreter,
        resources=[
            resource_to_report(HardwareResource(answer.name, answer.report.infos, answer.module))
            for answer in answers
            if answer.report.infos
        ],
        interfaces=ipv4_interfaces(),
        faults=[
            fault if answer.name == EXTENSION else f"{answer.name}: {fault}"
            for answer in answers
            for fault in answer.report.faults
        ],
        extension_types=[name for answer in answers for name in answer.report.types],
    )


class _Answer(msgspec.Struct, frozen=True):
    name: str  # an accelerator type, or EXTENSION
    report: ChildReport
    module: str = ""  # the module that registered the type, "" for a built-in type


class _Queries(msgspec.Struct, frozen=True):
    """Starts the child processes of one probe, and reads the report of each."""

    python: str  # interpreter of the children
    environ: Mapping[str, str]  # environment of the children
    ends: float  # deadline, in seconds of the event loop's clock
    timeout_s: float  # seconds from the start of the probe to the deadline, for messages
    registered: set[str] = msgspec.field(default_factory=set)  # types of extensions that have a child

    async def query(self, name: str, extension: Extension | None = None, module: str = "") -> list[_Answer]:
        """Query vendor *name*, or load *extension*, in a child process, and return the child's answer.

        If the extension registers vendors, another child queries each of them, and their answers are returned too.
        *module* is the module that registered the vendor; "" for a built-in vendor.
        """
        left_s = max(0.1, self.ends - asyncio.get_running_loop().time())
        arguments = [name, *([msgspec.json.encode(extension).decode()] if extension else [])]
        env = {**self.environ, PROBE_LIMIT: f"{left_s:.3f}"}
        end = await run_child(_CHILD, arguments, python=self.python, env=env, timeout_s=left_s)
        report = read_answer(end, name, self.timeout_s, _title(extension))
        # two extensions of one package may register the same type: only the first one queries it
        vendors = {kind: owner for kind, owner in report.vendors.items() if kind not in self.registered}
        self.registered.update(vendors)
        async with TaskGroup() as tasks:
            started = [
                tasks.create_task(self.query(kind, extension, owner), name=f"probe {kind}")
                for kind, owner in vendors.items()
            ]
        return [_Answer(name, report, module), *(answer for task in started for answer in task.result())]


def _title(extension: Extension | None) -> str:
    if extension is None:
        return ""
    return f"{EXT_MODULE}: its module" if extension.group == EXT_MODULE else title_of(extension)


def read_answer(end: ChildEnd, name: str, timeout_s: float, extension: str = "") -> ChildReport:
    """Return the report of a child, or a report with one fault if the child failed or its report is not valid.

    *name* is the accelerator type that the child queried, or "extension"; *extension* is the title of the extension
    that it loaded, "" if it loaded none.
    """
    whose = extension if name == EXTENSION else "the vendor's library"
    fault = fault_of(end, whose, timeout_s)
    if fault:
        vendor = vendor_of(name)
        hint = f"; {vendor.hint}" if vendor is not None and vendor.hint else ""
        return ChildReport(faults=[f"{fault}; it was killed. {LONGER}{hint}" if end.hung else fault])
    try:
        report = msgspec.json.decode(end.output, type=ChildReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return ChildReport(faults=[f"{whose} left no readable report ({error}): {end.output[:80]!r}"])
    if any(info.type != name for info in report.infos):
        return ChildReport(faults=[f"{whose} reported devices of another type: {report.infos[0].type}"])
    numbers = (value for info in report.infos for value in vars(info).values() if isinstance(value, int))
    if any(value >> 63 not in (0, -1) for value in numbers):
        return ChildReport(faults=[f"{whose} reported a number of more than 64 bits"])
    return report


def main() -> None:
    report: Any = asyncio.run(run_probe())
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
