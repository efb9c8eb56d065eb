"""The commands `rlinf-actors trace start|stop|fetch`: a timeline of a running job, without a change to its program.

The head passes `start` and `stop` to the job's driver, and to the agentds of the job's workers, which tell the workers'
I/O threads. The workers record in files (agentd.traces) and the driver in its memory (runtime.driver_trace). `fetch`
reads them and makes one Chrome trace (cluster.trace_files).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from rlinf_actors.cli import complete
from rlinf_actors.cli.job_command import find_job, jobs_of
from rlinf_actors.cli.output import check_directory, echo, json_option, note, plain, show, warn
from rlinf_actors.cli.queries import head_option, observing, status_of
from rlinf_actors.cluster.trace_files import ANSWER_S, NodeTraces, Traced, TraceFile, TraceReport, aside, chrome_path
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.net import discovery
from rlinf_actors.plurals import counted
from rlinf_actors.tracing.ring import DEFAULT_EVENTS, MAX_EVENTS
from rlinf_actors.tracing.timeline import Timeline
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered, answer_of
from rlinf_actors.wire.protocol import expected
from rlinf_actors.wire.trace_values import SwitchedWorkers, TraceSwitch

ASKED_NODES = 32
"""Most nodes that are asked at a time."""

job_option = complete.job_option("The job. Default: the only one that runs.")


@click.group()
def trace() -> None:
    """Record a timeline of a running job: calls, messages, channel operations and spans of its driver and workers."""


@trace.command()
@job_option
@click.option(
    "--events",
    default=DEFAULT_EVENTS,
    show_default=True,
    type=click.IntRange(1, MAX_EVENTS),
    metavar="NUMBER",
    help="Events that each process keeps: the newest ones. An event takes 48 bytes.",
)
@head_option
@json_option
def start(job: str, events: int, head: str | None, as_json: bool) -> None:
    """Have the driver and all workers of a job record from now on, also workers that start later.

    Child members do not record in this way.
    """
    _switch(job, events, head, as_json)


@trace.command()
@job_option
@head_option
@json_option
def stop(job: str, head: str | None, as_json: bool) -> None:
    """Have the driver and the workers of a job record no longer.

    What they have recorded stays until the next `trace start`, or until 10 minutes after the job's last worker. That of
    the driver ends with the driver.
    """
    _switch(job, 0, head, as_json)


@trace.command()
@job_option
@click.option(
    "--output", "-o", default="trace.json", show_default=True, metavar="FILE", help="The file to write, for Perfetto."
)
@head_option
@json_option
def fetch(job: str, output: str, head: str | None, as_json: bool) -> None:
    """Write what the driver and the workers of a job have recorded until now. Open the file at https://ui.perfetto.dev."""
    endpoint, status = _status(head)
    name = _chosen(status, job)
    path = Path(output)
    check_directory(path)  # before the work
    report = asyncio.run(_fetch(endpoint, name, [*_drivers_of(status, name), *_nodes_of(status)], path))
    for process, count in sorted(report.fallen_out.items()):
        warn(f"{process}: {counted(count, 'event')} not in the trace: later ones took the room (start --events)")
    for line in report.missing:
        warn(f"the trace is not complete: {line}")
    if not report.processes:
        raise RlinfActorsError(f"job {name!r} has recorded nothing: run `rlinf-actors trace start --job {name}` first")
    found = trace_dict(name, path, report)
    where = f"{chrome_path(path)} (https://ui.perfetto.dev)"
    show(as_json, found, f"the trace of {counted(report.processes, 'process')} is in {where}")


def trace_dict(job: str, path: Path, report: TraceReport) -> dict[str, Any]:
    """Return what `trace fetch --json` prints."""
    return {"job": job, "file": str(chrome_path(path)), **msgspec.to_builtins(report)}


def switch_dict(job: str, events: int, answers: Sequence[tuple[Traced, SwitchedWorkers]]) -> dict[str, Any]:
    """Return what `trace start --json` and `trace stop --json` print. *answers* has each node and driver, with its
    answer.
    """
    confirmed = [(place.is_driver, one.workers) for place, one in answers]
    return {
        "job": job,
        "recording": bool(events),
        "workers": sum(number for is_driver, number in confirmed if not is_driver),
        "drivers": sum(number for is_driver, number in confirmed if is_driver),
        "failed": sum(one.failed for _, one in answers),
        "faults": [f"{place.name}: {text}" for place, one in answers for text in one.faults],
    }


def _switch(job: str, events: int, head: str | None, as_json: bool) -> None:
    endpoint, status = _status(head)
    name = _chosen(status, job)
    answers = asyncio.run(
        _ask(endpoint, TraceSwitch(name, events), [*_drivers_of(status, name), *_nodes_of(status, name)])
    )
    found = switch_dict(name, events, answers)
    faults = found["faults"]
    what = "record" if events else "record no longer"
    drivers = "the driver and " if found["drivers"] else ""
    show(as_json, found, f"{drivers}{counted(found['workers'], 'worker')} of job {name} {what}")
    for text in faults:
        echo(plain(text), err=True)
    if faults:
        raise RlinfActorsError(f"some processes of job {name!r} have not confirmed that they {what} (above)")
    if events:
        note(f"to look at it: rlinf-actors trace fetch --job {name}")


def _status(head: str | None) -> tuple[str, Status]:
    endpoint, status = status_of(head)
    return endpoint, status


def _chosen(status: Status, job: str) -> str:
    jobs = jobs_of(status)
    if job:
        return str(find_job(jobs, job)["name"])
    if len(jobs) != 1:
        known = ", ".join(one["name"] for one in jobs) or "none at all"
        raise UsageError(f"name the job (--job NAME); there are: {known}")
    return str(jobs[0]["name"])


def _drivers_of(status: Status, job: str) -> list[Traced]:
    """Return the drivers of *job*; not those that are no Python programs, which do not know this question."""
    mine = [one for one in status.drivers if one.namespace == job and one.program.user]
    return [Traced.driver(one, status.nodes) for one in mine]


def _nodes_of(status: Status, job: str = "") -> list[Traced]:
    """Return the living nodes, if *job* is given those with workers of it."""
    used = {
        worker.node_rank
        for group in status.groups
        for worker in group.workers
        if group.namespace == job and worker.state != "gone"
    }
    return [Traced.node(node) for node in status.nodes if node.state != "lost" and (not job or node.rank in used)]


async def _ask(endpoint: str, switch: TraceSwitch, places: Sequence[Traced]) -> list[tuple[Traced, SwitchedWorkers]]:
    at_once = asyncio.Semaphore(ASKED_NODES)

    async def ask(client: Any, place: Traced) -> SwitchedWorkers:
        async with at_once:
            try:
                reply = await client.request(AskNode(place.id, switch), ANSWER_S)
                return answer_of(reply, SwitchedWorkers)
            except RlinfActorsError as error:
                return SwitchedWorkers(faults=[str(error)])

    async with observing(endpoint, discovery.client_settings()) as client:
        answers = await asyncio.gather(*(ask(client, place) for place in places))
    return list(zip(places, answers, strict=True))


async def _fetch(endpoint: str, job: str, places: Sequence[Traced], path: Path) -> TraceReport:
    report, timeline = TraceReport(), Timeline()
    async with observing(endpoint, discovery.client_settings()) as client:

        async def ask(request: AskNode, kind: type[NodeAnswered], timeout: float) -> NodeAnswered:
            return expected(await client.request(request, timeout), kind)

        with TraceFile(path) as file:
            async for name, found, offset in NodeTraces(ask, job).read(places, report):
                report.count(name, found)
                await aside(partial(file.add, timeline.process(found, name, offset)))
            await aside(lambda: file.add(timeline.arrows()))
            if report.processes:
                file.finish(msgspec.to_builtins(report))
    return report
