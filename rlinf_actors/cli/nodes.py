"""`rlinf-actors nodes`: every node that registered."""

from __future__ import annotations

from typing import Any

import click

from rlinf_actors.cli.output import json_option, seconds, show_json, show_table, size
from rlinf_actors.cli.session import head_option, status_of
from rlinf_actors.wire.values import NodeState


@click.command()
@head_option
@json_option
def nodes(head: str | None, as_json: bool) -> None:
    """List the nodes: rank, state, address, hardware."""
    _, found = status_of(head)
    rows = [node_dict(node) for node in found.nodes]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("RANK", "HOST", "ADDRESS", "STATE", "SEEN", "CPUS", "MEMORY", "HARDWARE", "PYTHON"),
        [
            (
                "-" if row["rank"] is None else row["rank"],
                row["hostname"] + (" (head)" if row["is_head"] else ""),
                f"{row['ip']} ({row['interface']})" if row["interface"] else row["ip"],
                row["state"],
                f"{seconds(row['last_seen_s'])} ago",
                row["num_cpus"],
                size(row["memory_bytes"]),
                ", ".join(f"{count} {kind}" for kind, count in row["hardware"].items()) or "-",
                row["python"],
            )
            for row in rows
        ],
        "no node has registered",
    )


def node_dict(node: NodeState) -> dict[str, Any]:
    """A line of `nodes --json`; keys are stable, new ones may be added. ``rank`` is null before it is fixed."""
    report = node.report
    return {
        "rank": node.rank if node.rank >= 0 else None,
        "id": report.node_id,
        "hostname": report.hostname,
        "ip": report.ip,
        "state": node.state,
        "last_seen_s": round(node.last_seen_s, 3),
        "is_head": node.is_head,
        "num_cpus": report.num_cpus,
        "memory_bytes": report.memory_bytes,
        "hardware": {resource.type: len(resource.infos) for resource in report.resources},
        "models": {
            resource.type: sorted({info.model for info in resource.infos if info.model})
            for resource in report.resources
        },
        "python": report.python,
        "interpreter": report.interpreter,
        "interface": report.interface,
        "interfaces": report.interfaces,
        "faults": report.faults,
        "incarnation": node.incarnation,
        "draining": node.draining,
    }
