"""`rlinf-actors status`: the cluster on one page."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from rlinf_actors.cli.output import json_option, plain, seconds, show_fields, show_json
from rlinf_actors.cli.session import head_option, status_of
from rlinf_actors.wire.operators import Status
from rlinf_actors.wire.values import LeaseState


@click.command()
@head_option
@json_option
def status(head: str | None, as_json: bool) -> None:
    """Show how the cluster is: its head, nodes, groups and clients."""
    endpoint, found = status_of(head)
    data = summary(endpoint, found)
    if as_json:
        show_json(data)
        return
    show_fields(
        {
            "head": f"{endpoint} (rlinf-actors {found.version}, up {seconds(found.uptime_s)})",
            "nodes": _counts(data["nodes"]),
            "hardware": ", ".join(f"{count} {kind}" for kind, count in data["hardware"].items()) or "none",
            "groups": _counts(data["groups"]) + (f" ({data['detached']} detached)" if data["detached"] else ""),
            "workers": _counts(data["workers"]),
            "leases": "\n         ".join(map(_lease, found.leases)) or "none",
            "clients": "\n         ".join(found.clients) or "none",
        }
    )
    for stop in data["estop"]:
        click.echo(f"stopped   {plain(stop)}; lift it with `rlinf-actors estop --release`")
    for trouble in data["trouble"]:
        click.echo(f"trouble   {trouble}")
    for fault in data["faults"]:
        click.echo(f"fault     {plain(fault['node'])}: {plain(fault['text'])}")


def summary(endpoint: str, found: Status) -> dict[str, Any]:
    """What `status --json` prints; keys are stable, new ones may be added."""
    hardware: Counter[str] = Counter()
    for node in found.nodes:
        if node.state != "lost":
            hardware.update({resource.type: len(resource.infos) for resource in node.report.resources})
    return {
        "head": endpoint,
        "version": found.version,
        "epoch": found.epoch,
        "trouble": found.trouble,
        "uptime_s": round(found.uptime_s, 3),
        "nodes": dict(Counter(node.state for node in found.nodes)),
        "hardware": dict(hardware),
        "groups": dict(Counter(group.state for group in found.groups)),
        "detached": sum(group.detached for group in found.groups),
        "workers": dict(Counter(worker.state for group in found.groups for worker in group.workers)),
        "leases": [
            {
                "key": lease.key,
                "title": lease.title,
                "namespace": lease.namespace,
                "group": lease.group,
                "owner": lease.owner,
                "workers": list(lease.workers),
                "nodes": list(lease.nodes),
                "state": lease.state,
                "held_s": round(lease.held_s, 3),
                "free_in_s": None if lease.free_in_s is None else round(lease.free_in_s, 3),
            }
            for lease in found.leases
        ],
        "clients": list(found.clients),
        "estop": list(found.stopped),
        "faults": [
            {"node": node.report.hostname, "text": fault} for node in found.nodes for fault in node.report.faults
        ],
    }


def _lease(lease: LeaseState) -> str:
    held = f"{lease.title}: group {lease.group} of namespace {lease.namespace}, {seconds(lease.held_s)}, {lease.owner}"
    return held if lease.free_in_s is None else f"{held}; its node is lost, free in {seconds(lease.free_in_s)}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"
