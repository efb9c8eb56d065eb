"""`rlinf-actors workers`: every worker process."""

from __future__ import annotations

from typing import Any

import click

from rlinf_actors.cli.output import json_option, show_json, show_table
from rlinf_actors.cli.session import head_option, status_of
from rlinf_actors.wire.values import GroupState, WorkerState


@click.command()
@click.argument("group", required=False)
@head_option
@json_option
def workers(group: str | None, head: str | None, as_json: bool) -> None:
    """List the workers, of GROUP only if it is named: state, node, process, how it ended."""
    _, found = status_of(head)
    rows = [
        worker_dict(each, worker)
        for each in found.groups
        for worker in sorted(each.workers, key=lambda worker: worker.rank)
        if group in (None, each.name)
    ]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("WORKER", "NAMESPACE", "STATE", "NODE", "ADDRESS", "PID", "END"),
        [
            (
                row["name"],
                row["namespace"],
                row["state"],
                row["node_rank"],
                row["node_ip"],
                row["pid"] or "-",
                _end(row["exit"]),
            )
            for row in rows
        ],
        "no worker is running" if group is None else f"group {group!r} has no worker",
    )


def worker_dict(group: GroupState, worker: WorkerState) -> dict[str, Any]:
    """A line of `workers --json`; keys are stable, new ones may be added. ``exit`` is null while it runs."""
    end = worker.exit
    return {
        "name": f"{group.name}:{worker.rank}",
        "namespace": group.namespace,
        "group": group.name,
        "rank": worker.rank,
        "id": worker.id,
        "state": worker.state,
        "node_rank": worker.node_rank,
        "node_ip": worker.node_ip,
        "pid": worker.pid,
        "exit": None
        if end is None
        else {
            "kind": end.kind,
            "exit_code": end.exit_code,
            "signal": end.signal,
            "oom": end.oom,
            "reason": end.reason,
            "stderr_tail": end.stderr_tail,
        },
    }


def _end(end: dict[str, Any] | None) -> str:
    if end is None:
        return "-"
    how = f"signal {end['signal']}" if end["signal"] is not None else f"code {end['exit_code']}"
    oom = {"yes": ", out of memory", "suspected": ", out of memory suspected"}.get(end["oom"], "")
    return f"{end['kind']}, {how}{oom}" if end["kind"] in ("exited", "signalled") else f"{end['kind']}: {end['reason']}"
