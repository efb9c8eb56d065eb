"""The commands `rlinf-actors worker show|kill` and `rlinf-actors group list|stop`."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import confirm, echo, json_option, note, plain, show_fields, show_json, yes_option
from rlinf_actors.cli.queries import ask_head, head_option, status_of
from rlinf_actors.cli.stack_command import select
from rlinf_actors.cli.views import find_group, groups, owner_of, reason_option, worker_dict
from rlinf_actors.cli.views import stop as stop_group
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.readable import duration
from rlinf_actors.net.host import host_key
from rlinf_actors.runtime.progress import Facts, named, seen
from rlinf_actors.sampling.node_names import names_by_rank
from rlinf_actors.security.keyfile import who
from rlinf_actors.wire.client_messages import KillWorker, Status, WorkerKilled
from rlinf_actors.wire.debug_values import attach_command
from rlinf_actors.wire.values import GroupState, WorkerState

ANSWER_S = 30.0
"""Seconds that the end of a killed worker may take: a robot worker makes its robots safe first."""

job_option = click.option(
    "--job",
    default="",
    metavar="NAME",
    help="The job; needed if several have such a group.",
    shell_complete=complete.jobs,
)


@click.group()
def group() -> None:
    """List the groups, or end one. `groups` and `groups stop` are the same."""


group.add_command(groups, "list")
group.add_command(stop_group)


@click.group()
def worker() -> None:
    """Show a worker, or kill it."""


@worker.command()
@click.argument("target", metavar="GROUP:RANK", shell_complete=complete.workers)
@job_option
@head_option
@json_option
def show(target: str, job: str, head: str | None, as_json: bool) -> None:
    """Show a worker: its state, node, process, owner and robots, what it does, and how it ended."""
    _, status = status_of(head)
    found = _worker_of(status, *place_of(status, target, job, ended=True))
    if as_json:
        show_json(found)
        return
    names = names_by_rank(status.nodes)
    fields: dict[str, Any] = {
        "worker": f"{found['name']} of job {found['namespace']}, {found['class']}",
        "state": found["state"],
        "node": f"{names.get(found['node_rank'], found['node'])} ({found['node_ip']}), process {found['pid'] or '-'}",
        "owner": found["owner"] or "none (detached)",
        "robots": found["robots"] or "none",
        "restarts": found["restarts"],
    }
    if found["unresponsive"]:
        fields["silent"] = f"{found['unresponsive']}, for {duration(found['for_s'])}"
    if found["breakpoint"]:
        how = attach_command(found["name"], found["namespace"])
        fields["breakpoint"] = f"at {found['breakpoint']} for {duration(found['breakpoint_for_s'])}: {how}"
    if found["method"]:
        waiting = f", {found['waiting']} more wait" if found["waiting"] else ""
        fields["call"] = f"{found['method']}() for {duration(found['for_s'])}{waiting}"
    if found["exit"]:
        fields["end"] = [_ended(found["exit"]), *found["exit"]["stderr_tail"]]
    show_fields(fields)


@worker.command()
@click.argument("target", metavar="GROUP:RANK", shell_complete=complete.workers)
@job_option
@reason_option
@yes_option
@head_option
@json_option
def kill(target: str, job: str, reason: str, yes: bool, head: str | None, as_json: bool) -> None:
    """Kill a worker through its agentd, and wait until its end is certain. It is not started again.

    It gets SIGTERM and at once SIGKILL; a robot worker makes its robots safe first. Its calls fail; the other workers
    of its group go on.
    """
    endpoint, status = status_of(head)
    place = place_of(status, target, job)
    found = _worker_of(status, *place)
    robots = f", which holds {', '.join(found['robots'])}" if found["robots"] else ""
    what = f"{found['name']} of job {found['namespace']}{robots}: process {found['pid']} on {found['node']}"
    what += f", of {found['owner']}" if found["owner"] else ""
    if not as_json:
        echo(plain(what), err=True)
    confirm(yes, f"kills {what}", "Kill it?", can_ask=not as_json)
    asked = KillWorker(place[0].namespace, place[0].name, place[1].id, who(), reason)
    node = next((one for one in status.nodes if one.rank == place[1].node_rank), None)

    def look(now: Status) -> Facts:
        late = [seen(one) for one in now.nodes if node is not None and one.report.node_id == node.report.node_id]
        return Facts(f"waiting for the end of {found['name']} on {found['node']}", named("", late))

    _, answer = ask_head(endpoint, asked, WorkerKilled, ANSWER_S, look)
    exit = answer.exit
    certain = exit is not None and exit.kind != "node_lost"
    killed = _worker_of(status, place[0], place[1])
    if as_json:
        shown = None if exit is None else msgspec.structs.asdict(exit)
        show_json({**{key: killed[key] for key in KILLED}, "dead": certain, "exit": shown})
    if not certain:
        why = exit.reason if exit is not None else "the head does not say how it ended"
        raise RlinfActorsError(f"{found['name']} is given up, but its end is not confirmed: {why}")
    if exit is not None:
        where = f"process {found['pid']} on {found['node']}"
        note(f"{found['name']} ({where}) is dead: {_ended(msgspec.structs.asdict(exit))}")


KILLED = ("name", "namespace", "group", "rank", "id", "node", "pid", "robots")
"""The keys of `worker show` that `worker kill` prints too."""


def place_of(status: Status, target: str, job: str, ended: bool = False) -> tuple[GroupState, WorkerState]:
    """Return the worker GROUP:RANK and its group. With *ended*, one that has ended too, as long as its group runs."""
    name, _, rank = target.rpartition(":")
    if not name or not rank.isdecimal():
        raise UsageError(f"{target!r} is no GROUP:RANK")
    group = find_group([one for one in status.groups if job in ("", one.namespace)], name, None)
    found = next((worker for worker in group.workers if worker.rank == int(rank)), None)
    if ended and found is not None:
        return group, found
    (place,) = select(status, target, job)
    return place


def _worker_of(status: Status, group: GroupState, worker: WorkerState) -> dict[str, Any]:
    """Return the JSON object of `worker show`: that of `workers`, with "class", "node", "owner" and "robots"."""
    nodes = {node.rank: node.report for node in status.nodes if node.rank >= 0}
    node = nodes.get(worker.node_rank)
    here = node is not None and node.host == host_key()
    name = f"{group.name}:{worker.rank}"
    held = [one for one in status.leases if (one.namespace, one.group) == (group.namespace, group.name)]
    return {
        **worker_dict(group, worker, status.at, near=here),
        "class": group.cls,
        "node": node.hostname if node is not None else worker.node_ip,
        "owner": owner_of(status, group),
        "robots": [one.title for one in held if name in one.workers],
    }


def _ended(end: dict[str, Any]) -> str:
    how = str(end["kind"])
    if end["signal"] is not None:
        how += f", signal {end['signal']}"
    elif end["exit_code"] is not None:
        how += f", exit code {end['exit_code']}"
    return f"{how}: {end['reason']}" if end["reason"] else how
