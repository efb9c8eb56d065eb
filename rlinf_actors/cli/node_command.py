"""`rlinf-actors node`: show a node, or drain it for maintenance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import click

from rlinf_actors.cli import complete
from rlinf_actors.cli.events_command import read_events
from rlinf_actors.cli.output import Amount, json_option, note, show_fields, show_json, show_table, size, warn
from rlinf_actors.cli.queries import ask_head, head_option, status_of
from rlinf_actors.cli.views import node_dict
from rlinf_actors.cluster.event_stream import EventCursor
from rlinf_actors.errors import ClusterTimeoutError, NodeLostError, RlinfActorsError, UsageError
from rlinf_actors.runtime.progress import Facts, named
from rlinf_actors.sampling.hardware_text import hardware_text, held_on
from rlinf_actors.security.keyfile import who
from rlinf_actors.wire.client_messages import Drained, DrainNode, Events, Status
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.values import NodeState

_ENDS = ("node_drained", "node_undrained", "node_lost", "node_left")
"""Kinds of events after which `node drain --wait` no longer waits."""


@click.group()
def node() -> None:
    """Show one node, or take it out of use. NODE is its rank, host name or id."""


@node.command()
@click.argument("node", shell_complete=complete.nodes)
@head_option
@json_option
def show(node: str, head: str | None, as_json: bool) -> None:
    """Show a node: its state, hardware, and the groups that run there."""
    _, status = status_of(head)
    found = find_node(status.nodes, node)
    _show(found, status, as_json)


@node.command()
@click.argument("node", shell_complete=complete.nodes)
@click.option("--reason", default="", metavar="TEXT", help="Shown to the owners of the workers there.")
@click.option(
    "--wait",
    "wait_s",
    type=Amount(min=0.0, min_open=True),
    metavar="SECONDS",
    help="Wait until no worker runs there, at most SECONDS.",
)
@head_option
@json_option
def drain(node: str, reason: str, wait_s: float | None, head: str | None, as_json: bool) -> None:
    """Start no new workers on a node. Running workers continue until their owners end them; the owners are notified.

    The exit code is 69 if workers still run there after --wait SECONDS.
    """
    endpoint, status = status_of(head)
    chosen = find_node(status.nodes, node)
    _, answer = ask_head(endpoint, DrainNode(chosen.report.node_id, who(), reason), Drained)
    _show(answer.node or chosen, status, as_json)
    warn(answer.warning)
    if wait_s is not None:
        _wait(endpoint, chosen, wait_s)
        note(f"node {chosen.report.hostname} is drained: ready for maintenance")


@node.command()
@click.argument("node", shell_complete=complete.nodes)
@head_option
def undrain(node: str, head: str | None) -> None:
    """Let a drained node take new workers again."""
    endpoint, status = status_of(head)
    chosen = find_node(status.nodes, node)
    _, answer = ask_head(endpoint, DrainNode(chosen.report.node_id, who(), undo=True), Drained)
    warn(answer.warning)
    note(f"node {chosen.report.hostname} takes new workers again")


def find_node(nodes: Sequence[NodeState], name: str) -> NodeState:
    """Return the node whose id, rank or hostname is *name*. Raise UsageError if no node or several nodes match."""
    for matches in (
        [node for node in nodes if node.report.node_id == name],
        [node for node in nodes if node.rank >= 0 and str(node.rank) == name],
        [node for node in nodes if node.report.hostname == name],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(node.report.node_id for node in matches)
            raise UsageError(f"{len(matches)} nodes are called {name!r}: name one by its id ({ids})")
    known = ", ".join(f"{node.report.hostname} (id {node.report.node_id})" for node in nodes) or "none at all"
    raise UsageError(f"there is no node {name!r}; there are: {known}")


def _show(node: NodeState, status: Status, as_json: bool) -> None:
    uses = groups_on(node, status)
    data = node_dict(node)
    if as_json:
        show_json({**data, "groups": uses})
        return
    show_fields(
        {
            "node": f"{data['hostname']} (id {data['id']})" + (" (head)" if data["is_head"] else ""),
            "rank": "-" if data["rank"] is None else data["rank"],
            "state": data["state"],
            "draining": data["draining"] or "no",
            "admits": str(node.report.admit),
            **({"closed": node.closed} if node.closed else {}),
            "address": data["ip"],
            "hardware": hardware_text(data["hardware"], held_on(node, status.leases)) or "none",
            "machine": f"{data['num_cpus']} CPUs, {size(data['memory_bytes'])}",
            "python": f"{data['python']} ({data['interpreter']})",
        }
    )
    show_table(
        ("GROUP", "JOB", "RANKS HERE", "OWNER"),
        [(use["group"], use["namespace"], ", ".join(map(str, use["ranks"])), use["owner"]) for use in uses],
        "nothing runs there",
    )


def groups_on(node: NodeState, status: Status) -> list[dict[str, Any]]:
    """Return the groups that have workers on *node*, in the form that `node show --json` prints. New keys may
    be added.
    """
    uses = []
    for group in status.groups:
        there = [w.rank for w in group.workers if w.state != "gone" and w.node_rank == node.rank]
        if there and node.rank >= 0:
            owner = next((text for text in status.clients if group.owner and group.owner[:8] in text), "has ended")
            owner = "none: the group is detached" if group.detached else owner
            uses.append({"group": group.name, "namespace": group.namespace, "ranks": sorted(there), "owner": owner})
    return uses


def _wait(endpoint: str, node: NodeState, wait_s: float) -> None:
    """Block until the head at *endpoint* reports that no worker runs on *node* any more. The node is being drained.

    Raise ClusterTimeoutError after *wait_s* seconds, NodeLostError if the node is lost, and RlinfActorsError if `node
    undrain` has ended the drain.
    """
    name, last = node.report.hostname, ["node_draining"]

    def each(answer: Events, found: list[ClusterEvent]) -> bool:
        last.extend(event.kind for event in found if event.node_id == node.report.node_id)
        return answer.more or last[-1] not in _ENDS

    def look(status: Status) -> Facts:
        uses = groups_on(node, status)
        ranks = [f"{use['group']}:{rank} of {use['namespace']}" for use in uses for rank in use["ranks"]]
        owners = sorted({f"{use['group']} belongs to {use['owner']}" for use in uses})
        return Facts(f"draining {name}: {named('', ranks) or 'nothing'} still there", named("", owners))

    try:
        read_events(endpoint, EventCursor(kinds=(*_ENDS, "node_draining")), True, each, wait_s, look)
    except ClusterTimeoutError:
        raise
    except asyncio.TimeoutError:
        _, status = status_of(endpoint)
        uses = ", ".join(f"{use['group']} of job {use['namespace']}" for use in groups_on(node, status))
        raise ClusterTimeoutError(f"node {name} is not empty after {wait_s:g} s; still running there: {uses}") from None
    if last[-1] == "node_undrained":
        raise RlinfActorsError(f"the drain of node {name} was ended: it takes new workers again")
    if last[-1] != "node_drained":
        raise NodeLostError(f"node {name} was lost before it was drained: see `rlinf-actors events`")
