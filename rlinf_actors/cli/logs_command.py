"""The command `rlinf-actors logs`: the output of workers, living or ended, from the log files of their nodes.

The head passes each question on to the agentd of a node (agentd.log_reader). log_sources chooses the files, log_reading
reads them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

import click
import msgspec

from rlinf_actors.cli import complete
from rlinf_actors.cli.events_command import parse_since
from rlinf_actors.cli.log_reading import KEPT_BYTES, Follower, Line, Reading, last_lines, merge
from rlinf_actors.cli.log_sources import (
    LAST,
    Source,
    clock,
    in_words,
    jobs_of,
    nodes_of,
    of_job,
    sources_of,
    told_apart,
    what,
)
from rlinf_actors.cli.output import echo, json_line, note, plain
from rlinf_actors.cli.queries import Observer, head_option, observing, status_of
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.net import discovery
from rlinf_actors.net.loop import Tasks
from rlinf_actors.plurals import counted
from rlinf_actors.shown import output
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.log_values import MAX_LOG_SLICE, LogMark
from rlinf_actors.worker.log_format import parsed

LINES = 1000
"""Lines of each worker that are shown if neither --lines nor --since says otherwise."""
SEARCHED_WORKERS = 8
"""Most workers whose last lines are searched at a time."""
LEAST_KEPT = 1 << 14
"""Least bytes of a file of which lines are kept while lines are merged."""


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> float:
    """Parse --since: return a time in seconds since the epoch, 0 for none."""
    if value is None:
        return 0.0
    since = parse_since(context, parameter, value)
    if since.seq:
        raise click.BadParameter(f"{value!r} is neither an age such as 30s, 10m, 2h or 1d, nor a time such as 14:30")
    return since.begins(time.time())


def _count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse --lines: return a number, -1 for all, None if the option is not given."""
    if value is None or value == "all":
        return -1 if value else None
    if not re.fullmatch(r"\d{1,9}", value):
        raise click.BadParameter(f"{value!r} is neither a number nor 'all'")
    return int(value)


def _id(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """Check --job-id: return it, "" if it is not given."""
    if value and value != LAST and not re.fullmatch("[0-9a-f]{8}", value):
        raise click.BadParameter(f"{value!r} is neither '{LAST}' nor an id of eight digits, as --json shows it")
    return value or ""


@click.command()
@click.argument("target", required=False, default="", metavar="[GROUP[:RANK]]", shell_complete=complete.targets)
@complete.job_option("The workers of this job; with GROUP, its group.")
@click.option(
    "--node",
    "node",
    default="",
    metavar="NODE",
    help="Only of this node (host name, id or rank), with the log file of its agentd, if it has one.",
    shell_complete=complete.nodes,
)
@click.option("--follow", "-f", is_flag=True, help="Wait for further output, until the workers have ended.")
@click.option(
    "--since",
    callback=_time,
    metavar="AGE|TIME",
    help="Only output not older than an age (30s, 10m, 2h, 1d) or a time (14:30: the last such time).",
)
@click.option(
    "--lines",
    "-n",
    callback=_count,
    metavar="NUMBER|all",
    help=f"The last lines of each worker. Default: {LINES}, or all with --since.",
)
@click.option(
    "--job-id",
    "id",
    callback=_id,
    metavar="ID|last",
    help="Where several jobs of one name have written: only the output of the last one, or of this one.",
)
@click.option("--stderr", "only_err", is_flag=True, help="Only what workers wrote to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line, with stable keys.")
@head_option
def logs(
    target: str,
    job: str,
    node: str,
    follow: bool,
    since: float,
    lines: int | None,
    id: str,
    only_err: bool,
    as_json: bool,
    head: str | None,
) -> None:
    """Show the output of workers, also of those that have ended, from the log files of their nodes.

    Output of several workers has the worker in front of each line. What a worker wrote to stderr is marked. Lines are
    in the order of the times that --json shows as `at`. A node notes these about once a second for each file: within
    that second, the lines of a file stay together, and stdout comes before stderr. With --follow, lines that come
    later are shown as they come.

    If a node is lost or does not answer, the others are shown, and the command fails. --follow waits for a head that is
    away.

    A job appends to the files of earlier jobs of its name: a heading with the job's id and begin is before the output
    of each. --json prints for each line `node`, `job`, `job_id`, `worker`, `stream` ("out", "err" or "log"), `at`,
    `text`, and `record`: what a worker logged with RLINF_ACTORS_LOG_FORMAT=json, else null.
    """
    if not (target or job or node):
        raise UsageError("name a group (GROUP or GROUP:RANK), a job (--job NAME) or a node (--node NODE)")
    endpoint, status = status_of(head)
    limit = lines if lines is not None else (-1 if since else LINES)
    wanted = _Wanted(follow, since, None if limit < 0 else limit, id, only_err, as_json)
    asyncio.run(_show(endpoint, status, target, job, node, wanted))


class _Wanted(msgspec.Struct, frozen=True):
    follow: bool
    since: float
    limit: int | None
    id: str
    only_err: bool
    as_json: bool


class _Shown:
    """Prints lines, and collects why some are missing."""

    def __init__(self, wanted: _Wanted, several: bool, apart: Sequence[str]) -> None:
        self.failed: dict[str, None] = {}  # the files that could not be read
        self.printed = False
        self._wanted = wanted
        self._several = several
        self._apart = apart
        self._jobs: dict[str, str] = {}  # id of the job whose output was printed last, by worker

    def line(self, reading: Reading, line: Line) -> None:
        """Print a line, below a heading where the output of another job of the name begins."""
        self.printed = True
        source, mark, wanted = reading.source, line.mark, self._wanted
        if wanted.as_json:
            echo(json_line(line_dict(source, line.text, mark)))
            return
        where = f"{source.worker}@{source.node.report.hostname}"
        job = mark.job if mark is not None else ""
        if source.job in self._apart and job != self._jobs.get(where):
            self._jobs[where] = job
            begun = source.jobs.get(job)
            which = "an earlier one" if begun is None else f"id {job}, from {clock(begun)}"
            echo(plain(f"== {where}: job {source.job}, {which} =="))
        is_marked = source.stream == "err" and (self._several or not wanted.only_err)
        parts = [*[where] * self._several, *["stderr"] * is_marked]
        echo(output(line.text), lead=plain(f"[{' '.join(parts)}] ") if parts else "")

    def fails(self, reading: Reading, error: RlinfActorsError) -> None:
        """Say that a file was not read, or not to its end."""
        source = reading.source
        self.failed[f"{source.worker} {source.stream} {source.node.report.node_id}"] = None
        note(plain(f"{source.worker} on {source.node.report.hostname}: {error}"))


async def _show(endpoint: str, status: Status, target: str, job: str, node: str, wanted: _Wanted) -> None:
    nodes, lost = nodes_of(status, node, target, job)
    async with observing(endpoint, discovery.client_settings()) as client:
        sources, silent = await sources_of(
            client, nodes, jobs_of(status, target, job), target, with_daemon=bool(node) and not target
        )
        unread = [*[f"not asked: {in_words([one])}" for one in lost], *silent]
        for one in unread:
            note(plain(f"{one}: its files may have more"))
        if node and not (target or job or wanted.only_err or any(source.stream == "log" for source in sources)):
            where = "in the journal of its unit (journalctl -u 'rlinf-agentd*'), or on its stderr"
            note(plain(f"the agentd of node {node} has no log file: its log is {where}"))
        if wanted.only_err:
            sources = [source for source in sources if source.stream == "err"]
        if not sources:
            where = f" on node {node}" if node else " on any node that answers"
            raise RlinfActorsError(f"there is no log file of {what(target, job)}{where}")
        if wanted.id:
            sources = of_job(sources, wanted.id, what(target, job))
        apart = [] if wanted.as_json else told_apart(sources)
        several = len({_worker(source) for source in sources}) > 1 or bool(unread)
        shown = _Shown(wanted, several, apart)
        readings = await _readings(client, sources, wanted, shown)
        if wanted.follow:
            await merge(readings, shown.line, lambda reading, error: None, finish=False)  # which is met again below
            unread += await _follow(client, readings, shown)
        else:
            await merge(readings, shown.line, shown.fails, finish=True)
            if not (shown.printed or shown.failed) and wanted.limit != 0:
                stream = " on stderr" * wanted.only_err
                why = " since that time" if wanted.since else ": the log files are empty"
                note(plain(f"there is no output of {what(target, job)}{stream}{why}"))
    missing = [
        *[f"{len(shown.failed)} of {counted(len(sources), 'log file')}"] * bool(shown.failed),
        *[f"those of {counted(len(unread), 'node')}"] * bool(unread),
    ]
    if missing:
        raise RlinfActorsError(f"not all log files were read: {' and '.join(missing)} were not (above)")


def _worker(source: Source) -> tuple[str, str, str]:
    return source.job, source.worker, source.node.report.node_id


async def _readings(client: Observer, sources: list[Source], wanted: _Wanted, shown: _Shown) -> list[Reading]:
    """Return what reads the lines that are to be shown."""
    most = min(MAX_LOG_SLICE, max(LEAST_KEPT, KEPT_BYTES // len(sources)))
    if wanted.limit is None:
        return [Reading(client, source, wanted.since, most=most) for source in sources]
    limit, at_once = wanted.limit, asyncio.Semaphore(SEARCHED_WORKERS)
    of_worker: dict[tuple[str, str, str], list[Source]] = {}
    for source in sources:
        of_worker.setdefault(_worker(source), []).append(source)

    async def search(files: list[Source]) -> list[Reading]:
        async with at_once:
            found = await last_lines(client, files, limit, wanted.since, shown.fails, finish=not wanted.follow)
        return [
            Reading(client, source, start=start, most=most, left=None if wanted.follow else count)
            for source, start, count in found
        ]

    return [reading for part in await asyncio.gather(*map(search, of_worker.values())) for reading in part]


async def _follow(client: Observer, readings: Sequence[Reading], shown: _Shown) -> list[str]:
    """Print what comes, until all workers have ended. Return the nodes that were lost meanwhile."""
    follower = Follower(client, shown.line, shown.fails)
    tasks = Tasks()
    try:
        await asyncio.gather(
            *[tasks.start(follower.follow(one), "printing what comes", expected=Exception) for one in readings]
        )
    finally:  # no task group: of an exception such as BrokenPipeError it would make another one
        await tasks.close()
    return list(follower.lost.values())


def line_dict(source: Source, text: str, mark: LogMark | None) -> dict[str, object]:
    """Return what --json prints for a line."""
    return {
        "node": source.node.report.hostname,
        "job": source.job,
        "job_id": mark.job or None if mark is not None else None,
        "worker": source.worker,
        "stream": source.stream,
        "at": mark.at if mark is not None else None,
        "text": text,
        "record": parsed(text),
    }
