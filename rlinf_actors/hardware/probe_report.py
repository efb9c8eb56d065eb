"""ProbeReport, the result of a probe, and the conversion of HardwareResources to message values and back. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlinf_actors.model.hardware import (
    AcceleratorInfo,
    AcceleratorType,
    HardwareInfo,
    HardwareResource,
    is_accelerator_type,
)
from rlinf_actors.wire.values import HardwareReport, ResourceReport

_ACCELERATOR_FIELDS = {spec.name for spec in dataclasses.fields(AcceleratorInfo)} - {"type", "model"}


class ProbeReport(msgspec.Struct, frozen=True):
    """The hardware of a node, as the probe found it. agentd copies it to the message NodeReport."""

    hostname: str  # from the kernel
    num_cpus: int  # logical CPUs that this process may use
    memory_bytes: int  # physical memory
    python: str  # version of this interpreter, such as 3.11.7
    interpreter: str  # path of the interpreter that the probe used
    resources: list[ResourceReport] = msgspec.field(default_factory=list)  # one for each accelerator type
    interfaces: dict[str, str] = msgspec.field(default_factory=dict)  # each network interface to its first IPv4 address
    faults: list[str] = msgspec.field(default_factory=list)  # sentences; each begins with the accelerator type, if any
    extension_types: list[str] = msgspec.field(default_factory=list)  # hardware types that extensions registered


@dataclass
class ReportedInfo(HardwareInfo):
    """A piece of hardware that another process reported, whose class this process does not know.

    Attributes:
        detail: fields that the class adds to HardwareInfo, by name.
        reported_identity: the piece's ``identity`` in the process that knows the class.
    """

    detail: Mapping[str, Any] = field(default_factory=dict)
    reported_identity: str = ""

    @property
    def identity(self) -> str:
        return self.reported_identity


def resource_to_report(resource: HardwareResource) -> ResourceReport:
    """Convert *resource*, whose pieces are accelerators, to a value for messages."""
    infos = []
    for info in resource.infos:
        detail = {name: value for name, value in vars(info).items() if name not in ("type", "model")}
        infos.append(HardwareReport(info.type, info.model, detail))
    return ResourceReport(resource.type, infos, resource.registered_by)


def resource_from_report(report: ResourceReport) -> HardwareResource:
    """Return the HardwareResource in *report*: with AcceleratorInfos for accelerators, else with ReportedInfos."""
    infos: list[HardwareInfo] = []
    for info in report.infos:
        if holds_accelerators(report) or is_accelerator_type(info.type):
            # another package's class may have more fields
            known: dict[str, Any] = {name: info.detail[name] for name in _ACCELERATOR_FIELDS & info.detail.keys()}
            infos.append(AcceleratorInfo(info.type, info.model, **known))
        else:
            infos.append(ReportedInfo(info.type, info.model, dict(info.detail)))
    return HardwareResource(report.type, infos, report.registered_by)


def resources_from_reports(reports: Sequence[ResourceReport]) -> list[HardwareResource]:
    return [resource_from_report(report) for report in reports]


def holds_accelerators(report: ResourceReport) -> bool:
    """True if the pieces in *report* are accelerators, even if only the node that reported them knows their type."""
    return bool(report.registered_by) or is_accelerator_type(report.type)


def accelerator_type_of(resources: Sequence[ResourceReport]) -> str:
    """Return the first accelerator type in *resources*; NO_ACCEL if there is none."""
    found = (resource.type for resource in resources if holds_accelerators(resource))
    return next(found, AcceleratorType.NO_ACCEL.value)
