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
from datetime import datetime

import click
import msgspec

from rlinf_actors.cli import complete
from rlinf_actors.cli.events_command import parse_since
from rlinf_actors.cli.output import echo, json_line, note, plain, warn
from rlinf_actors.cli.queries import Observer, head_option, observing, status_of
from rlinf_actors.compat import TaskGroup
from rlinf_actors.errors import RlinfActorsError, UsageError
from rlinf_actors.model.log_lines import SlicedLines
from rlinf_actors.net import discovery
from rlinf_actors.shown import output
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.log_values import DAEMON_LOG, MAX_LOG_WAIT_S, LogFile, LogMark, LogQuestion, LogSlice, file_name
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
LAST = "last"
"""The value of --job-id for the last job."""
LINE_BYTES = 4096
"""Bytes that are read for each of the last lines. Longer ones are fewer."""
_FILE = re.compile(r"(?P<group>.+)-(?P<rank>\d+)\.(?P<stream>out|err)(?P<older>\.1)?")


class Part(msgspec.Struct, frozen=True):
    """A log file, or its older part: its size, and the first marks of the jobs whose output is in it."""

    size: int
    jobs: Sequence[LogMark] = ()

    def span(self, id: str, goes_on: bool) -> tuple[int, int, bool]:
        """Return where the output of the job *id* begins and ends, and True if more of it may come; "" for all jobs.

        *goes_on* is True if the job writes the file, and may not have begun.
        """
        if not id:
            return 0, self.size, True
        numbers = [number for number, mark in enumerate(self.jobs) if mark.job == id]
        if not numbers:
            return self.size, self.size, goes_on
        after = self.jobs[numbers[-1] + 1 :]
        return self.jobs[numbers[0]].offset, after[0].offset if after else self.size, not after


class Source(msgspec.Struct):
    """The log file of one stream of a worker on a node, with its older part; or that of an agentd.

    Attributes:
        job: name of the job, as a directory.
        parts: by name, the older part first.
        only: id of the only job whose output is shown, "" for all jobs of that name.
        goes_on: True if that job is the last one, and its worker runs.
    """

    node: NodeState
    job: str
    group: str
    rank: str
    stream: str
    parts: dict[str, Part]
    running: bool
    only: str = ""
    goes_on: bool = False

    @property
    def worker(self) -> str:
        return f"{self.group}:{self.rank}" if self.rank else self.group

    @property
    def jobs(self) -> dict[str, float]:
        """The ids of the jobs whose output is in the files, each with the time of its begin there."""
        begun: dict[str, float] = {}
        for mark in (mark for part in self.parts.values() for mark in part.jobs if mark.job):
            begun[mark.job] = min(begun.get(mark.job, mark.at), mark.at)
        return begun


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
@click.option(
    "--job",
    "job",
    default="",
    metavar="NAME",
    help="The workers of this job; with GROUP, its group.",
    shell_complete=complete.jobs,
)
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
    help=f"The last lines of each file. Default: {LINES}, or all with --since.",
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

    Output of several files has the worker in front of each line. What a worker wrote to stderr is marked. A job appends
    to the files of earlier jobs of its name: a heading with the job's id and begin is before the output of each. --json
    prints for each line `node`, `job`, `job_id`, `worker`, `stream` ("out", "err" or "log"), `at`, `text`, and
    `record`: what a worker logged with RLINF_ACTORS_LOG_FORMAT=json, else null.
    """
    if not (target or job or node):
        raise UsageError("name a group (GROUP or GROUP:RANK), a job (--job NAME) or a node (--node NODE)")
    endpoint, status = status_of(head)
    if status.protocol < QUESTIONS:
        raise UsageError(f"the head there is rlinf-actors {status.version} and reads no log files: upgrade it")
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
        if wanted.id:
            sources = _of_job(sources, wanted.id, _what(target, job))
        jobs = [] if wanted.as_json else _told_apart(sources)
        several = len({(source.job, source.worker, source.node.report.node_id) for source in sources}) > 1
        failed, printed = 0, False
        if wanted.follow:
            async with TaskGroup() as tasks:
                for source in sources:
                    tasks.create_task(_print(client, source, wanted, several, source.job in jobs))
            return
        for source in sources:
            try:
                printed = await _print(client, source, wanted, several, source.job in jobs) or printed
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
                    node, "", "agentd", "", "log", {file.name: Part(file.size)}, True
                )
            continue
        parts = _FILE.fullmatch(file.name)
        if parts is None or (group and file_name(group) != parts["group"]) or (rank and parts["rank"] != rank):
            continue
        key = node.report.node_id, file.namespace, file.name.removesuffix(".1")
        source = sources.setdefault(
            key, Source(node, file.namespace, group or parts["group"], parts["rank"], parts["stream"], {}, False)
        )
        found = {**source.parts, file.name: Part(file.size, file.jobs)}
        source.parts = dict(sorted(found.items(), key=lambda part: -len(part[0])))
        source.running = source.running or file.running
    jobs = sorted({source.job for source in sources.values() if source.job})
    if group and len(jobs) > 1:
        raise UsageError(f"several jobs had a group {group!r}: say which by --job; there are: {', '.join(jobs)}")
    order = {"log": 0, "out": 1, "err": 2}
    return sorted(
        sources.values(),
        key=lambda one: (one.job, one.group, int(one.rank or 0), one.node.rank, order[one.stream]),
    )


def _of_job(sources: list[Source], id: str, what: str) -> list[Source]:
    """Return the sources with output of the job *id*, or, for "last", of the last job of each name; only that of them
    is shown.
    """
    begun: dict[str, dict[str, float]] = {}
    for source in sources:
        ids = begun.setdefault(source.job, {})
        for one, at in source.jobs.items():
            ids[one] = min(ids.get(one, at), at)
    for source in sources:
        ids = begun[source.job]
        last = max(ids, key=lambda one: ids[one], default=LAST)
        source.only = last if id == LAST else id
        source.goes_on = source.running and source.only == last
    found = [source for source in sources if source.only in source.jobs or source.goes_on]
    if not found:
        every = [(at, f"{one} (from {_clock(at)})") for ids in begun.values() for one, at in ids.items()]
        known = ", ".join(text for _, text in sorted(every)) or "none at all"
        raise UsageError(f"no job with the id {id!r} has written the output of {what}; the ids there: {known}")
    return found


def _told_apart(sources: list[Source]) -> list[str]:
    """Return the names of which several jobs have written output that is shown, and say how to see one of them."""
    ids: dict[str, set[str]] = {}
    for source in sources:
        ids.setdefault(source.job, set()).update([source.only] if source.only else source.jobs)
    several = [job for job, found in ids.items() if len(found) > 1]
    for job in several:
        count, how = len(ids[job]), f"--job-id {LAST} shows the last one alone, --job-id ID another"
        note(plain(f"{count} jobs {job!r} have written this output, one after the other, each below its ==: {how}"))
    return several


async def _print(client: Observer, source: Source, wanted: _Wanted, several: bool, apart: bool) -> bool:
    """Print a log file, and with --follow what comes after it, until its worker has ended. Return True if there was
    output.
    """
    found = False
    lines = SlicedLines(_Printer(source, several, apart, wanted.as_json), wanted.limit)
    job = source.job if source.rank else None
    spans = {name: part.span(source.only, source.goes_on) for name, part in source.parts.items()}
    size = sum(end - begin for begin, end, _ in spans.values())
    skipped = 0 if wanted.limit is None else max(0, size - wanted.limit * LINE_BYTES)
    for name, (begin, end, grows) in spans.items():
        last = name == list(spans)[-1]
        begin, skipped = min(begin + skipped, end), max(0, skipped - (end - begin))
        if begin == end and not (last and grows):
            continue
        # a question with a time begins with the file, and what is before `begin` is left out below
        question = LogQuestion(job, name, offset=0 if wanted.since else begin, since=wanted.since)
        while True:
            answer = await _ask(client, source.node, question)
            if answer.lost:
                note(plain(f"{source.worker}: some of its output is gone: its log files were renamed meanwhile"))
            at = answer.offset - len(answer.data)
            cut = max(0, begin - at)
            data = answer.data[cut:] if grows else answer.data[cut : max(0, end - at)]
            lines.feed(data, [(mark.offset - at - cut, mark) for mark in answer.marks])
            found = found or bool(data)
            offset = max(answer.offset, begin)
            begin = 0 if data else begin  # the file that comes after a renaming has no such place
            question = msgspec.structs.replace(question, offset=offset, inode=answer.inode, since=0.0)
            if not grows and offset >= end:
                break
            if answer.data:
                continue
            if not (last and wanted.follow) or answer.ended:
                break
            if not question.wait_s:
                lines.end(unfinished=False)
                question = msgspec.structs.replace(question, wait_s=MAX_LOG_WAIT_S)
    lines.end()
    return found


class _Printer:
    """Prints the lines of a source, with a heading where another job of the name begins if *apart* is True."""

    def __init__(self, source: Source, several: bool, apart: bool, as_json: bool) -> None:
        self._source = source
        self._apart = apart
        self._as_json = as_json
        self._job: str | None = None
        mark = " stderr" if source.stream == "err" else ""
        self._where = f"{source.worker}@{source.node.report.hostname}{mark}"
        self._lead = plain(f"[{self._where}] ") if several else ""

    def __call__(self, text: str, mark: LogMark | None) -> None:
        if self._as_json:
            echo(json_line(line_dict(self._source, text, mark)))
            return
        job = mark.job if mark is not None else ""
        if self._apart and job != self._job:
            self._job = job
            begun = self._source.jobs.get(job)
            which = "an earlier one" if begun is None else f"id {job}, from {_clock(begun)}"
            echo(plain(f"== {self._where}: job {self._source.job}, {which} =="))
        echo(output(text), lead=self._lead)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


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


async def _ask(client: Observer, node: NodeState, question: LogQuestion) -> LogSlice:
    request = AskNode(node.report.node_id, question)
    ask = client.listen if question.wait_s else client.request
    answer = answer_of(await ask(request, ANSWER_S + question.wait_s), LogSlice)
    if answer.fault:
        raise RlinfActorsError(answer.fault)
    return answer
