"""Texts for people that say who holds something: which process owns a group, and whose job it is. Pure.

Every refusal because of something that is held names its holder by these functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_actors.head.records import Client, Group
from rlinf_actors.model.readable import duration
from rlinf_actors.shown import printable

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


def process_of(head: Coordinator, client: Client) -> str:
    """Return which process a client is: "ann's train.py (pid 4242 on gpu-1, started 3 h ago)"."""
    owning = head.groups.of_worker(client.worker_id)
    who = str(client.program) or "a driver"
    if owning is not None:
        who = f"worker {owning.name}:{owning.workers[client.worker_id].spec.rank}"
    node = next(iter(head.nodes.on_host(client.host)), None)
    hostname = node.report.hostname if node is not None else printable(client.program.hostname)
    started = client.program.started
    age = f", started {duration(head.wall - started)} ago" if started and head.wall else ""
    return f"{who} (pid {client.pid} on {hostname or 'a machine without an agentd'}{age})"


def owner_clause(head: Coordinator, group: Group) -> str:
    """Return a clause that says who owns a group: "owned by ann's train.py (pid 4242 on gpu-1, started 3 h ago)"."""
    text = owner_of(head, group)
    if text:
        return f"owned by {text}"
    if not group.owner:
        return "which is detached: no driver owns it"
    why = head.clients.ended(group.owner)
    return f"whose owner has ended ({why})" if why else "whose owner this head has not heard of since it started"


def owner_of(head: Coordinator, group: Group) -> str:
    """Return which process owns a group, as `process_of` does; "" if no connected client owns it."""
    client = head.clients.get(group.owner)
    return process_of(head, client) if client is not None else ""


def drivers_clause(head: Coordinator, namespace: str) -> str:
    """Return a clause that says which drivers a job has, beginning with a comma; "" if none is connected."""
    drivers = [client for client in head.clients.of_job(namespace) if client.role == "driver"]
    if not drivers:
        return ""
    more = f" and {len(drivers) - 1} more" if len(drivers) > 1 else ""
    return f", run by {process_of(head, drivers[0])}{more}"
