"""Which log files `rlinf-actors logs` shows, and the output of which jobs in them. Nodes say which files they have."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime

import msgspec

from rlinf_actors.cli.output import note, plain, warn
from rlinf_actors.cli.queries import Observer
from rlinf_actors.errors import NodeLostError, RlinfActorsError, UsageError
from rlinf_actors.model.readable import duration
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.log_values import DAEMON_LOG, LogFile, LogMark, LogQuestion, LogSlice, file_name
from rlinf_actors.wire.node_questions import AskNode, answer_of
from rlinf_actors.wire.values import NodeState

ANSWER_S = 12.0
"""Seconds that the head has to answer, beyond the time that a node waits for output: it waits for a node for 10 s."""
ASKED_NODES = 32
"""Most nodes that are asked at a time."""
LAST = "last"
"""The value of --job-id for the last job."""
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


def what(target: str, job: str) -> str:
    """Return whose output is shown."""
    return " ".join([*[repr(target)] * bool(target), *[f"job {job!r}"] * bool(job)]) or "any worker"


def nodes_of(status: Status, node: str, target: str, job: str) -> tuple[list[NodeState], list[NodeState]]:
    """Return the nodes to ask for log files, and lost ones that may have log files of *target*, too.

    Raises:
        UsageError: there is no such node.
        NodeLostError: the node is lost.
    """
    lost = [one for one in status.nodes if one.state == "lost"]
    usable = [one for one in status.nodes if one.state != "lost"]
    if not node:
        where = _ranks(status, target, job)
        return usable, [one for one in lost if where is None or one.rank in where]
    named = lambda one: node in (one.report.hostname, one.report.node_id, str(one.rank))  # noqa: E731
    found, gone = list(filter(named, usable)), list(filter(named, lost))
    if gone and not found:
        raise NodeLostError(f"{in_words(gone)}: its log files cannot be read until its agentd is back")
    if not found:
        known = ", ".join(one.report.hostname for one in status.nodes) or "none"
        raise UsageError(f"there is no node {node!r}; there are: {known}")
    return found, gone


def _ranks(status: Status, target: str, job: str) -> set[int] | None:
    """Return the ranks of the nodes of *target*'s workers, None if the head does not know all of them any more."""
    group, _, rank = target.partition(":")
    groups = [one for one in status.groups if one.name == group and job in ("", one.namespace)]
    workers = [worker for one in groups for worker in one.workers if rank in ("", str(worker.rank))]
    return {worker.node_rank for worker in workers} if workers else None


def in_words(lost: Sequence[NodeState]) -> str:
    """Return which nodes are lost, and since when."""
    return ", ".join(f"{one.report.hostname} (lost, last seen {duration(one.last_seen_s)} ago)" for one in lost)


def jobs_of(status: Status, target: str, job: str) -> list[str | None]:
    """Return the jobs to ask nodes for. None stands for all: for a group that does not run (any more)."""
    if job:
        return [job]
    group = target.partition(":")[0]
    running = sorted({one.namespace for one in status.groups if one.name == group})
    if len(running) > 1:
        raise UsageError(f"several jobs have a group {group!r}: say which by --job; there are: {', '.join(running)}")
    return list(running) or [None]


async def sources_of(
    client: Observer, nodes: Sequence[NodeState], jobs: Sequence[str | None], target: str, with_daemon: bool
) -> tuple[list[Source], list[str]]:
    """Ask nodes for their log files. Return those of *target*, and which nodes did not answer, with the reasons."""
    at_once = asyncio.Semaphore(ASKED_NODES)
    silent: dict[str, str] = {}

    async def find(node: NodeState, job: str | None) -> list[tuple[NodeState, LogFile]]:
        try:
            async with at_once:
                answer = await ask(client, node, LogQuestion(job))
        except RlinfActorsError as error:
            silent[node.report.hostname] = f"no answer: {node.report.hostname} ({error})"
            return []
        if answer.more:
            warn(f"node {node.report.hostname} has {answer.more} more log files: name the job by --job")
        return [(node, file) for file in answer.files]

    found = await asyncio.gather(*(find(node, job) for node in nodes for job in jobs))
    return chosen([one for part in found for one in part], target, with_daemon), list(silent.values())


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


def chosen(files: Sequence[tuple[NodeState, LogFile]], target: str, with_daemon: bool) -> list[Source]:
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


def of_job(sources: list[Source], id: str, of: str) -> list[Source]:
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
        every = [(at, f"{one} (from {clock(at)})") for ids in begun.values() for one, at in ids.items()]
        known = ", ".join(text for _, text in sorted(every)) or "none at all"
        raise UsageError(f"no job with the id {id!r} has written the output of {of}; the ids there: {known}")
    return found


def told_apart(sources: list[Source]) -> list[str]:
    """Return the names of which several jobs have written output that is shown, and say how to see one of them."""
    ids: dict[str, set[str]] = {}
    for source in sources:
        ids.setdefault(source.job, set()).update([source.only] if source.only else source.jobs)
    several = [job for job, found in ids.items() if len(found) > 1]
    for job in several:
        count, how = len(ids[job]), f"--job-id {LAST} shows the last one alone, --job-id ID another"
        note(plain(f"{count} jobs {job!r} have written this output, one after the other, each below its ==: {how}"))
    return several


def clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


async def ask(client: Observer, node: NodeState, question: LogQuestion) -> LogSlice:
    request = AskNode(node.report.node_id, question)
    if question.wait_s:
        reply = await client.listen(request, ANSWER_S + question.wait_s, again=True)
    else:
        reply = await client.request(request, ANSWER_S)
    answer = answer_of(reply, LogSlice)
    if answer.fault:
        raise RlinfActorsError(answer.fault)
    return answer
