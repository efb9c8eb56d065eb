"""The event log: which nodes, drivers and workers joined, ended or failed, and why. Pure.

House rules: only a LogEvent command adds an entry, so the event log and the head's own log file (`head.log_lines`) say
the same. The event log is bounded: each member, each of the newest jobs that belong to no driver's key, all earlier
such jobs together and all refusals together have a share, and the largest share makes room, so that no member pushes
out the entries of others. `head.refusal_log` bounds the entries about refusals.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import astuple, replace

from rlinf_actors.head import quotas
from rlinf_actors.head.commands import Answer, KeptEvent, LogEvent, PastEvents
from rlinf_actors.head.heaviest import Heaviest
from rlinf_actors.head.owners import most_of, processes, speaker_of
from rlinf_actors.head.quotas import Quota
from rlinf_actors.head.records import Client, Group, Index, Node, WorkerLife, WorkerRecord
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.client_messages import Events, GetEvents
from rlinf_actors.wire.endings import ending, orderly
from rlinf_actors.wire.event_values import ClusterEvent, EventKind
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.values import WorkerState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

KEPT_EVENTS = 10_000
KEPT_CHARS = 16 << 20
"""Largest number of characters of text in the log. An event with the last output of a dead worker is long."""
JOBS = 100
"""Largest number of jobs with a share of their own. If each job of a year had one, it would keep a single entry, and so
would the job that runs.
"""
ANSWER_EVENTS = 1000
ANSWER_CHARS = 1 << 20
"""Largest number of characters in one answer; a reader asks again for the rest."""
MAX_WAIT_S = 60.0

Sees = Callable[[str, str], bool]
"""Returns True for a namespace and the driver that owned it if a reader may see the events of that job. The driver is
"" if none is known. Every reader sees events without a namespace."""


class _Reader(msgspec.Struct, eq=False):
    peer: bytes
    id: int
    asked: GetEvents
    sees: Sees
    member: Member
    missing: int = 0  # events that were dropped before the reader could get them
    timer: HeapTimer | None = None


class _Share(msgspec.Struct):
    """The log entries that count together for the limits: those of one member or job, of earlier jobs, or all refusals.

    `seqs` are the numbers of the entries, the oldest first (those of earlier jobs: of the job that was silent first);
    `chars` is the length of their texts.
    """

    seqs: deque[int] = msgspec.field(default_factory=deque)
    chars: int = 0


_REFUSALS = "\0refusals"
"""Name of the share of all refusals together."""
_EARLIER = "\0earlier jobs"
"""Name of the share of all jobs together that have no share of their own any more."""


class EventLog:
    """The newest events. Answers readers, and keeps the readers that wait for the next event.

    A log that is kept on disk goes on after a restart of the head. Its id, "LOG.RUN", says which run of the head a
    reader has read last. If that run showed events that did not reach the disk, this run has given their numbers to
    other events; the reader then continues at the first number that is not the one that it has seen.

    Args:
        head: the coordinator. Without *before*, its epoch is the log's id: another head begins another log.
        kept: largest number of events in the log.
        kept_chars: largest number of characters of text in the log.
        before: the log that this head goes on with; None to begin a log that ends with the head.

    Attributes:
        is_watched: True if `take_changes` is called; it then has the changes since its last call.
    """

    def __init__(
        self,
        head: Coordinator,
        kept: int = KEPT_EVENTS,
        kept_chars: int = KEPT_CHARS,
        before: PastEvents | None = None,
    ) -> None:
        self._head = head
        self._before = before
        self._log = head.identity.epoch if before is None else f"{before.log}.{before.run}"
        self._kept = kept
        self._kept_chars = kept_chars
        self._events: dict[int, ClusterEvent] = {}  # by number, the oldest first
        self._shares: dict[str, _Share] = {}
        self._jobs: dict[str, None] = {}  # shares of jobs, the one that is silent for longest first
        self._sizes: Heaviest[str] = Heaviest()  # parts of the log that the shares have
        self._resized: dict[str, None] = {}  # shares whose sizes have changed since a look at the largest one
        self._chars = 0
        self._last = 0
        self._flushed = 0
        self._readers: dict[_Reader, None] = {}
        self._readers_of: Index[_Reader] = Index()  # by the namespace that they ask for, None for all
        self._readers_at: Index[_Reader] = Index()  # by peer
        self._of_key = Quota("readers of a key")
        self.is_watched = False
        self._owners: dict[int, str] = {}  # of the entries of jobs that had one
        self._added: list[KeptEvent] = []
        self._dropped: list[int] = []
        if before is not None:
            for past in before.events:
                self._enter(past.event, past.whose, past.owner)
            self._last = max(self._last, before.ends.get(before.run, 0))
            self._flushed = self._last

    def newest(self) -> ClusterEvent | None:
        """Return the newest entry, also of an earlier head; None if there is none."""
        return next(reversed(self._events.values()), None)

    def add(self, entry: LogEvent, whose: str = "", owner: str = "") -> None:
        """Add an entry, counted in the share of *whose* (a member or job); drop older entries if the log is full.

        *owner* is the name of the driver's key that owns the entry's job, "" for none.
        """
        *fields, at = astuple(entry)
        event = ClusterEvent(self._last + 1, self._head.wall if at is None else at, *fields)
        if self.is_watched:
            self._added.append(KeptEvent(event, whose, owner))
        self._enter(event, whose, owner)

    def take_changes(self) -> tuple[list[KeptEvent], list[int]]:
        """Return the entries that were added, and the numbers of those that were dropped, since the last call."""
        changes = self._added, self._dropped
        self._added, self._dropped = [], []
        return changes

    def _enter(self, event: ClusterEvent, whose: str, owner: str) -> None:
        self._last = event.seq
        self._events[event.seq] = event
        if owner:
            self._owners[event.seq] = owner
        key = _REFUSALS if event.kind == "refused" else whose
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = _Share()
        share.seqs.append(event.seq)
        self._count(key, share, _chars(event))
        if key and key == event.namespace:
            self._jobs.pop(key, None)
            self._jobs[key] = None
            if len(self._jobs) > JOBS:
                self._end_share(next(iter(self._jobs)))
        while len(self._events) > self._kept or (self._chars > self._kept_chars and len(self._events) > 1):
            self._make_room(key)

    def ask(self, peer: bytes, id: int, asked: GetEvents, sees: Sees, member: Member = LOCAL) -> Events | None:
        """Return the events that a reader asks for; None if there are none yet, and the answer is sent later.

        *peer* and *id* are the reader's connection and the number of the request. *sees* returns True for a job
        whose events the reader may see. *member* is the reader; each key may have a limited number of waiting readers.
        """
        since = asked.since if asked.log in ("", self._log) else self._since_of(asked)
        since = self._last if since < 0 else min(since, self._last)
        asked = replace(asked, since=since, log=self._log)
        found = self._find(asked, sees)
        if found.events or found.missing or not asked.wait_s > 0:
            return found
        quotas.check("readers", "the head", len(self._readers), self._held)
        self._of_key.check(member.key, "your key", lambda: processes(self._head, self._of_key.by(member.key)))
        reader = _Reader(peer, id, asked, sees, member)
        deadline = self._head.now + min(asked.wait_s, MAX_WAIT_S)
        reader.timer = self._head.timers.at(deadline, lambda: self._answer(reader, self._find(reader.asked, sees)))
        self._read_until(reader, found)
        self._readers[reader] = None
        self._readers_of.add(asked.namespace, reader, reader)
        self._readers_at.add(peer, reader, reader)
        self._of_key.take(member.key, peer)
        return None

    def _held(self) -> str:
        members = {reader.peer: reader.member for reader in self._readers}
        counts = Counter(reader.peer for reader in self._readers)
        return most_of(counts, lambda peer: f"{speaker_of(self._head, peer)} of {members[peer]}")

    def _since_of(self, asked: GetEvents) -> int:
        """Return where a reader continues who has read the log of another run, or another log."""
        log, _, run = asked.log.rpartition(".")
        if self._before is None or log != self._before.log or not run.isdecimal() or int(run) > self._before.run:
            return 0
        return min([asked.since, *(end for later, end in self._before.ends.items() if later > int(run))])

    def flush(self) -> None:
        """Answer the waiting readers that may see an entry added since the last flush."""
        if self._flushed == self._last or not self._readers:
            self._flushed = self._last
            return
        namespaces = {event.namespace for event in self._after(self._flushed)}
        self._flushed = self._last
        readers = list(self._readers) if "" in namespaces else self._readers_of.of(None)
        for namespace in sorted(namespaces) if "" not in namespaces else ():
            readers += self._readers_of.of(namespace)
        for reader in readers:
            found = self._find(reader.asked, reader.sees)
            if found.events:
                self._answer(reader, found)
            else:
                self._read_until(reader, found)

    def _read_until(self, reader: _Reader, found: Events) -> None:
        """Note how far a waiting reader has been served, so that no event is examined for it twice."""
        reader.missing += found.missing
        reader.asked = replace(reader.asked, since=found.next)

    def forget(self, peer: bytes) -> None:
        for reader in self._readers_at.of(peer):
            self._remove(reader)

    def forget_keys(self, keys: Container[str]) -> None:
        for reader in [reader for reader in self._readers if reader.member.key in keys]:
            self._remove(reader)

    def _answer(self, reader: _Reader, events: Events) -> None:
        self._remove(reader)
        events = replace(events, missing=events.missing + reader.missing)
        self._head.emit(Answer(reader.peer, reader.id, events))

    def _remove(self, reader: _Reader) -> None:
        del self._readers[reader]
        self._readers_of.discard(reader.asked.namespace, reader)
        self._readers_at.discard(reader.peer, reader)
        self._of_key.free(reader.member.key, reader.peer)
        self._head.timers.cancel(reader.timer)

    def _make_room(self, newest: str) -> None:
        """Drop the oldest entry of the share with the most entries or text; never the newest entry, of *newest*."""
        for key in self._resized:
            share = self._shares[key]
            self._sizes.set(key, len(share.seqs) / self._kept + share.chars / self._kept_chars)
        self._resized.clear()
        alone = len(self._shares[newest].seqs) == 1
        most = self._sizes.top(apart_from=newest) if alone else self._sizes.top()
        assert most is not None  # there is another entry
        share = self._shares[most]
        seq = share.seqs.popleft()
        self._count(most, share, -_chars(self._events.pop(seq)))
        self._owners.pop(seq, None)
        if self.is_watched:
            self._dropped.append(seq)
        if not share.seqs:
            self._remove_share(most)

    def _end_share(self, job: str) -> None:
        """Let the entries of a job count with those of earlier jobs."""
        share = self._shares[job]
        self._remove_share(job)
        earlier = self._shares.setdefault(_EARLIER, _Share())
        earlier.seqs.extend(share.seqs)
        earlier.chars += share.chars
        self._resized[_EARLIER] = None

    def _remove_share(self, key: str) -> None:
        del self._shares[key]
        self._jobs.pop(key, None)
        self._resized.pop(key, None)
        self._sizes.set(key, 0)

    def _count(self, key: str, share: _Share, chars: int) -> None:
        share.chars += chars
        self._chars += chars
        self._resized[key] = None

    def _after(self, seq: int) -> Iterable[ClusterEvent]:
        """Return the entries with larger numbers than *seq*. A few new ones cost little, however long the log is."""
        if 2 * (self._last - seq) > len(self._events):
            return (event for event in self._events.values() if event.seq > seq)
        newest = itertools.takewhile(lambda event: event.seq > seq, reversed(self._events.values()))
        return reversed(list(newest))

    def _find(self, asked: GetEvents, sees: Sees) -> Events:
        limit, room = min(max(asked.limit, 1), ANSWER_EVENTS), ANSWER_CHARS
        chosen: list[ClusterEvent] = []
        seen, missing = asked.since, 0
        for event in self._after(asked.since):
            if not event.namespace or (
                asked.namespace in (None, event.namespace) and sees(event.namespace, self._owners.get(event.seq, ""))
            ):
                if chosen and (len(chosen) >= limit or room < _chars(event)):
                    break
                chosen.append(event)
                room -= _chars(event)
            missing += event.seq - seen - 1
            seen = event.seq
        return Events(self._log, self._head.wall, chosen, seen, missing, seen < self._last)


def _chars(event: ClusterEvent) -> int:
    exit = event.exit
    return len(event.text) + (0 if exit is None else len(exit.reason) + sum(map(len, exit.stderr_tail)))


ERRORS = frozenset({"robot_conflict"})
"""Kinds of events that a person must react to."""
WARNINGS = frozenset({"node_lost", "worker_died", "lease_lost", "estop", "estop_released", "refused", "events_missing"})
"""Kinds of events that do not occur in a run without faults."""


def level(kind: str) -> int:
    """Return the `logging` level at which the head logs an event of *kind*."""
    if kind in ERRORS:
        return logging.ERROR
    return logging.WARNING if kind in WARNINGS else logging.INFO


# In the functions below the entry reads "NAME TEXT", with the name of the node, driver, group or worker.


def of_node(kind: EventKind, node: Node, text: str, rank: int = -1) -> LogEvent:
    """Return a log entry for a node, with its *rank* unless that is -1."""
    host = node.report.hostname
    return LogEvent(kind, f"node {host}{_of(rank)}{node.name.removeprefix(host)} {text}", node=host, node_id=node.id)


def _of(rank: int) -> str:
    return f" (rank {rank})" if rank >= 0 else ""


def of_driver(kind: EventKind, client: Client, text: str) -> LogEvent:
    return LogEvent(kind, f"{client} {text}", namespace=client.namespace, pid=client.pid)


def of_group(kind: EventKind, group: Group, text: str) -> LogEvent:
    name = f"group {group.name!r} of job {group.namespace!r}"
    return LogEvent(kind, f"{name} {text}", namespace=group.namespace, group=group.name)


def of_launch(group: Group, ranks: int) -> LogEvent:
    """Return the log entry for a group that was launched with *ranks* ranks."""
    which = "rank 0" if ranks == 1 else f"ranks 0-{ranks - 1}"
    return of_group("group_launched", group, f"was launched: {group.cls}, {which}")


def of_worker(kind: EventKind, worker: WorkerRecord, node: tuple[str, int], text: str) -> LogEvent:
    """Return a log entry for a worker. *node* is what `NodeTable.named` returns of its node."""
    spec = worker.spec
    process = f" (process {worker.pid})" if worker.pid else ""
    return LogEvent(
        kind,
        f"worker {spec.group}:{spec.rank}{process} of job {spec.namespace} on node {node[0]}{_of(node[1])} {text}",
        node=node[0],
        node_id=worker.node_id,
        namespace=spec.namespace,
        group=spec.group,
        rank=spec.rank,
        worker_id=worker.id,
        pid=worker.pid,
        exit=worker.exit,
    )


def of_life(worker: WorkerRecord, before: WorkerLife, node: tuple[str, int]) -> LogEvent | None:
    """Return the log entry for a worker whose state was *before* and is `worker.life` now; None for no entry.

    *node* is that of `of_worker`.
    """
    if worker.life is WorkerLife.RUNNING and before is WorkerLife.STARTING:
        if worker.spec.incarnation:
            return of_worker("worker_restarted", worker, node, f"is up again, restart {worker.spec.incarnation}")
        return of_worker("worker_started", worker, node, "is up")
    if not worker.gone or worker.exit is None:
        return None
    if worker.exit.kind == "stopped":
        why = f": {worker.exit.reason}" if worker.exit.reason else ""
        return of_worker("worker_stopped", worker, node, f"was stopped{why}")
    if orderly(worker.spec.group, worker.exit):
        return of_worker("worker_stopped", worker, node, "has ended: its channel was closed")
    return of_worker("worker_died", worker, node, ending(worker.exit))


def of_end(group: Group, states: Sequence[WorkerState]) -> Sliced[LogEvent]:
    """Return the log entry for a group that has ended, with these *states* of its workers."""
    died = 0
    for some, more in pieces(states, 10 * PIECE):
        died += sum(one.exit is not None and not orderly(group.name, one.exit) for one in some)
        if more:
            yield
    if len(states) == 1:
        how = "its worker died" if died else "its worker was stopped"
    else:
        how = f"{died} of its {len(states)} workers died" if died else f"its workers ({len(states)}) were stopped"
    return of_group("group_ended", group, f"has ended; {how}")


NAME_CHARS = 200


def shown(record: LogEvent) -> LogEvent:
    """Return *record* with printable text, and with names cut to NAME_CHARS characters."""
    together = f"{record.node}{record.node_id}{record.namespace}{record.group}{record.worker_id}"
    if len(together) <= NAME_CHARS and together.isprintable() and record.text == printable(record.text):
        return record  # as nearly all are
    fields = ("node", "node_id", "namespace", "group", "worker_id")
    names = {name: printable(getattr(record, name), NAME_CHARS) for name in fields}
    return replace(record, text=printable(record.text), **names)
