"""What the head says of nodes, as the NodeInfo that placements and users work with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rlinf_actors.hardware.report import holds_accelerators
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareInfo, HardwareResource, is_accelerator_type
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.wire.values import HardwareReport, NodeState

_ACCELERATOR_FIELDS = {field.name for field in fields(AcceleratorInfo)} - {"type", "model"}


def node_info(state: NodeState) -> NodeInfo:
    """One node."""
    report = state.report
    return NodeInfo(
        node_labels=list(report.labels),
        node_rank=state.rank,
        ray_id=report.node_id,
        node_ip=report.ip,
        num_cpus=report.num_cpus,
        python_interpreter_path=report.interpreter,
        default_env_vars={},
        env_vars=dict(report.env_vars),
        hardware_resources=[
            HardwareResource(
                resource.type,
                [_hardware(info, holds_accelerators(resource)) for info in resource.infos],
                resource.registered_by,
            )
            for resource in report.resources
        ],
        profiler_backends=list(report.profilers),
        interfaces=dict(report.interfaces),
        interface=report.interface,
    )


def node_infos(states: Sequence[NodeState]) -> list[NodeInfo]:
    """Nodes that have a rank, by rank."""
    return [node_info(state) for state in sorted(states, key=lambda state: state.rank) if state.rank >= 0]


def _hardware(report: HardwareReport, accelerator: bool) -> HardwareInfo:
    if accelerator or is_accelerator_type(report.type):
        known = {name: value for name, value in report.detail.items() if name in _ACCELERATOR_FIELDS}
        return AcceleratorInfo(report.type, report.model, **known)  # type: ignore[arg-type]
    info = HardwareInfo(report.type, report.model)
    info.__dict__.update(report.detail)
    return info
