"""Environment variables that a worker gets from its placement: ranks, devices, network, node group's variables. Pure.

The driver calls `worker_environment` for each worker of a launch, after `check_launch`. The driver adds MASTER_ADDR and
MASTER_PORT when rank 0 runs; agentd merges the result with the node's own environment (model.placement.merge_paths).

Users may set the vendors' visibility variables, such as CUDA_VISIBLE_DEVICES; they are checked here against the nodes'
devices. In ``env_configs`` such a variable restricts its node group to the devices that it lists; in ``env_vars`` of
``launch`` it must agree with the placement. If two values contradict each other, the error shows both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.visibility import selected_devices, visible_devices
from rlinf_actors.model.accelerator_table import (
    ACCELERATOR_TABLE,
    ALWAYS_NIC_VARIABLES,
    EGL_DEVICE_VARIABLES,
    device_variables,
    facts_of,
    renders_with_egl,
)
from rlinf_actors.model.hardware import AcceleratorInfo, AcceleratorType
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.settings import COMM_NET_DEVICES, NAMESPACE


class GroupLayout(msgspec.Struct, frozen=True):
    """How many workers of a group each node has, and each worker's rank on its node; computed once for a group."""

    node_local_ranks: tuple[int, ...]  # for each worker, by rank, the number of workers with lower ranks on its node
    on_node: Mapping[int, int]  # number of the group's workers on each node, by cluster node rank

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> GroupLayout:
        passed: Counter[int] = Counter()
        ranks: list[int] = []
        for placement in placements:
            ranks.append(passed[placement.cluster_node_rank])
            passed[placement.cluster_node_rank] += 1
        return cls(tuple(ranks), dict(passed))


def worker_environment(
    group_name: str,
    placement: Placement,
    placements: Sequence[Placement] | GroupLayout,
    node: NodeInfo,
    node_group: NodeGroupInfo,
    namespace: str,
    *,
    comm_net_devices: str | None = None,
    launch_env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables that a worker gets from its placement and its node group.

    Variables from the placement override those of the configuration, because a worker cannot work with another worker's
    rank. Raises ConfigError if this process does not know the placement's type of accelerator.

    Args:
        group_name: name of the worker's group.
        placement: the worker's placement.
        placements: the placements of the whole group in rank order, or their GroupLayout.
        node: the worker's node.
        node_group: the node group to which the worker's resources belong.
        namespace: namespace of the job.
        comm_net_devices: the driver's RLINF_COMM_NET_DEVICES: network interfaces for collectives. The same variable of
            the launch, the configuration or the node takes precedence, in that order. If none is set, the interface of
            the node's address is used. Vendors' interface variables that are already set are not changed.
        launch_env: variables given to this launch. They count as set, but are not in the result: the caller adds them,
            and they override it.
    """
    layout = placements if isinstance(placements, GroupLayout) else GroupLayout.of(placements)
    configured = node_group.get_node_env_vars(placement.cluster_node_rank)
    present = {**node.default_env_vars, **node.env_vars, **configured, **(launch_env or {})}
    devices = present.get(COMM_NET_DEVICES) or comm_net_devices or node.interface
    return {
        **(_network(node, devices, present) if devices else {}),
        **_numbering(node, present),
        **_defaults(placement, node, present),
        **configured,
        **_ranks(group_name, placement, layout, node),
        **_devices(placement, node),
        "NODE_GROUP_LABEL": placement.node_group_label,
        NAMESPACE: namespace,
    }


def model_seen(placement: Placement, node: NodeInfo) -> str:
    """Return the model of the first accelerator that the worker has, else of the first that it sees.

    Return "" if the worker sees no accelerator.
    """
    if placement.accelerator_type is AcceleratorType.NO_ACCEL or not placement.visible_accelerators:
        return ""
    if placement.local_accelerator_rank >= 0:
        return node.accelerators[placement.local_accelerator_rank].model
    named = zip(node.accelerator_kinds, node.accelerator_device_names, strict=True)
    first = (placement.accelerator_type, placement.visible_accelerators[0])
    return node.accelerators[list(named).index(first)].model


def _ranks(group_name: str, placement: Placement, layout: GroupLayout, node: NodeInfo) -> dict[str, str]:
    alone = placement.local_accelerator_rank >= 0 and placement.isolate_accelerator
    on_node = layout.on_node[placement.cluster_node_rank]
    return {
        "GROUP_NAME": group_name,
        "WORKER_NAME": f"{group_name}:{placement.rank}",
        "WORLD_SIZE": str(len(layout.node_local_ranks)),
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(_local_rank(placement, layout, node)),
        "LOCAL_WORLD_SIZE": str(1 if alone else on_node),
        "NODE_RANK": str(placement.placement_node_rank),
        "CLUSTER_NODE_RANK": str(placement.cluster_node_rank),
        "NODE_LOCAL_RANK": str(layout.node_local_ranks[placement.rank]),
        "NODE_LOCAL_WORLD_SIZE": str(on_node),
    }


def _local_rank(placement: Placement, layout: GroupLayout, node: NodeInfo) -> int:
    """Return LOCAL_RANK, by which programs choose their device: the worker's first accelerator among those it sees.

    It is 0 for a worker that sees only its own accelerators. A worker without accelerators gets its index on the node.
    """
    first = placement.local_accelerator_rank
    if first < 0:
        return layout.node_local_ranks[placement.rank]
    if placement.isolate_accelerator:
        return 0
    return placement.visible_accelerators.index(node.accelerator_device_names[first])


def _devices(placement: Placement, node: NodeInfo) -> dict[str, str]:
    kind = placement.accelerator_type
    found = {
        "LOCAL_ACCELERATOR_RANK": str(placement.local_accelerator_rank),
        "VISIBLE_DEVICES": ",".join(placement.visible_accelerators),
        "ACCELERATOR_TYPE": kind.value,
        "ACCELERATOR_MODEL": model_seen(placement, node),
        "ISOLATE_ACCELERATOR": "1" if placement.isolate_accelerator else "0",
        "LOCAL_HARDWARE_RANKS": ",".join(map(str, placement.local_hardware_ranks)),
    }
    if placement.local_accelerator_rank >= 0:
        facts_of(kind, node.accelerator_registered_by)
    if placement.isolate_accelerator or kind is AcceleratorType.NO_ACCEL:
        # All of the node's types: a worker that counts as CPU-only, or has another vendor's, must not see them.
        for other in node.accelerator_types:
            found |= _shown(other, [])
    return found | _shown(kind, placement.visible_accelerators)


def _shown(kind: AcceleratorType, devices: Sequence[str]) -> dict[str, str]:
    facts = ACCELERATOR_TABLE.get(kind)
    if facts is None or not facts.visibility_variable:
        return {}
    return {facts.visibility_variable: facts.visibility_value(devices)}


def _numbering(node: NodeInfo, present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make the vendors' runtimes number devices as the probe does.

    *present* has the variables that are set already. They are overridden only if the node has several models of a type,
    because only then does the numbering matter.
    """
    found: dict[str, str] = {}
    for kind in node.accelerator_types:
        facts = ACCELERATOR_TABLE.get(kind)
        if facts is None or not facts.numbering[0]:
            continue
        mixed = len({info.model for info in node.accelerators_of_type(kind)}) > 1  # else every order is as good
        if mixed or facts.numbering[0] not in present:
            found.update([facts.numbering])
    return found


def _defaults(placement: Placement, node: NodeInfo, present: Mapping[str, str]) -> dict[str, str]:
    """Return variables that workers on the placement's type of accelerator get unless *present* has them."""
    facts = ACCELERATOR_TABLE.get(placement.accelerator_type)
    if facts is None:
        return {}
    found = dict(facts.variables)
    if facts.renders and placement.visible_accelerators and renders_with_egl(present):
        device = _first_seen(placement, node)
        if device:
            found.update(dict.fromkeys(EGL_DEVICE_VARIABLES, device))
    return {name: value for name, value in found.items() if name not in present}


def _first_seen(placement: Placement, node: NodeInfo) -> str:
    """Return the EGL device of the worker's first accelerator; its own index if the node does not know it.

    Return "" if the accelerator is known by its UUID only.
    """
    name = placement.visible_accelerators[0]
    named = zip(node.accelerator_kinds, node.accelerator_device_names, node.accelerators, strict=True)
    info = next((info for kind, own, info in named if (kind, own) == (placement.accelerator_type, name)), None)
    if isinstance(info, AcceleratorInfo) and info.egl_index >= 0:
        return str(info.egl_index)
    return name if name.isdecimal() else ""


def _network(node: NodeInfo, devices: str, present: Mapping[str, str]) -> dict[str, str]:
    rows = [ACCELERATOR_TABLE[kind] for kind in node.accelerator_types if kind in ACCELERATOR_TABLE]
    names = (*ALWAYS_NIC_VARIABLES, *(facts.nic_variable for facts in rows))
    return {name: devices for name in names if name and name not in present}


class _Device(NamedTuple):
    position: int  # on the node
    info: AcceleratorInfo
    kind: AcceleratorType


def restricted(env_vars: Mapping[str, str], node: NodeInfo, path: str) -> tuple[int, ...] | None:
    """Return the positions on *node* of the accelerators that workers can use under a node group's variables.

    Args:
        env_vars: variables that ``env_configs`` sets on the node.
        node: the node, with the accelerators that agentd's own environment shows.
        path: config path of *env_vars*, for messages.

    Returns:
        First the accelerators that visibility variables in *env_vars* show, in the order of the variables, then those
        of types that no such variable concerns. None if no visibility variable in *env_vars* concerns an accelerator of
        the node.

    Raises:
        ConfigError: a variable names a device that the node does not offer, names one twice, cannot be read, belongs to
            another vendor, or would change the meaning of device numbers.
    """
    left: list[int] = []
    governed: set[int] = set()
    for _, devices, positions in _selected(env_vars, node, path):
        left += positions
        governed.update(device.position for device in devices)
    if not governed:
        return None
    return (*left, *(position for position in range(node.num_accelerators) if position not in governed))


def check_launch(env_vars: Mapping[str, str], placement: Placement, node: NodeInfo, group: NodeGroupInfo) -> None:
    """Raise ConfigError if the variables given to ``launch`` contradict a worker's placement.

    Visibility variables must show the devices of the placement in the same order. Other variables must not change the
    meaning of device numbers.
    """
    path = "launch(env_vars)"
    names = node.accelerator_device_names
    for variable, _, positions in _selected(env_vars, node, path):
        given = [names[position] for position in positions]
        own = placement.visible_accelerators if _shown_by(variable, placement.accelerator_type) else []
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


def _selected(env_vars: Mapping[str, str], node: NodeInfo, path: str) -> Iterator[tuple[str, list[_Device], list[int]]]:
    """Yield each visibility variable in *env_vars*, the devices that it concerns, and the positions that it shows.

    Raise ConfigError if the value of a variable does not fit the node.
    """
    _check_numbering(env_vars, node, path)
    devices = []
    for position, (info, name) in enumerate(zip(node.accelerators, node.accelerator_device_names, strict=True)):
        known = info if isinstance(info, AcceleratorInfo) else AcceleratorInfo(info.type, info.model)
        named = replace(known, index=int(name)) if name.isdigit() else known
        devices.append(_Device(position, named, node.accelerator_kinds[position]))
    for variable in dict.fromkeys(facts.visibility_variable for facts in ACCELERATOR_TABLE.values()):
        if variable and variable in env_vars:
            governed = [device for device in devices if _shown_by(variable, device.kind)]
            yield variable, governed, _named(env_vars[variable], variable, governed, node, path)


def _shown_by(variable: str, kind: AcceleratorType) -> bool:
    facts = ACCELERATOR_TABLE.get(kind)
    return facts is not None and facts.visibility_variable == variable


def _named(value: str, variable: str, devices: Sequence[_Device], node: NodeInfo, path: str) -> list[int]:
    """Return the positions on *node* of those *devices* that *value* of *variable* shows.

    Raise ConfigError if the value is wrong; *path* is the config path of the variables.
    """
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
    """Raise ConfigError if *env_vars* would make a worker number the node's devices in another way than the probe.

    *path* is the config path of *env_vars*.
    """
    for kind in node.accelerator_types:
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
        by_index = node.accelerator_device_names[node.accelerator_kinds.index(kind)].isdigit()
        if value != ours and len(models) > 1 and by_index:
            raise ConfigError(
                f"is {value!r}, but node {node.node_rank} has several models ({', '.join(models)}), and its devices "
                f"are numbered as {name}={ours} does; leave {name} out, and workers get that",
                path=f"{path}.{name}",
            )
