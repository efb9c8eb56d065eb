"""Conversion of placements and launch options into the WorkerSpecs and the record of a group. No I/O."""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from rlinf_actors.errors import ProtocolError, UsageError
from rlinf_actors.hardware.configured import piece_of
from rlinf_actors.hardware.identity import identities_of
from rlinf_actors.hardware.registry import is_exclusive
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareInfo
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.environment import GroupLayout, check_launch, model_seen, worker_environment
from rlinf_actors.placement.node_groups import ClusterView, find_group
from rlinf_actors.settings import Settings, log_format, log_level
from rlinf_actors.wire.values import Claim, Identity, Piece, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.config.profiling_config import ProfileConfig

POLICIES = ("required", "best_effort")
MIN_MEMORY = 64 << 20
"""Minimum memory limit in bytes. A worker that has only imported its libraries takes about 40 MiB."""
MIN_PIDS = 16
"""Minimum limit of processes and threads. A worker has three threads; lanes and libraries add more."""

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SIZE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")


class WorkerLimits(msgspec.Struct, frozen=True):
    """Limits of one worker together with all processes that it starts.

    Attributes:
        memory: bytes, None for no limit.
        pids: number of processes and threads, None for no limit.
        best_effort: True to start the worker even on nodes that cannot enforce the limits.
    """

    memory: int | None = None
    pids: int | None = None
    best_effort: bool = False

    @classmethod
    def of(cls, memory: str | int | None, pids: int | None, policy: str) -> WorkerLimits:
        """Return the limits that a user asked for by `launch`. Raises UsageError for a wrong value.

        Args:
            memory: maximum of memory, in bytes or as text such as "8GiB"; None for no limit.
            pids: maximum number of processes and threads; None for no limit.
            policy: "required", or "best_effort" to start workers also on nodes that cannot enforce the limits.
        """
        if policy not in POLICIES:
            raise UsageError(f"limits is {policy!r}; it must be one of {', '.join(POLICIES)}")
        found = memory if memory is None else _size(memory)
        if found is not None and found < MIN_MEMORY:
            raise UsageError(f"memory_limit is {memory!r}; a worker does not fit in less than {MIN_MEMORY >> 20} MiB")
        if pids is not None and (isinstance(pids, bool) or not isinstance(pids, int) or pids < MIN_PIDS):
            raise UsageError(f"pids_limit is {pids!r}; it must be a whole number from {MIN_PIDS} up: threads count too")
        return cls(found, pids, policy == "best_effort")


def _size(given: str | int) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    match = _SIZE.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise UsageError(
            f"memory_limit is {given!r}; it must be a number of bytes, or a text such as '8GiB' ({', '.join(_UNITS)})"
        )
    return int(float(match[1]) * _UNITS[match[2]])


START_METHODS = ("fork", "spawn")


def worker_specs(
    template: WorkerSpec,
    placements: Sequence[Placement],
    cluster: ClusterView,
    defaults: Mapping[str, str] = {},
    net_devices: str | None = None,
    numa_bind: bool = False,
) -> list[WorkerSpec]:
    """Return one WorkerSpec per placement, in rank order, with new ids.

    Args:
        template: a WorkerSpec with the fields that all workers share. Its `env` has the environment variables that the
            user gave for this group; they override those of the node group. If they have a visibility variable, such as
            CUDA_VISIBLE_DEVICES, it must name the devices of the placement. Its `owner_must_answer` is kept only for
            workers with robots.
        placements: placement of each rank.
        cluster: the nodes.
        defaults: environment variables of the driver; workers get those that no other source sets.
        net_devices: network interfaces for collectives; None for the interface that has the node's address.
        numa_bind: True to bind workers to the NUMA nodes of their accelerators.

    Raises:
        ConfigError: a visibility variable of the group contradicts the placement, or the log level is unknown.
    """
    launch = uuid.uuid4().hex[:10]
    ordered = sorted(placements, key=lambda p: p.rank)
    layout, claims, specs = GroupLayout.of(ordered), claims_of(ordered, cluster), []
    for placement in ordered:
        node = cluster.get_node_info(placement.cluster_node_rank)
        group = find_group(cluster, placement.node_group_label)
        check_launch(template.env, placement, node, group)
        env = worker_environment(
            template.group,
            placement,
            layout,
            node,
            group,
            template.namespace,
            comm_net_devices=net_devices,
            launch_env=template.env,
        )
        env = {**defaults, **env, **template.env}
        log_level(env)
        log_format(env)
        spec = replace(
            template,
            id=f"{launch}-{placement.rank}",
            rank=placement.rank,
            world_size=len(placements),
            node_rank=placement.cluster_node_rank,
            env=env,
            interpreter=group.get_node_python_interpreter_path(placement.cluster_node_rank) or None,
            claims=tuple(claims.get(placement.rank, ())),
            numa_nodes=_numa_nodes(placement, node) if numa_bind else (),
            owner_must_answer=template.owner_must_answer if placement.rank in claims else "",
        )
        specs.append(spec)
    return specs


def _numa_nodes(placement: Placement, node: NodeInfo) -> tuple[int, ...]:
    if placement.local_accelerator_rank < 0:
        return ()
    held = (node.accelerators[position] for position in placement.local_hardware_ranks)
    return tuple(sorted({info.numa_node if isinstance(info, AcceleratorInfo) else -1 for info in held}))


def hardware_of(placements: Sequence[Placement], cluster: ClusterView) -> dict[int, list[HardwareInfo]]:
    """Return the robots or other configured hardware that each rank is placed on. Ranks without any are left out."""
    found: dict[int, list[HardwareInfo]] = {}
    for placement in placements:
        group = find_group(cluster, placement.node_group_label)
        if group.counts_nodes or group.holds_accelerators:
            continue
        infos = group.get_hardware_infos(placement.cluster_node_rank)
        found[placement.rank] = [infos[rank] for rank in placement.local_hardware_ranks]
    return found


def claims_of(placements: Sequence[Placement], cluster: ClusterView) -> dict[int, list[Claim]]:
    """Return, by rank, the claims of the robots (exclusive hardware) that each rank is placed on.

    Ranks without robots are left out. Two ranks of the group may claim the same robot; they then share it. A node
    counts as one robot of each type whose robots have no identity.
    """
    found: dict[int, list[Claim]] = {}
    shared = Settings.load().shares_robots
    by_rank = {placement.rank: placement for placement in placements}
    for worker, infos in hardware_of(placements, cluster).items():
        for info in infos:
            if not is_exclusive(info.type):
                continue
            for one in identities_of(info) or [Identity(info.type, by_rank[worker].cluster_node_rank)]:
                key = name = one.name
                if one.node_rank is not None:  # the rank of a node may change with the head's state, its id does not
                    key = f"{cluster.get_node_info(one.node_rank).node_id}:{name}"
                    name = f"{name} of node {one.node_rank}"
                title = f"{info.type} {info.identity or name.removeprefix(f'{info.type} ')}"
                found.setdefault(worker, []).append(Claim(key, title, shared))
    return found


def class_reference(cls: type) -> str:
    """Return ``module:qualname``, by which workers import *cls*; "" if they cannot, so that the class must be sent."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return ""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return f"{cls.__module__}:{cls.__qualname__}" if found is cls else ""


_PLAIN = Placement(-1, -1, -1)
"""A Placement with default values. `encode` leaves out fields with these values, because every node gets the record."""


class GroupDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process that looks up a group learns about it from the process that launched the group.

    It is sent as JSON in Launch.detail; the head keeps it and does not read it.

    Attributes:
        placements: placements in rank order.
        nodes: node names, by rank.
        models: accelerator models, by rank; "" for a rank without accelerators.
        hardware: robots or other configured hardware, by rank; ranks without hardware are left out.
        restarts: False if failed workers are not restarted.
    """

    placements: list[Placement] = []
    nodes: list[str] = []
    models: list[str] = []
    hardware: dict[int, list[Piece]] = {}
    restarts: bool = True


def detail_of(
    placements: Sequence[Placement],
    nodes: Sequence[NodeInfo],
    names: Sequence[str],
    hardware: Mapping[int, Sequence[HardwareInfo]],
    restarts: bool = True,
) -> GroupDetail:
    """Return the GroupDetail of a group that is about to be launched.

    Args:
        placements: the placement of each rank, in rank order.
        nodes: the node of each rank, in rank order.
        names: the node name of each rank, in rank order.
        hardware: robots or other configured hardware, by rank.
        restarts: True if failed workers are restarted.
    """
    models = [model_seen(placement, node) for placement, node in zip(placements, nodes, strict=True)]
    pieces = {rank: [piece_of(info) for info in infos] for rank, infos in hardware.items()}
    return GroupDetail(list(placements), list(names), models, pieces, restarts)


def encode(detail: GroupDetail) -> str:
    placements = [
        {
            field.name: value
            for field in fields(one)
            if (value := getattr(one, field.name)) != getattr(_PLAIN, field.name)
        }
        for one in detail.placements
    ]
    return msgspec.json.encode(replace(detail, placements=placements)).decode()


def decode(text: str, group: str) -> GroupDetail:
    """Decode the GroupDetail of the group named *group* from JSON; for "" return an empty one.

    Raises ProtocolError if *text* is no GroupDetail.
    """
    if not text:
        return GroupDetail()
    try:
        return msgspec.json.decode(text, type=GroupDetail)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"the head's record of group {group!r} is not what launch() writes: {error}") from error


def under_profiler(specs: Sequence[WorkerSpec], profiling: ProfileConfig | None) -> list[WorkerSpec]:
    """Return *specs*, with the program under which those workers are started that ``cluster.profiling`` names."""
    program = profiling.profiler() if profiling is not None else None
    if profiling is None or program is None:
        return list(specs)
    return [
        replace(spec, profiler=program) if profiling.profiles_worker(spec.group, spec.rank) else spec for spec in specs
    ]
