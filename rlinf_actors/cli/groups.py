"""`rlinf-actors groups`: every group of workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from rlinf_actors.cli.output import json_option, show_json, show_table
from rlinf_actors.cli.session import head_option, status_of
from rlinf_actors.wire.values import GroupState


@click.command()
@head_option
@json_option
def groups(head: str | None, as_json: bool) -> None:
    """List the groups: name, class, state, where their workers are."""
    _, found = status_of(head)
    rows = [group_dict(group) for group in found.groups]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("NAMESPACE", "GROUP", "CLASS", "STATE", "WORKERS", "NODES"),
        [
            (
                row["namespace"],
                row["name"],
                row["class"],
                row["state"],
                ", ".join(f"{count} {state}" for state, count in row["workers"].items()),
                ",".join(map(str, row["node_ranks"])),
            )
            for row in rows
        ],
        "no group is running",
    )


def group_dict(group: GroupState) -> dict[str, Any]:
    """A line of `groups --json`; keys are stable, new ones may be added."""
    return {
        "namespace": group.namespace,
        "name": group.name,
        "class": group.cls,
        "state": group.state,
        "world_size": len(group.workers),
        "workers": dict(Counter(worker.state for worker in group.workers)),
        "node_ranks": sorted({worker.node_rank for worker in group.workers}),
        "owner": group.owner,
    }
