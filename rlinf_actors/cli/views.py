"""The commands `rlinf-actors status`, `nodes`, `groups`, `groups stop`, `workers` and `paths`.

The ``..._dict`` functions return what --json prints: their keys are stable; new keys may be added.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
import msgspec

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import (
    Amount,
    confirm,
    echo,
    json_option,
    mib,
    note,
    plain,
    show_fields,
    show_json,
    show_table,
    size,
    yes_option,
)
from rlinf_actors.cli.process_figures import figures_of
from rlinf_actors.cli.queries import ask_head, head_option, status_of
from rlinf_actors.cli.worker_counts import counts_dict, counts_text
from rlinf_actors.errors import UsageError
from rlinf_actors.messaging.routes import COLUMNS, lines
from rlinf_actors.model.readable import duration
from rlinf_actors.net.host import host_key
from rlinf_actors.plurals import counted
from rlinf_actors.runtime.progress import Facts, named
from rlinf_actors.sampling.hardware_text import hardware_text, held_on, probed
from rlinf_actors.sampling.node_names import node_names
from rlinf_actors.security.keyfile import who
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import Done, EndGroup, Status
from rlinf_actors.wire.hook_values import HookState
from rlinf_actors.wire.program import DriverState
from rlinf_actors.wire.values import GroupState, LeaseState, NodeState, WorkerPulse, WorkerState


@click.command()
@head_option
@json_option
def status(head: str | None, as_json: bool) -> None:
    """Show the state of the cluster: its head, nodes, groups and clients."""
    endpoint, found = status_of(head)
    data = summary(endpoint, found)
    if as_json:
        show_json(data)
        return
    show_fields(
        {
            "head": f"{endpoint} (rlinf-actors {found.version}, up {duration(found.uptime_s)})",
            "nodes": _counts(data["nodes"]),
            "hardware": hardware_text(data["hardware"], found.leases) or "none",
            "groups": _counts(data["groups"]) + (f" ({data['detached']} detached)" if data["detached"] else ""),
            "workers": counts_text(data),
            "leases": [_lease(one) for one in found.leases] or "none",
            "drivers": [f"{driver.told(found.at)}: job {driver.namespace}" for driver in found.drivers] or "none",
            "clients": _others(found),
        }
    )
    for stop in data["estop"]:
        echo(f"stopped   {plain(stop)}")
    for hook in found.hooks:
        echo(f"notify    {plain(_hook(hook))}")
    for trouble in data["trouble"]:
        echo(f"trouble   {plain(trouble)}")
    for fault in data["faults"]:
        echo(f"fault     {plain(fault['node'])}: {plain(fault['text'])}")


def summary(endpoint: str, found: Status) -> dict[str, Any]:
    hardware: Counter[str] = Counter()
    for node in found.nodes:
        if node.state != "lost":
            hardware.update(probed(node))
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
        **counts_dict(worker for group in found.groups for worker in group.workers),
        "leases": [
            {
                **msgspec.structs.asdict(lease),
                "held_s": round(lease.held_s, 3),
                "free_in_s": None if lease.free_in_s is None else round(lease.free_in_s, 3),
            }
            for lease in found.leases
        ],
        "drivers": [driver_dict(driver) for driver in found.drivers],
        "clients": list(found.clients),
        "hooks": [msgspec.structs.asdict(hook) for hook in found.hooks],
        "estop": list(found.stopped),
        "faults": [
            {"node": node.report.hostname, "text": fault} for node in found.nodes for fault in node.report.faults
        ],
    }


def _hook(hook: HookState) -> str:
    counts = {"sent": hook.sent, "failed": hook.failed, "dropped": hook.dropped, "waiting": hook.waiting}
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "sent")
    return f"{hook.name}: {said}{f'; the last one: {hook.fault}' if hook.fault else ''}"


def _lease(lease: LeaseState) -> str:
    held = f"{lease.title}: group {lease.group} of job {lease.namespace}, {duration(lease.held_s)}, {lease.owner}"
    return held if lease.free_in_s is None else f"{held}; its node is lost, free in {duration(lease.free_in_s)}"


def driver_dict(driver: DriverState) -> dict[str, Any]:
    """Return the JSON object of a driver. ``user`` to ``started`` are what the driver says of itself: "" and None if
    it is no Python program. ``node_rank`` is None on a machine without an agentd.
    """
    return {
        "incarnation": driver.incarnation,
        "job": driver.namespace,
        "user": driver.program.user,
        "hostname": driver.program.hostname,
        "pid": driver.pid,
        "script": driver.program.script,
        "started": driver.program.started or None,
        "key": driver.key,
        "node_rank": driver.node_rank if driver.node_rank >= 0 else None,
        "text": str(driver.program),
    }


def _others(found: Status) -> str:
    """Return the clients that are no drivers: workers and their children that talk to the head."""
    count = len(found.clients) - len(found.drivers)
    return f"{counted(count, 'worker')} and children of workers" if count else "none"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"


@click.command()
@head_option
@json_option
def nodes(head: str | None, as_json: bool) -> None:
    """List the nodes: rank, state, address, hardware."""
    _, found = status_of(head)
    rows, names = [node_dict(node) for node in found.nodes], node_names(found.nodes)
    if as_json:
        show_json(rows)
        return
    show_table(
        ("RANK", "HOST", "ADDRESS", "STATE", "SEEN", "CPUS", "MEMORY", "HARDWARE", "PYTHON"),
        [
            (
                "-" if row["rank"] is None else row["rank"],
                names[row["id"]] + (" (head)" if row["is_head"] else ""),
                f"{row['ip']} ({row['interface']})" if row["interface"] else row["ip"],
                row["state"],
                f"{duration(row['last_seen_s'])} ago",
                row["num_cpus"],
                size(row["memory_bytes"]),
                hardware_text(row["hardware"], held_on(node, found.leases)) or "-",
                row["python"],
            )
            for row, node in zip(rows, found.nodes, strict=True)
        ],
        "no node has registered",
    )


def node_dict(node: NodeState) -> dict[str, Any]:
    """Return the JSON object of a node, as `nodes --json` prints it. ``rank`` is None until the head has given the node
    a rank.
    """
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
        "hardware": probed(node),
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
        "admit": msgspec.to_builtins(node.report.admit),
        "closed": node.closed,
    }


ANSWER_S = 30.0
"""Seconds that the head may take to answer after a group's grace period is over."""


grace_option = click.option(
    "--grace",
    "grace_s",
    type=Amount(min=0.0),
    default=5.0,
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL (default 5).",
)
reason_option = click.option("--reason", default="", metavar="TEXT", help="Shown to callers of the group.")


@click.group(invoke_without_command=True)
@head_option
@json_option
@click.pass_context
def groups(context: click.Context, head: str | None, as_json: bool) -> None:
    """List the groups: name, class, state, nodes. A detached group does not end with its driver."""
    if context.invoked_subcommand is not None:
        context.obj = head
        return
    _, found = status_of(head)
    rows = [group_dict(group) for group in found.groups]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("JOB", "GROUP", "CLASS", "STATE", "WORKERS", "NODES"),
        [
            (
                row["namespace"],
                row["name"],
                row["class"],
                row["state"] + (", detached" if row["detached"] else ""),
                counts_text(row),
                ",".join(map(str, row["node_ranks"])),
            )
            for row in rows
        ],
        "no group is running",
    )


def group_dict(group: GroupState) -> dict[str, Any]:
    return {
        "namespace": group.namespace,
        "name": group.name,
        "class": group.cls,
        "state": group.state,
        "world_size": len(group.workers),
        **counts_dict(group.workers),
        "node_ranks": sorted({worker.node_rank for worker in group.workers}),
        "owner": group.owner,
        "detached": group.detached,
    }


@groups.command()
@click.argument("name", shell_complete=complete.groups)
@click.option(
    "--job", "namespace", metavar="NAME", help="The job; needed if several have such a group.",
    shell_complete=complete.jobs,
)  # fmt: skip
@grace_option
@reason_option
@yes_option
@head_option
@json_option
@click.pass_obj
def stop(
    group_head: str | None,
    name: str,
    namespace: str | None,
    grace_s: float,
    reason: str,
    yes: bool,
    head: str | None,
    as_json: bool,
) -> None:
    """End a group, detached or not, and wait until its workers have ended."""
    endpoint, status = status_of(head or group_head)
    group = find_group(status.groups, name, namespace)
    what = group_text(status, group)
    note(what)
    confirm(yes, f"ends {what}", "End it?", can_ask=not as_json)
    end_group(endpoint, group, grace_s, reason)
    if as_json:
        show_json(group_dict(group))


def group_text(status: Status, group: GroupState) -> str:
    """Return what ends with a group, within a line: "group a of job j: 2 workers on nodes 0, 1, of ann's train.py"."""
    alive = [worker for worker in group.workers if worker.state != "gone"]
    nodes = ", ".join(str(rank) for rank in sorted({worker.node_rank for worker in alive}))
    held = [one.title for one in status.leases if (one.namespace, one.group) == (group.namespace, group.name)]
    text = f"group {group.name} of job {group.namespace}: {counted(len(alive), 'worker')}"
    text += f" on node{'s' * (',' in nodes)} {nodes}" if nodes else ""
    text += f", which hold{'s' * (len(alive) == 1)} {', '.join(held)}" if held else ""
    owner = "no driver (detached)" if group.detached else owner_of(status, group)
    return plain(f"{text}, of {owner}" if owner else text)


def owner_of(status: Status, group: GroupState) -> str:
    """Return the driver that owns a group, for people, "" if none is connected."""
    owner = next((one for one in status.drivers if one.incarnation == group.owner), None)
    return "" if owner is None else owner.told(status.at)


def end_group(endpoint: str, group: GroupState, grace_s: float, reason: str) -> None:
    """Have the head end a group, and say when it has ended."""
    asked = EndGroup(group.namespace, group.name, grace_s, who(), reason)
    ask_head(endpoint, asked, Done, grace_s + ANSWER_S, partial(ending, [group]))
    note(f"group {group.name} of job {group.namespace} has ended")


def ending(groups: Sequence[GroupState], now: Status) -> Facts:
    """Return how many workers of *groups* have ended *now*, and which still run."""
    names = {(one.namespace, one.name) for one in groups}
    theirs = [one for one in now.groups if (one.namespace, one.name) in names]
    alive = [f"{one.name}:{worker.rank}" for one in theirs for worker in one.workers if worker.state != "gone"]
    count = sum(len(one.workers) for one in groups)
    whose = f" of {groups[0].name}" if len(groups) == 1 else ""
    return Facts(f"{count - len(alive)} of {counted(count, 'worker')}{whose} ended", named("still running: ", alive))


def find_group(groups: Sequence[GroupState], name: str, namespace: str | None) -> GroupState:
    """Return the group called *name* in the job *namespace*, None for any job. Raise UsageError if no group or
    several groups match.
    """
    found = [group for group in groups if group.name == name and namespace in (None, group.namespace)]
    if len(found) == 1:
        return found[0]
    if found:
        spaces = ", ".join(sorted(group.namespace for group in found))
        raise UsageError(f"{len(found)} groups are called {name!r}: say which by --job ({spaces})")
    raise no_group(groups, name, "" if namespace is None else f" in job {namespace!r}")


def no_group(groups: Sequence[GroupState], name: str, where: str = "") -> UsageError:
    """Return the error that there is no group called *name*; *where* says in which job."""
    known = ", ".join(sorted(f"{group.name} ({group.namespace})" for group in groups)) or "none at all"
    ended = f"if it has ended, `rlinf-actors events --group {name}` says how it ended"
    return UsageError(f"there is no group {name!r}{where}; there are: {known}; {ended}")


@click.command()
@click.argument("group", required=False, shell_complete=complete.groups)
@head_option
@json_option
def workers(group: str | None, head: str | None, as_json: bool) -> None:
    """List the workers, or only those of GROUP: state, node, process, and how they ended.

    CPU time and memory are shown for the workers on this machine.
    """
    _, found = status_of(head)
    if group is not None and all(each.name != group for each in found.groups):
        raise no_group(found.groups, group)
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
        ("WORKER", "JOB", "STATE", "NODE", "ADDRESS", "PID", "CPU", "MEMORY", "RESTARTS", "CODE", "END"),
        [
            (
                row["name"],
                row["namespace"],
                _state(row),
                row["node_rank"],
                row["node_ip"],
                row["pid"] or "-",
                duration(row["process"]["cpu_s"]) if row["process"] else "-",
                mib(row["process"]["rss_bytes"]) if row["process"] else "-",
                row["restarts"],
                row["code"][:12] or "-",
                _end(row["exit"]),
            )
            for row in rows
        ],
        "no worker is running",
    )


def _state(row: dict[str, Any]) -> str:
    if row["unresponsive"]:
        return f"unresponsive for {duration(row['for_s'])}"
    if row["breakpoint"]:
        return f"{row['state']}, waits in a breakpoint at {row['breakpoint']} for {duration(row['breakpoint_for_s'])}"
    if row["method"]:
        waiting = f", {row['waiting']} more wait" if row["waiting"] else ""
        return f"{row['state']}, in {row['method']}() for {duration(row['for_s'])}{waiting}"
    return str(row["state"])


def worker_dict(group: GroupState, worker: WorkerState, now: float, *, near: bool = False) -> dict[str, Any]:
    """Return the JSON object of a worker, as `workers --json` prints it. *now* is the present time of the head.
    ``exit`` is None while the worker runs.

    ``unresponsive`` is the reason why the worker does not answer, and ``method`` the name of a call that has run for
    long, ``breakpoint`` where a thread waits in a breakpoint. Each is "" if there is no such condition.
    ``for_s`` is how long the silence or the call has lasted, and ``breakpoint_for_s`` the breakpoint, in seconds.
    ``process`` is None unless the worker runs on this machine (*near* is True).
    """
    pulse = worker.pulse or WorkerPulse()
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
        "code": worker.code,
        "unresponsive": pulse.unresponsive,
        "method": pulse.method,
        "waiting": pulse.waiting,
        "breakpoint": pulse.breakpoint,
        "breakpoint_for_s": round(max(0.0, now - pulse.breakpoint_since), 3) if pulse.breakpoint_since else 0.0,
        "for_s": round(max(0.0, now - pulse.since), 3) if worker.pulse else 0.0,
        "exit": worker.exit and msgspec.structs.asdict(worker.exit),
    }


def _end(end: dict[str, Any] | None) -> str:
    if end is None:
        return "-"
    how = f"signal {end['signal']}" if end["signal"] is not None else f"code {end['exit_code']}"
    oom = {"yes": ", out of memory", "suspected": ", out of memory suspected"}.get(end["oom"], "")
    return f"{end['kind']}, {how}{oom}" if end["kind"] in ("exited", "signalled") else f"{end['kind']}: {end['reason']}"


@click.command()
@json_option
def paths(as_json: bool) -> None:
    """Show by which path a buffer is sent from one worker to another. The first row whose conditions hold decides.

    RLINF_ACTORS_PATHS, such as "cpu=lane,accelerator=staged", puts another path first.
    """
    names = ("kind", *COLUMNS, "path", "meaning")
    rows = lines(Settings.load().paths)
    if as_json:
        show_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    show_table([name.replace("_", " ").upper() for name in names], rows, "")
