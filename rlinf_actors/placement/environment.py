"""The environment that a worker's place gives it: ranks, devices, network, and its group's variables.

MASTER_ADDR and MASTER_PORT are not here: they are known when rank 0 runs. The node's own environment is
merged in by its agent (model.pathenv).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE, ALWAYS_NIC_VARIABLES, facts_of
from rlinf_actors.model.hardware import AcceleratorType
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.settings import COMM_NET_DEVICES, NAMESPACE


@dataclass(frozen=True)
class GroupLayout:
    """How a group's processes share nodes; worked out once for all of them.

    Attributes:
        node_local_ranks: for each rank, how many lower ranks are on its node.
        on_node: cluster node rank to the number of processes there.
    """

    node_local_ranks: tuple[int, ...]
    on_node: Mapping[int, int]

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> GroupLayout:
        """The layout of a group's *placements*, which are in rank order."""
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
    """What a worker finds in ``os.environ`` because of where it is.

    The configuration's variables come first and ours win, since a process with another's rank could not work.

    Args:
        group_name: name of the worker group.
        placement: the worker's place.
        placements: those of the whole group in rank order, or their GroupLayout (one for many workers).
        node: its node.
        node_group: the node group that its resources belong to.
        namespace: the job's namespace.
        comm_net_devices: network interfaces for collectives (RLINF_COMM_NET_DEVICES of the driver); the launch's, the
            configuration's and the node's value of that name go before it, in that order. Without any, the interface
            that holds the node's address is taken. Interface variables that are set stay.
        launch_env: the variables of this launch alone, which its caller puts on top of the returned ones.

    Raises:
        ConfigError: the placement has accelerators of a type that this process does not know; says what to load.
    """
    layout = placements if isinstance(placements, GroupLayout) else GroupLayout.of(placements)
    configured = node_group.get_node_env_vars(placement.cluster_node_rank)
    present = {**node.default_env_vars, **node.env_vars, **configured, **(launch_env or {})}
    devices = present.get(COMM_NET_DEVICES) or comm_net_devices or node.interface
    return {
        **(_network(node, devices, present) if devices else {}),
        **_numbering(node, present),
        **configured,
        **_ranks(group_name, placement, layout),
        **_devices(placement, node),
        "NODE_GROUP_LABEL": placement.node_group_label,
        NAMESPACE: namespace,
    }


def model_seen(placement: Placement, node: NodeInfo) -> str:
    """Model of a worker's first accelerator, of the first that it sees if it has none of its own, else ""."""
    if placement.accelerator_type is AcceleratorType.NO_ACCEL or not placement.visible_accelerators:
        return ""
    if placement.local_accelerator_rank >= 0:
        return node.accelerators[placement.local_accelerator_rank].model
    named = zip(node.accelerator_kinds, node.accelerator_device_names, strict=True)
    first = (placement.accelerator_type, placement.visible_accelerators[0])
    return node.accelerators[list(named).index(first)].model


def _ranks(group_name: str, placement: Placement, layout: GroupLayout) -> dict[str, str]:
    return {
        "GROUP_NAME": group_name,
        "WORKER_NAME": f"{group_name}:{placement.rank}",
        "WORLD_SIZE": str(len(layout.node_local_ranks)),
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "NODE_RANK": str(placement.placement_node_rank),
        "CLUSTER_NODE_RANK": str(placement.cluster_node_rank),
        "NODE_LOCAL_RANK": str(layout.node_local_ranks[placement.rank]),
        "NODE_LOCAL_WORLD_SIZE": str(layout.on_node[placement.cluster_node_rank]),
    }


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
    """The variable that shows *devices* of a type and no other; none for a type that this process does not know."""
    facts = ACCELERATOR_TABLE.get(kind)
    if facts is None or not facts.visibility_variable:
        return {}
    return {facts.visibility_variable: facts.visibility_value(devices)}


def _numbering(node: NodeInfo, present: Mapping[str, str]) -> dict[str, str]:
    """What makes the numbers in a visibility variable mean the devices that the probe gave them to."""
    found: dict[str, str] = {}
    for kind in node.accelerator_types:
        facts = ACCELERATOR_TABLE.get(kind)
        if facts is None or not facts.numbering[0]:
            continue
        mixed = len({info.model for info in node.accelerators_of_type(kind)}) > 1  # else every order is as good
        if mixed or facts.numbering[0] not in present:
            found.update([facts.numbering])
    return found


def _network(node: NodeInfo, devices: str, present: Mapping[str, str]) -> dict[str, str]:
    rows = [ACCELERATOR_TABLE[kind] for kind in node.accelerator_types if kind in ACCELERATOR_TABLE]
    names = (*ALWAYS_NIC_VARIABLES, *(facts.nic_variable for facts in rows))
    return {name: devices for name in names if name and name not in present}
