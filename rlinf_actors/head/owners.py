"""Texts for people that say who holds something: which process owns a group, and whose job it is. Pure.

Every refusal because of something that is held, or of a quota that is used up, names its holders by these functions.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rlinf_actors.head.records import Client, Group
from rlinf_actors.shown import printable
from rlinf_actors.wire.program import placed

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

K = TypeVar("K")

NAMED = 3
"""Most holders of a quota that a refusal names."""
SCANNED = 1000
"""Most holders of which those with most are chosen: a refusal must cost the head little."""


def first_of(held: Sequence[K], name: Callable[[K], str]) -> str:
    """Return the names of the first things of a quota: "A; B; C; and 7 more"."""
    return _listed([name(one) for one in held[:NAMED]], len(held))


def most_of(counts: Mapping[K, int], name: Callable[[K], str]) -> str:
    """Return the holders with most things of a quota: "of A: 20; of B: 3; and of 7 more"."""
    top = heapq.nlargest(NAMED, itertools.islice(counts.items(), SCANNED), key=lambda one: one[1])
    return _listed([f"of {name(key)}: {count}" for key, count in top], len(counts), "of ")


def _listed(texts: Sequence[str], count: int, of: str = "") -> str:
    return "; ".join([*texts, *[f"and {of}{count - NAMED} more"] * (count > NAMED)])


def processes(head: Coordinator, counts: Mapping[bytes, int]) -> str:
    """Return which processes have most things of a quota. *counts* has the number of things of each connection."""
    return most_of(counts, lambda peer: speaker_of(head, peer))


def speaker_of(head: Coordinator, peer: bytes) -> str:
    """Return which process has this connection: a client, an agentd, or a command, which has no session."""
    client, node = head.clients.of_peer(peer), head.nodes.of_peer(peer)
    if client is not None:
        return process_of(head, client)
    return f"the agentd of {node.name}" if node is not None else "a command"


def process_of(head: Coordinator, client: Client, kept: bool = False) -> str:
    """Return which process a client is: "ann's train.py (pid 4242 on gpu-1, started 3 h ago)".

    If the text is *kept*, it has the date and time of the start, which stay true.
    """
    owning = head.groups.of_worker(client.worker_id)
    who = str(client.program) or "a driver"
    if owning is not None:
        who = f"worker {owning.name}:{owning.workers[client.worker_id].spec.rank}"
    node = next(iter(head.nodes.on_host(client.host)), None)
    hostname = node.report.hostname if node is not None else printable(client.program.hostname)
    return placed(
        who, client.pid, hostname or "a machine without an agentd", client.program.started, None if kept else head.wall
    )


def owner_clause(head: Coordinator, group: Group) -> str:
    """Return a clause that says who owns a group: "owned by ann's train.py (pid 4242 on gpu-1, started 3 h ago)"."""
    client = head.clients.get(group.owner)
    if client is not None:
        return f"owned by {process_of(head, client)}"
    if not group.owner:
        return "which is detached: no driver owns it"
    why = head.clients.ended(group.owner)
    return f"whose owner has ended ({why})" if why else "whose owner this head has not heard of since it started"


def owner_of(head: Coordinator, group: Group) -> str:
    """Return which process owns a group, as a text that is kept; "" if no connected client owns it."""
    client = head.clients.get(group.owner)
    return process_of(head, client, kept=True) if client is not None else ""


def drivers_clause(head: Coordinator, namespace: str) -> str:
    """Return a clause that says which drivers a job has, beginning with a comma; "" if none is connected."""
    drivers = [client for client in head.clients.of_job(namespace) if client.role == "driver"]
    if not drivers:
        return ""
    more = f" and {len(drivers) - 1} more" if len(drivers) > 1 else ""
    return f", run by {process_of(head, drivers[0])}{more}"
