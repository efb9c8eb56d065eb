"""`rlinf-actors workers`: every worker process."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from rlinf_actors.cli.figures import figures_of
from rlinf_actors.cli.output import json_option, mib, seconds, show_json, show_table
from rlinf_actors.cli.session import head_option, status_of
from rlinf_actors.net.host import host_key
from rlinf_actors.wire.values import GroupState, WorkerPulse, WorkerState


@click.command()
@click.argument("group", required=False)
@head_option
@json_option
def workers(group: str | None, head: str | None, as_json: bool) -> None:
    """List the workers, of GROUP only if it is named: state, node, process, how it ended.

    CPU time and memory are shown of the workers on this machine.
    """
    _, found = status_of(head)
    here = host_key()
    near = {node.rank for node in found.nodes if node.report.host == here}
    rows = [
        worker_dict(each, worker, found.at, near=worker.node_rank in near)
        for each in found.groups
        for worker in sorted(each.workers, key=lambda worker: worker.rank)
        if group in (None, each.name)
    ]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("WORKER", "NAMESPACE", "STATE", "NODE", "ADDRESS", "PID", "CPU", "MEMORY", "RESTARTS", "END"),
        [
            (
                row["name"],
                row["namespace"],
                _state(row),
                row["node_rank"],
                row["node_ip"],
                row["pid"] or "-",
                seconds(row["process"]["cpu_s"]) if row["process"] else "-",
                mib(row["process"]["rss_bytes"]) if row["process"] else "-",
                row["restarts"],
                _end(row["exit"]),
            )
            for row in rows
        ],
        "no worker is running" if group is None else f"group {group!r} has no worker",
    )


def _state(row: dict[str, Any]) -> str:
    if row["unresponsive"]:
        return f"unresponsive for {seconds(row['for_s'])}"
    if row["method"]:
        waiting = f", {row['waiting']} more wait" if row["waiting"] else ""
        return f"{row['state']}, in {row['method']}() for {seconds(row['for_s'])}{waiting}"
    return str(row["state"])


def worker_dict(group: GroupState, worker: WorkerState, now: float, *, near: bool = False) -> dict[str, Any]:
    """A line of `workers --json`; keys are stable, new ones may be added. ``exit`` is null while it runs.

    ``unresponsive`` says why it does not answer, ``method`` which call has been running for long (both "" otherwise),
    ``for_s`` since when. ``process`` has the figures of a worker that runs on this machine (*near*), else null: see
    `cli.figures`.
    """
    end, pulse = worker.exit, worker.pulse or WorkerPulse()
    figures = figures_of(worker.pid) if near and worker.pid and worker.state != "gone" else None
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
        "process": None if figures is None else dataclasses.asdict(figures),
        "restarts": worker.restarts,
        "unresponsive": pulse.unresponsive,
        "method": pulse.method,
        "waiting": pulse.waiting,
        "for_s": round(max(0.0, now - pulse.since), 3) if worker.pulse else 0.0,
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
