"""The command `rlinf-actors logs`: the output of workers, living or ended, from the log files of their nodes.

The head passes each question on to the agentd of a node (agentd.log_reader). A file is read in slices; the next one is
asked for when the slice before it is printed, so a slow reader costs no memory anywhere. With --follow the node
answers when there is output.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from functools import partial

import click
import msgspec

from rlinf_actors.cli.events_command import parse_since
from rlinf_actors.cli.output import echo, json_line, note, plain, warn
from rlinf_actors.cli.queries import Observer, head_option, observing, status_of
from rlinf_actors.compat import TaskGroup
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.log_lines import SlicedLines
from rlinf_actors.net import discovery
from rlinf_actors.shown import output
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.log_values import DAEMON_LOG, MAX_LOG_WAIT_S, LogFile, LogQuestion, LogSlice, file_name
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.protocol import QUESTIONS
from rlinf_actors.wire.values import NodeState
from rlinf_actors.worker.log_format import parsed

ANSWER_S = 12.0
"""Seconds that the head has to answer, beyond the time that a node waits for output: it waits for a node for 10 s."""
ASKED_NODES = 32
"""Most nodes that are asked at a time."""
LINES = 1000
"""Lines of each file that are shown if neither --lines nor --since says otherwise."""
LINE_BYTES = 4096
"""Bytes that are read for each of the last lines. Longer ones are fewer."""
_FILE = re.compile(r"(?P<group>.+)-(?P<rank>\d+)\.(?P<stream>out|err)(?P<older>\.1)?")


class Source(msgspec.Struct):
    """The log file of one stream of a worker on a node, with its older part; or that of an agentd."""

    node: NodeState
    job: str
    group: str
    rank: str
    stream: str
    sizes: dict[str, int]  # by name of the part, the older part first
    running: bool

    @property
    def worker(self) -> str:
        return f"{self.group}:{self.rank}" if self.rank else self.group


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


@click.command()
@click.argument("target", required=False, default="", metavar="[GROUP[:RANK]]")
@click.option("--job", "job", default="", metavar="NAME", help="The workers of this job; with GROUP, its group.")
@click.option(
    "--node",
    "node",
    default="",
    metavar="NODE",
    help="Only of this node (host name, id or rank), with the log file of its agentd, if it has one.",
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
    help=f"The last lines of each file. Default: {LINES}, or all with --since.",
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
    only_err: bool,
    as_json: bool,
    head: str | None,
) -> None:
    """Show the output of workers, also of those that have ended, from the log files of their nodes.

    Output of several files has the worker in front of each line. What a worker wrote to stderr is marked. --json prints
    for each line `node`, `job`, `worker`, `stream` ("out", "err" or "log"), `text`, and `record`: what a worker logged
    with RLINF_ACTORS_LOG_FORMAT=json, else null.
    """
    if not (target or job or node):
        raise UsageError("name a group (GROUP or GROUP:RANK), a job (--job NAME) or a node (--node NODE)")
    endpoint, status = status_of(head)
    if status.protocol < QUESTIONS:
        raise UsageError(f"the head there is rlinf-actors {status.version} and reads no log files: upgrade it")
    limit = lines if lines is not None else (-1 if since else LINES)
    asyncio.run(
        _show(
            endpoint, status, target, job, node, _Wanted(follow, since, None if limit < 0 else limit, only_err, as_json)
        )
    )


class _Wanted(msgspec.Struct, frozen=True):
    follow: bool
    since: float
    limit: int | None
    only_err: bool
    as_json: bool


async def _show(endpoint: str, status: Status, target: str, job: str, node: str, wanted: _Wanted) -> None:
    nodes = _nodes(status, node)
    async with observing(endpoint, discovery.client_settings()) as client:
        sources = await _sources(
            client, nodes, _jobs(status, target, job), target, with_daemon=bool(node) and not target
        )
        if node and not (target or job or wanted.only_err) and not any(source.stream == "log" for source in sources):
            where = "in the journal of its unit (journalctl -u 'rlinf-agentd*'), or on its stderr"
            note(plain(f"the agentd of node {node} has no log file: its log is {where}"))
        if wanted.only_err:
            sources = [source for source in sources if source.stream == "err"]
        if not sources:
            where = f" on node {node}" if node else " on any node that answers"
            raise RlinfActorsError(f"there is no log file of {_what(target, job)}{where}")
        several = len({(source.job, source.worker, source.node.report.node_id) for source in sources}) > 1
        failed, printed = 0, False
        if wanted.follow:
            async with TaskGroup() as tasks:
                for source in sources:
                    tasks.create_task(_print(client, source, wanted, several))
            return
        for source in sources:
            try:
                printed = await _print(client, source, wanted, several) or printed
            except RlinfActorsError as error:
                failed += 1
                echo(plain(f"{source.worker} on {source.node.report.hostname}: {error}"), err=True)
        if failed:
            raise RlinfActorsError(f"{failed} of {len(sources)} log files were not read (above)")
        if not printed and wanted.limit != 0:
            stream = " on stderr" * wanted.only_err
            why = " since that time" if wanted.since else ": the log files are empty"
            note(plain(f"there is no output of {_what(target, job)}{stream}{why}"))


def _what(target: str, job: str) -> str:
    return " ".join([*[repr(target)] * bool(target), *[f"job {job!r}"] * bool(job)]) or "any worker"


def _nodes(status: Status, node: str) -> list[NodeState]:
    usable = [one for one in status.nodes if one.state != "lost"]
    if not node:
        return usable
    found = [one for one in usable if node in (one.report.hostname, one.report.node_id, str(one.rank))]
    if not found:
        known = ", ".join(one.report.hostname for one in usable) or "none"
        raise UsageError(f"there is no node {node!r} that could answer; there are: {known}")
    return found


def _jobs(status: Status, target: str, job: str) -> list[str | None]:
    """Return the jobs to ask nodes for. None stands for all: for a group that does not run (any more)."""
    if job:
        return [job]
    group = target.partition(":")[0]
    running = sorted({one.namespace for one in status.groups if one.name == group})
    if len(running) > 1:
        raise UsageError(f"several jobs have a group {group!r}: say which by --job; there are: {', '.join(running)}")
    return list(running) or [None]


async def _sources(
    client: Observer, nodes: Sequence[NodeState], jobs: Sequence[str | None], target: str, with_daemon: bool
) -> list[Source]:
    """Ask nodes for their log files, and return those of *target*. A node that does not answer is named on stderr."""
    at_once = asyncio.Semaphore(ASKED_NODES)

    async def ask(node: NodeState, job: str | None) -> list[tuple[NodeState, LogFile]]:
        try:
            async with at_once:
                answer = await _ask(client, node, LogQuestion(job))
        except RlinfActorsError as error:
            note(plain(f"node {node.report.hostname}: {error}"))
            return []
        if answer.more:
            warn(f"node {node.report.hostname} has {answer.more} more log files: name the job by --job")
        return [(node, file) for file in answer.files]

    found = await asyncio.gather(*(ask(node, job) for node in nodes for job in jobs))
    return _chosen([one for part in found for one in part], target, with_daemon)


def _once(files: Sequence[tuple[NodeState, LogFile]]) -> list[tuple[NodeState, LogFile]]:
    """Return each file once, with the node that runs its worker: agentds of one machine may share a directory."""

    def worker(node: NodeState, file: LogFile) -> tuple[str, str, str]:
        return node.report.hostname, file.namespace, file.name.removesuffix(".1")

    runs = {worker(node, file): node.report.node_id for node, file in files if file.running}
    kept: dict[tuple[str, str, str, int], tuple[NodeState, LogFile]] = {}
    for node, file in files:
        id = node.report.node_id
        key = (node.report.hostname if file.inode else id, file.namespace, file.name, file.inode)
        if key not in kept or runs.get(worker(node, file)) == id:
            kept[key] = (node, file)
    return list(kept.values())


def _chosen(files: Sequence[tuple[NodeState, LogFile]], target: str, with_daemon: bool) -> list[Source]:
    group, _, rank = target.partition(":")
    sources: dict[tuple[str, str, str], Source] = {}
    for node, file in _once(files):
        if file.name == DAEMON_LOG and not file.namespace:
            if with_daemon:
                sources[node.report.node_id, "", DAEMON_LOG] = Source(
                    node, "", "agentd", "", "log", {file.name: file.size}, True
                )
            continue
        parts = _FILE.fullmatch(file.name)
        if parts is None or (group and file_name(group) != parts["group"]) or (rank and parts["rank"] != rank):
            continue
        key = node.report.node_id, file.namespace, file.name.removesuffix(".1")
        source = sources.setdefault(
            key, Source(node, file.namespace, group or parts["group"], parts["rank"], parts["stream"], {}, False)
        )
        source.sizes = dict(sorted([*source.sizes.items(), (file.name, file.size)], key=lambda part: -len(part[0])))
        source.running = source.running or file.running
    jobs = sorted({source.job for source in sources.values() if source.job})
    if group and len(jobs) > 1:
        raise UsageError(f"several jobs had a group {group!r}: say which by --job; there are: {', '.join(jobs)}")
    order = {"log": 0, "out": 1, "err": 2}
    return sorted(
        sources.values(),
        key=lambda one: (one.job, one.group, int(one.rank or 0), one.node.rank, order[one.stream]),
    )


async def _print(client: Observer, source: Source, wanted: _Wanted, several: bool) -> bool:
    """Print a log file, and with --follow what comes after it, until its worker has ended. Return True if there was
    output.
    """
    found = False
    lines = SlicedLines(partial(_line, source, several, wanted.as_json), wanted.limit)
    job = source.job if source.rank else None
    names = list(source.sizes)
    skipped = 0 if wanted.limit is None else max(0, sum(source.sizes.values()) - wanted.limit * LINE_BYTES)
    for name in names:
        last = name == names[-1]
        begin = min(skipped, source.sizes[name])
        skipped -= begin
        if begin == source.sizes[name] and not last:
            continue
        question = LogQuestion(job, name, offset=begin, since=wanted.since)
        while True:
            answer = await _ask(client, source.node, question)
            if answer.lost:
                note(plain(f"{source.worker}: some of its output is gone: its log files were renamed meanwhile"))
            lines.feed(answer.data)
            found = found or bool(answer.data)
            question = msgspec.structs.replace(question, offset=answer.offset, inode=answer.inode, since=0.0)
            if answer.data:
                continue
            if not (last and wanted.follow) or answer.ended:
                break
            if not question.wait_s:
                lines.end(unfinished=False)
                question = msgspec.structs.replace(question, wait_s=MAX_LOG_WAIT_S)
    lines.end()
    return found


def _line(source: Source, several: bool, as_json: bool, text: str) -> None:
    node = source.node.report.hostname
    if as_json:
        echo(json_line(line_dict(source, text)))
        return
    mark = " stderr" if source.stream == "err" else ""
    echo(output(text), lead=plain(f"[{source.worker}@{node}{mark}] ") if several else "")


def line_dict(source: Source, text: str) -> dict[str, object]:
    """Return what --json prints for a line."""
    return {
        "node": source.node.report.hostname,
        "job": source.job,
        "worker": source.worker,
        "stream": source.stream,
        "text": text,
        "record": parsed(text),
    }


async def _ask(client: Observer, node: NodeState, question: LogQuestion) -> LogSlice:
    request = AskNode(node.report.node_id, question)
    ask = client.listen if question.wait_s else client.request
    answer = answer_of(await ask(request, ANSWER_S + question.wait_s), LogSlice)
    if answer.fault:
        raise RlinfActorsError(answer.fault)
    return answer
