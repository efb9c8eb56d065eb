"""From placements and options to what each agent is asked to start. Pure."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors.group.limits import Limits
from rlinf_actors.hardware.registry import is_exclusive
from rlinf_actors.model.hardware import AcceleratorInfo, HardwareInfo
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.model.restart import RestartPolicy
from rlinf_actors.placement.environment import GroupLayout, worker_environment
from rlinf_actors.placement.view import ClusterView, find_group
from rlinf_actors.placement.visibility import check_launch
from rlinf_actors.settings import log_level
from rlinf_actors.wire.values import Claim, WorkerSpec

START_METHODS = ("fork", "spawn")


@dataclass(frozen=True)
class LaunchOptions:
    """What is the same for all workers of a group.

    Attributes:
        start_method: "fork" from a template, or "spawn" a fresh interpreter.
        preload: modules that the template imports before it forks.
        sys_path: the launcher's import paths, added to the workers' where they exist there.
        cwd: the launcher's directory, used where it exists.
        env: variables for this group alone; they win over the node group's. A visibility variable among them must say
            what the placement says.
        path_env_merge_mode: "append" or "override".
        net_devices: interfaces for collectives, None for the one that holds the node's address.
        log_dir: directory of log files, None for the agent's own.
        forward_logs: whether stdout and stderr reach the driver's terminal.
        numa_bind: bind workers to the NUMA nodes of their accelerators.
        limits: of each worker.
        restart: when workers that fail are started again.
        owner_must_answer: of workers with robots; see WorkerSpec.
        defaults: variables of the driver that its workers get too, unless something says otherwise.
    """

    start_method: str = "fork"
    preload: Sequence[str] = ()
    sys_path: Sequence[str] = ()
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    path_env_merge_mode: str = "append"
    net_devices: str | None = None
    log_dir: str | None = None
    forward_logs: bool = True
    numa_bind: bool = False
    limits: Limits = field(default_factory=Limits)
    restart: RestartPolicy = field(default_factory=RestartPolicy.never)
    owner_must_answer: str = "elsewhere"
    defaults: Mapping[str, str] = field(default_factory=dict)


def worker_specs(
    name: str, namespace: str, placements: Sequence[Placement], cluster: ClusterView, options: LaunchOptions
) -> list[WorkerSpec]:
    """One spec per placement, in rank order, with ids that were never used before.

    Raises:
        ConfigError: a visibility variable in the options contradicts the placement, or there is no such log level.
    """
    launch = uuid.uuid4().hex[:10]
    ordered = sorted(placements, key=lambda p: p.rank)
    layout, specs = GroupLayout.of(ordered), []
    claims = claims_of(ordered, cluster)
    for placement in ordered:
        node = cluster.get_node_info(placement.cluster_node_rank)
        group = find_group(cluster, placement.node_group_label)
        check_launch(options.env, placement, node, group)
        env = worker_environment(
            name,
            placement,
            layout,
            node,
            group,
            namespace,
            comm_net_devices=options.net_devices,
            launch_env=options.env,
        )
        env = {**options.defaults, **env, **options.env}
        log_level(env)
        interpreter = group.get_node_python_interpreter_path(placement.cluster_node_rank)
        specs.append(
            WorkerSpec(
                id=f"{launch}-{placement.rank}",
                group=name,
                namespace=namespace,
                rank=placement.rank,
                world_size=len(placements),
                node_rank=placement.cluster_node_rank,
                env=env,
                path_env_merge_mode=options.path_env_merge_mode,
                interpreter=interpreter or None,
                start_method=options.start_method,
                preload=list(options.preload),
                sys_path=list(options.sys_path),
                cwd=options.cwd,
                log_dir=options.log_dir,
                forward_logs=options.forward_logs,
                claims=claims.get(placement.rank, []),
                numa_nodes=_numa_nodes(placement, node) if options.numa_bind else [],
                memory_limit=options.limits.memory,
                pids_limit=options.limits.pids,
                limits_best_effort=options.limits.best_effort,
                restart=options.restart if options.restart.restarts else None,
                owner_must_answer=options.owner_must_answer if placement.rank in claims else "",
            )
        )
    return specs


def _numa_nodes(placement: Placement, node: NodeInfo) -> list[int]:
    """Those of the accelerators that a worker was placed on."""
    if placement.local_accelerator_rank < 0:
        return []
    held = (node.accelerators[position] for position in placement.local_hardware_ranks)
    return sorted({info.numa_node if isinstance(info, AcceleratorInfo) else -1 for info in held})


def hardware_of(placements: Sequence[Placement], cluster: ClusterView) -> dict[int, list[HardwareInfo]]:
    """For each rank the robots or other configured hardware it was placed on; ranks without any are left out."""
    found: dict[int, list[HardwareInfo]] = {}
    for placement in placements:
        group = find_group(cluster, placement.node_group_label)
        if group.counts_nodes or group.holds_accelerators:
            continue
        infos = group.get_hardware_infos(placement.cluster_node_rank)
        found[placement.rank] = [infos[rank] for rank in placement.local_hardware_ranks]
    return found


def claims_of(placements: Sequence[Placement], cluster: ClusterView) -> dict[int, list[Claim]]:
    """For each rank the hardware that its group alone may use; ranks without any are left out.

    Workers of one group that were placed on the same piece share it.
    """
    found: dict[int, list[Claim]] = {}
    by_rank = {placement.rank: placement for placement in placements}
    for worker, infos in hardware_of(placements, cluster).items():
        placement = by_rank[worker]
        node = cluster.get_node_info(placement.cluster_node_rank)
        for rank, info in zip(placement.local_hardware_ranks, infos, strict=True):
            if not is_exclusive(info.type):
                continue
            title = f"{info.type} {info.identity or f'{rank} of node {placement.cluster_node_rank}'}"
            keys = info.claim_keys or [f"{info.type}:{node.node_id}:{rank}"]
            found.setdefault(worker, []).extend(Claim(key, title) for key in keys)
    return found


def class_reference(cls: type) -> str:
    """How *cls* can be imported, as ``module:qualname``; "" if it must travel by value."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return ""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return f"{cls.__module__}:{cls.__qualname__}" if found is cls else ""
