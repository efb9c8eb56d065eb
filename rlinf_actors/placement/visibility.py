"""Visibility variables that users set (CUDA_VISIBLE_DEVICES and the other vendors'), held against what is there. Pure.

In ``env_configs`` such a variable restricts its node group to the devices that it lists; in ``env_vars`` of ``launch``
it must say what the placement says. Values that contradict one another are errors that show both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.visibility import selected_devices, visible_devices
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE, device_variables
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement


class _Device(NamedTuple):
    """One accelerator of a node: its position there, and what a variable can call it."""

    position: int
    info: AcceleratorInfo


def restricted(env_vars: Mapping[str, str], node: NodeInfo, path: str) -> tuple[int, ...] | None:
    """The accelerators of a node that the variables of a node group leave, as positions on the node, in their order.

    Args:
        env_vars: what ``env_configs`` sets on the node.
        node: the node, with the accelerators that its own settings leave.
        path: config path of *env_vars*.

    Returns:
        None where no visibility variable is set: all of them.

    Raises:
        ConfigError: the value names a device that the node does not offer, one twice, or no device in a way that is
            understood; it is another vendor's; it would change what the numbers of the devices mean.
    """
    _check_numbering(env_vars, node, path)
    by_type = _by_type(node)
    left: list[int] = []
    found = False
    for variable in visibility_variables():
        if variable not in env_vars:
            continue
        kinds = [kind for kind in by_type if _shown_by(variable, kind)]
        devices = [device for kind in kinds for device in by_type.pop(kind)]
        found = found or bool(devices)
        left += _named(env_vars[variable], variable, devices, node, path)
    if not found:
        return None
    return (*left, *(device.position for devices in by_type.values() for device in devices))


def check_launch(env_vars: Mapping[str, str], placement: Placement, node: NodeInfo, group: NodeGroupInfo) -> None:
    """That the variables given to ``launch`` show a worker the devices that its placement gives it, in that order.

    Args:
        env_vars: what was given to ``launch``.
        placement: the worker's.
        node: its node.
        group: the node group of its resources.

    Raises:
        ConfigError: they show others, or would change what the numbers of the devices mean.
    """
    path = "launch(env_vars)"
    _check_numbering(env_vars, node, path)
    by_type = _by_type(node)
    for variable in visibility_variables():
        if variable not in env_vars:
            continue
        devices = [device for kind, found in by_type.items() if _shown_by(variable, kind) for device in found]
        names = node.accelerator_device_names
        given = [names[position] for position in _named(env_vars[variable], variable, devices, node, path)]
        shown = _shown_by(variable, placement.accelerator_type)
        own = [name for name in placement.visible_accelerators if shown]
        if given == own:
            continue
        configured = group.get_node_env_vars(node.node_rank).get(variable)
        also = f"; env_configs of that group has {variable}={configured}" if configured is not None else ""
        raise ConfigError(
            f"is {env_vars[variable]!r}, but worker {placement.rank} was placed on node {node.node_rank} in group "
            f"{group.label!r} with {variable}={','.join(own)!r}{also}; leave the variable out, and choose the devices "
            "by the placement, or by env_configs of a node group",
            path=f"{path}.{variable}",
        )


def visibility_variables() -> tuple[str, ...]:
    """Those of all vendors that this process knows."""
    names = (facts.visibility_variable for facts in ACCELERATOR_TABLE.values())
    return tuple(dict.fromkeys(name for name in names if name))


def _by_type(node: NodeInfo) -> dict[AcceleratorType, list[_Device]]:
    found: dict[AcceleratorType, list[_Device]] = {}
    for position, (info, name) in enumerate(zip(node.accelerators, node.accelerator_device_names, strict=True)):
        known = info if isinstance(info, AcceleratorInfo) else AcceleratorInfo(info.type, info.model)
        index = int(name) if name.isdigit() else known.index
        device = AcceleratorInfo(info.type, info.model, index, known.uuid, parent_uuid=known.parent_uuid)
        found.setdefault(node.accelerator_kinds[position], []).append(_Device(position, device))
    return found


def _shown_by(variable: str, kind: AcceleratorType) -> bool:
    facts = ACCELERATOR_TABLE.get(kind)
    return facts is not None and facts.visibility_variable == variable


def _named(value: str, variable: str, devices: Sequence[_Device], node: NodeInfo, path: str) -> list[int]:
    """Positions on *node* of the ones of *devices* that *value* shows."""
    infos = [device.info for device in devices]
    read = selected_devices if _shown_by(variable, AcceleratorType.INTEL_GPU) else visible_devices
    chosen, faults = read(infos, value, variable)
    if not faults:
        return [device.position for info in chosen for device in devices if device.info is info]
    has = ", ".join(
        f"{info.type} {name}" for info, name in zip(node.accelerators, node.accelerator_device_names, strict=True)
    )
    own = [f"{name}={node.env_vars[name]}" for name in sorted(device_variables()) if name in node.env_vars]
    raise ConfigError(
        f"does not fit node {node.node_rank}: {'; '.join(faults)}. That node offers {has or 'no accelerator'}; "
        f"its own settings: {', '.join(own) or 'none'}",
        path=f"{path}.{variable}",
    )


def _check_numbering(env_vars: Mapping[str, str], node: NodeInfo, path: str) -> None:
    """Nothing may change what a number means between the probe, which gave it, and the worker, which is shown it."""
    for kind in _by_type(node):
        facts = ACCELERATOR_TABLE.get(kind)
        if facts is None:
            continue
        for name in facts.renumbering:
            if name in env_vars and env_vars[name] != node.env_vars.get(name):
                raise ConfigError(
                    f"is {env_vars[name]!r}, which changes what the device numbers of node {node.node_rank} mean "
                    f"(there: {node.env_vars.get(name, 'not set')}); set it in that node's agentd, or use "
                    f"{facts.visibility_variable}",
                    path=f"{path}.{name}",
                )
        name, ours = facts.numbering
        value = env_vars.get(name, ours)
        models = sorted({info.model for info in node.accelerators_of_type(kind)})
        names = [
            n for n, found in zip(node.accelerator_device_names, node.accelerator_kinds, strict=True) if found == kind
        ]
        if value != ours and len(models) > 1 and names[0].isdigit():
            raise ConfigError(
                f"is {value!r}, but node {node.node_rank} has several models ({', '.join(models)}), and its devices "
                f"are numbered as {name}={ours} does; leave {name} out, and workers get that",
                path=f"{path}.{name}",
            )
