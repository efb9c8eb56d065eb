"""ProbeReport, the result of a probe, and the conversion of HardwareResources to message values and back. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors.model.hardware import (
    AcceleratorInfo,
    AcceleratorType,
    HardwareInfo,
    HardwareResource,
    is_accelerator_type,
)
from rlinf_actors.wire.values import HardwareReport, ResourceReport

_ACCELERATOR_FIELDS = {spec.name: spec for spec in dataclasses.fields(AcceleratorInfo)}


@dataclass(frozen=True)
class ProbeReport:
    """The hardware of a node, as the probe found it. agentd copies it to the message NodeReport."""

    hostname: str  # from the kernel
    num_cpus: int  # logical CPUs that this process may use
    memory_bytes: int  # physical memory
    python: str  # version of this interpreter, such as 3.11.7
    interpreter: str  # path of the interpreter that the probe used
    resources: list[ResourceReport] = field(default_factory=list)  # one for each accelerator type
    interfaces: dict[str, str] = field(default_factory=dict)  # each network interface to its first IPv4 address
    faults: list[str] = field(default_factory=list)  # sentences; each begins with the accelerator type, if any
    extension_types: list[str] = field(default_factory=list)  # hardware types that extensions registered


@dataclass
class ReportedInfo(HardwareInfo):
    """A piece of hardware that another process reported, whose class this process does not know.

    Attributes:
        detail: fields that the class adds to HardwareInfo, by name.
        reported_identity: the piece's ``identity`` in the process that knows the class.
        reported_keys: the piece's ``claim_keys`` in that process.
    """

    detail: Mapping[str, Any] = field(default_factory=dict)
    reported_identity: str = ""
    reported_keys: Sequence[str] = ()

    @property
    def identity(self) -> str:
        return self.reported_identity

    @property
    def claim_keys(self) -> list[str]:
        return list(self.reported_keys)


def resource_to_report(resource: HardwareResource) -> ResourceReport:
    """Return *resource* as a value for messages. A field that is not a plain value becomes text."""
    return ResourceReport(resource.type, [_info_to_report(info) for info in resource.infos], resource.registered_by)


def resource_from_report(report: ResourceReport) -> HardwareResource:
    """Return the resource in *report*: AcceleratorInfos for accelerators, ReportedInfos for everything else."""
    known = holds_accelerators(report)
    return HardwareResource(
        report.type, [_info_from_report(info, known) for info in report.infos], report.registered_by
    )


def resources_from_reports(reports: Sequence[ResourceReport]) -> list[HardwareResource]:
    return [resource_from_report(report) for report in reports]


def holds_accelerators(report: ResourceReport) -> bool:
    """True if the pieces are accelerators, even if only the node that reported them knows their type."""
    return bool(report.registered_by) or is_accelerator_type(report.type)


def accelerator_type_of(resources: Sequence[ResourceReport]) -> str:
    """Return the first accelerator type in *resources*; NO_ACCEL if there is none."""
    found = (resource.type for resource in resources if holds_accelerators(resource))
    return next(found, AcceleratorType.NO_ACCEL.value)


def _info_to_report(info: HardwareInfo) -> HardwareReport:
    if isinstance(info, ReportedInfo):
        values = dict(info.detail)
    else:
        values = {spec.name: getattr(info, spec.name) for spec in dataclasses.fields(info)[2:]}
    return HardwareReport(str(info.type), info.model, {name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value)


def _info_from_report(report: HardwareReport, accelerator: bool) -> HardwareInfo:
    if not (accelerator or is_accelerator_type(report.type)):
        return ReportedInfo(report.type, report.model, dict(report.detail))
    # A newer agent may say more than this version knows.
    known = {name: value for name, value in report.detail.items() if name in _ACCELERATOR_FIELDS}
    return AcceleratorInfo(report.type, report.model, **known)  # type: ignore[arg-type]
