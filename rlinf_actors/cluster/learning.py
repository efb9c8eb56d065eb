"""What a starting Cluster learns: its nodes, the hardware that its configuration gives them, and their groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_actors.cluster.attach import WorkerJob
from rlinf_actors.cluster.hardware import ANSWER_S, Pieces, ask_nodes, pieces_of, with_pieces
from rlinf_actors.cluster.nodes import node_infos
from rlinf_actors.cluster.progress import waiting_line
from rlinf_actors.config.cluster import ClusterConfig
from rlinf_actors.hardware import extensions
from rlinf_actors.model.node import NodeGroupInfo, NodeInfo
from rlinf_actors.placement.groups import build_node_groups
from rlinf_actors.runtime.process import Runtime
from rlinf_actors.wire.clients import Enumerated
from rlinf_actors.wire.values import NodeState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learned:
    """The nodes of a cluster.

    Attributes:
        states: as the head knows them.
        pieces: what nodes have of the hardware that was configured, by node rank.
        groups: of nodes, by label.
    """

    states: list[NodeState]
    pieces: Pieces
    groups: dict[str, NodeGroupInfo]


async def learn_nodes(
    runtime: Runtime, job: WorkerJob | None, config: ClusterConfig | None, wanted: int, timeout: float | None
) -> Learned:
    """Wait for *wanted* nodes and ask them for their hardware. On the runtime's loop.

    Args:
        runtime: connected.
        job: in a worker: it has heard from its owner what that learned.
        config: the ``cluster:`` section, None without one.
        wanted: how many nodes.
        timeout: seconds to wait for them, None for ever.

    Raises:
        ClusterTimeoutError: nodes are missing (says which).
        ConfigError: a node cannot have what is configured.
    """
    async with waiting_line(runtime, wanted):
        nodes = await runtime.nodes(wanted, timeout)
    for warning in nodes.warnings:
        log.warning("%s", warning)
    states = [state for state in nodes.nodes if 0 <= state.rank < wanted or job is not None]
    infos, pieces = await _with_hardware(runtime, job, config, states)
    return Learned(states, pieces, build_node_groups(config, infos))


async def _with_hardware(
    runtime: Runtime, job: WorkerJob | None, config: ClusterConfig | None, states: Sequence[NodeState]
) -> tuple[list[NodeInfo], Pieces]:
    """The nodes, with the hardware that the configuration gives them."""
    kinds = [one.type for state in states for one in state.report.resources if one.registered_by]
    if kinds:
        await asyncio.to_thread(extensions.load_accelerators, kinds)  # others' code: not on this thread
    if job is not None:
        told: Pieces = job.extras().get("hardware_pieces", {})
        return with_pieces(node_infos(states), told), told
    if config is None:
        return node_infos(states), {}
    infos = await ask_nodes(config, states, lambda asked: runtime.ask(asked, Enumerated, ANSWER_S), runtime.host)
    return infos, pieces_of(config, infos)
