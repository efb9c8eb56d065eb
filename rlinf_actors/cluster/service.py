"""Launch processes of the library itself (channel hosts), and list the import paths of this process for workers."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf_actors.placement.environment import GroupLayout, worker_environment
from rlinf_actors.placement.node_groups import find_group
from rlinf_actors.placement.strategies import NodePlacementStrategy
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import payload
from rlinf_actors.wire.client_messages import Launch
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.cluster.cluster import Cluster


def network_environment(cluster: Cluster, group: str, world_size: int) -> dict[str, str]:
    """Return the environment variables that let workers of *group* emulate the network of the cluster's configuration.

    Raises:
        ConfigError: the configuration names a rank that the group does not have, since it has *world_size*.
    """
    section = cluster.config.net_emulation if cluster.config is not None else None
    return section.environment_for(group, world_size) if section is not None else {}


async def launch_service(
    cluster: Cluster,
    name: str,
    reference: str,
    args: tuple[Any, ...],
    node_ranks: Sequence[int],
    detail: str = "",
    show_logs: bool = False,
    detached: bool = False,
    interpreter: str | None = None,
) -> RemoteGroup:
    """Launch a group of workers of a class of this library, such as channel hosts, and wait for the head's answer.

    The group has one worker for each entry of *node_ranks*. If *detached*, wait until all workers are constructed too,
    because this process may end afterwards. Loop thread.

    Args:
        cluster: the cluster to launch on.
        name: name of the group; NameInUseError is raised if such a group is running.
        reference: the class, as ``module:class``.
        args: arguments of the class's constructor.
        node_ranks: rank of the node on which each worker runs, in the order of the workers' ranks.
        detail: text (JSON) that the head gives to each process that looks up the group.
        show_logs: True to show the group's output in the driver's terminal.
        detached: True to end the group with the job's first driver; False to end it with this process.
        interpreter: interpreter of the workers, None for the nodes' own.
    """
    placements = NodePlacementStrategy(node_ranks).get_placement(cluster)
    layout, launch, specs = GroupLayout.of(placements), uuid.uuid4().hex[:10], []
    for placement in placements:
        node = cluster.get_node_info(placement.cluster_node_rank)
        group = find_group(cluster, placement.node_group_label)
        specs.append(
            WorkerSpec(
                id=f"{launch}-{placement.rank}",
                group=name,
                namespace=cluster.namespace,
                rank=placement.rank,
                world_size=len(placements),
                node_rank=placement.cluster_node_rank,
                env={
                    **worker_environment(name, placement, layout, node, group, cluster.namespace),
                    **network_environment(cluster, name, len(placements)),
                },
                forward_logs=show_logs,
                keep_logs=show_logs and cluster.log_dir is not None,
                interpreter=interpreter,
                trace_events=recorder.for_workers(),
            )
        )
    construction = Construction(reference, payload.encode((None, args, {}, {}), reference), 0)
    names = [cluster.node_name(spec.node_rank) for spec in specs]
    made = cluster.runtime.groups.new(cluster.namespace, name, names, construction, [spec.id for spec in specs])
    message = Launch(cluster.namespace, name, reference, specs, detail, detached)
    await cluster.runtime.groups.launch(message, made)
    if detached:
        await made.ready
    return made


_real: dict[str, str] = {}
"""Path without symbolic links by absolute path. Cached because resolving reads directories that may be on NFS."""


PRELOADED = ("torch", "numpy")
"""Modules that the template imports if the launching process has imported them."""


def modules_to_preload() -> list[str]:
    """Return the modules that templates import for the workers of this process, if a launch names none."""
    return [module for module in PRELOADED if module in sys.modules]


def import_paths() -> list[str]:
    """Return the entries of sys.path that the workers of this process need too, without those of the interpreter.

    Symbolic links in the paths are resolved. In an event loop, which must not wait for a disk, only links in paths that
    an earlier call has resolved are resolved; the start of a Cluster makes such a call.
    """
    own = {_resolved(path) for path in sysconfig.get_paths().values()}
    entries = [_resolved(entry) for entry in sys.path]
    paths = []
    for path in entries:
        inside = any(path == root or path.startswith(root + os.sep) for root in own)
        if not inside and path not in paths and not path.endswith(".zip"):
            paths.append(path)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and (folder := os.path.dirname(_resolved(main))) not in paths and folder in entries:
        paths.append(folder)
    return paths


def _resolved(path: str) -> str:
    path = os.path.normpath(os.path.join(os.getcwd(), path))  # getcwd() reads no disk
    known = _real.get(path)
    if known is None:
        if asyncio._get_running_loop() is not None:
            return path
        known = _real[path] = os.path.realpath(path)
    return known
