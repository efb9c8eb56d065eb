"""The hardware of nodes for people: what their probes have found, and the robots that groups hold there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rlinf_actors.wire.values import LeaseState, NodeState


def probed(node: NodeState) -> dict[str, int]:
    """Return the number of pieces of hardware that a node has reported, by type."""
    return {resource.type: len(resource.infos) for resource in node.report.resources}


def held_on(node: NodeState, leases: Iterable[LeaseState]) -> list[LeaseState]:
    """Return those of *leases* whose workers are on *node*."""
    name = f"{node.report.hostname} ({node.report.ip})" if node.report.ip else node.report.hostname  # as the head says
    return [lease for lease in leases if name in lease.nodes]


def hardware_text(found: Mapping[str, int], held: Iterable[LeaseState]) -> str:
    """Return the hardware that nodes have *found*, and the robots that groups hold, "" for nothing. A driver declares
    robots, so that no probe finds them.
    """
    robots = Counter(title.partition(" ")[0] for title in {lease.title for lease in held})
    leased = [f"{count} {kind} (leased)" for kind, count in sorted(robots.items())]
    return ", ".join([*(f"{count} {kind}" for kind, count in found.items()), *leased])
