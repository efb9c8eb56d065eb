"""How lists and pages name the nodes of a cluster, of which several may have one host name. Pure."""

from __future__ import annotations

import collections
from collections.abc import Collection

from rlinf_actors.wire.values import NodeState


def node_names(nodes: Collection[NodeState]) -> dict[str, str]:
    """Return each node's name for people, by its id: its host's name, with its rank if another node has the same.

    A node without a rank gets its id instead: the head gives a rank when a driver first gets the node.
    """
    hosts = collections.Counter(node.report.hostname for node in nodes)
    return {node.report.node_id: _name(node, hosts[node.report.hostname] > 1) for node in nodes}


def names_by_rank(nodes: Collection[NodeState]) -> dict[int, str]:
    """Return the same by the node's rank, without nodes that have none."""
    names = node_names(nodes)
    return {node.rank: names[node.report.node_id] for node in nodes if node.rank >= 0}


def _name(node: NodeState, shared: bool) -> str:
    if not shared:
        return node.report.hostname
    return f"{node.report.hostname} ({f'rank {node.rank}' if node.rank >= 0 else node.report.node_id})"
