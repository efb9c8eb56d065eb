"""The command `rlinf-actors stack`: what workers do, and what they wait for.

Each worker's I/O thread answers, through its agentd and the head. `stack_report` makes the texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click

from rlinf_actors.cli import complete
from rlinf_actors.cli.output import echo, json_option, note, plain, show_json
from rlinf_actors.cli.queries import head_option, observing, status_of
from rlinf_actors.cli.stack_report import ShownWorker, report_dict, report_lines
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.readable import ranges
from rlinf_actors.net import discovery
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.plurals import counted
from rlinf_actors.sampling.node_names import names_by_rank
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.stack_values import (
    IO_THREAD,
    MAX_ASKED,
    NATIVE,
    PY_SPY,
    SIGNAL,
    StackAnswer,
    StackQuestion,
    WorkerStacks,
)
from rlinf_actors.wire.values import GroupState, WorkerState

ANSWER_S = 12.0
"""Seconds that the head has to answer: it waits for a node for up to 10 s."""
OUTSIDE_S = 65.0
"""The same for stacks that are taken from outside: the head waits for up to 60 s."""
OUTSIDE_ASKED = 8
"""Most workers of a node in one question for stacks from outside: the node takes four at a time."""
ASKED_NODES = 32
"""Most nodes that are asked at a time."""

Place = tuple[GroupState, WorkerState]


@click.command()
@click.argument("target", required=False, default="", metavar="[GROUP[:RANK]]", shell_complete=complete.targets)
@complete.job_option("The workers of this job; with GROUP, its group.")
@click.option("--all", "every", is_flag=True, help="All workers of the cluster that you may see.")
@click.option(
    "--signal", "level", flag_value=SIGNAL, help="Stacks that C code of the workers writes; also if they do not answer."
)
@click.option("--py-spy", "level", flag_value=PY_SPY, help="Stacks that py-spy reads on the nodes; likewise.")
@click.option("--native", "level", flag_value=NATIVE, help="The same, with the frames of C code.")
@click.option(
    "--frames", "all_frames", is_flag=True, help="Show the frames of rlinf_actors, too. --json has them always."
)
@head_option
@json_option
def stack(
    target: str, job: str, every: bool, level: str | None, all_frames: bool, head: str | None, as_json: bool
) -> None:
    """Show what workers do: their calls, what they wait for, and the stacks of their threads and asyncio tasks.

    Workers with equal stacks are shown once. Cycles of waits, such as deadlocks, come first. The workers go on: their
    I/O threads answer. Child members are not asked.

    A worker whose I/O thread does not answer, because C code holds the interpreter's lock, shows its stacks by --signal
    or --py-spy. The signal can interrupt system calls of a robot's SDK, and py-spy stops the worker for some
    milliseconds; without these options no worker is interrupted. With them the command fails if a worker shows no
    stacks, for example because py-spy is not installed on its node.
    """
    if every == bool(target or job):
        raise UsageError("name a group (GROUP or GROUP:RANK), a job (--job NAME), or --all")
    endpoint, status = status_of(head)
    chosen = select(status, target, job)
    if not chosen:
        note("no worker is running")
    workers = asyncio.run(_ask(endpoint, status, chosen, level or IO_THREAD)) if chosen else []
    if as_json:
        show_json(report_dict(workers))
    else:
        for line in report_lines(workers, all_frames):
            echo(plain(line))
    silent = [one for one in workers if one.answer.fault]
    if level and silent:  # without these options a worker that does not answer is a finding
        first = silent[0]
        raise RlinfActorsError(
            f"{len(silent)} of {counted(len(workers), 'worker')} gave no stacks: "
            f"{first.group}:{first.rank} on {first.place or first.node}: {first.answer.fault}"
        )


def select(status: Status, target: str, job: str) -> list[Place]:
    """Return the workers that *target*, a GROUP or GROUP:RANK, and *job* name; all if both are "".

    Raises:
        UsageError: there is no such group, rank or job, or several jobs have the group.
    """
    name, _, rank = target.partition(":")
    groups = [group for group in status.groups if job in ("", group.namespace) and name in ("", group.name)]
    if not groups and (name or job):
        known = ", ".join(f"{group.name} of job {group.namespace}" for group in status.groups) or "none at all"
        what = " ".join(["group", *[repr(name)] * bool(name), *[f"of job {job!r}"] * bool(job)])
        ended = f"; if it has ended, `rlinf-actors events --group {name}` says how it ended" if name else ""
        raise UsageError(f"there is no {what}; there are: {known}{ended}")
    if name and len(groups) > 1:
        jobs = ", ".join(group.namespace for group in groups)
        raise UsageError(f"several jobs have a group {name!r}: say which by --job; there are: {jobs}")
    found = [(group, worker) for group in groups for worker in group.workers if worker.state != "gone"]
    if not rank:
        return found
    chosen = [place for place in found if str(place[1].rank) == rank]
    if not chosen:
        runs = ranges(worker.rank for _, worker in found) or "none"
        ended = ranges(worker.rank for worker in groups[0].workers if worker.state == "gone")
        what = f"group {name!r} has no running rank {rank!r}; there are: {runs}"
        raise UsageError(what + (f"; ended: {ended}" if ended else ""))
    return chosen


async def _ask(endpoint: str, status: Status, chosen: Sequence[Place], level: str) -> list[ShownWorker]:
    nodes = {node.rank: node.report for node in status.nodes if node.rank >= 0}
    names = names_by_rank(status.nodes)
    parts: dict[tuple[str, str], list[str]] = {}
    for group, worker in chosen:
        if worker.node_rank in nodes:
            parts.setdefault((nodes[worker.node_rank].node_id, group.namespace), []).append(worker.id)
    answers: dict[str, WorkerStacks] = {}
    at_once = asyncio.Semaphore(ASKED_NODES)

    async def ask(client: ControlClient, node_id: str, job: str, ids: list[str]) -> None:
        most = MAX_ASKED if level == IO_THREAD else OUTSIDE_ASKED
        for n in range(0, len(ids), most):
            question = StackQuestion(job, ids[n : n + most], level)
            async with at_once:
                found = await _answers(client, node_id, question)
            answers.update((one.id, one) for one in found)

    async with observing(endpoint, discovery.client_settings()) as client:
        await asyncio.gather(*(ask(client, node_id, job, ids) for (node_id, job), ids in parts.items()))
    return [
        ShownWorker(
            group.namespace,
            group.name,
            worker.rank,
            nodes[worker.node_rank].hostname if worker.node_rank in nodes else worker.node_ip,
            answers.get(worker.id) or WorkerStacks(worker.id, fault="its node is not known to the head"),
            names.get(worker.node_rank, worker.node_ip),
        )
        for group, worker in sorted(chosen, key=lambda one: (one[0].namespace, one[0].name, one[1].rank))
    ]


async def _answers(client: ControlClient, node_id: str, asked: StackQuestion) -> list[WorkerStacks]:
    """Return the answers of the workers; if their node does not answer, say that of each."""
    try:
        limit_s = ANSWER_S if asked.level == IO_THREAD else OUTSIDE_S
        return answer_of(await client.request(AskNode(node_id, asked), limit_s), StackAnswer).workers
    except RlinfActorsError as error:
        return [WorkerStacks(id, fault=str(error), level=asked.level) for id in asked.ids]
