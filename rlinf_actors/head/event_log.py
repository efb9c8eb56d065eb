"""The event log: who joined, died, and why. Pure.

House rules: an event is added by a LogEvent alone, so that this log and the head's own never differ. What is kept is
bounded, and so is what waits here for a reader: a question that nobody can answer yet, never an event. Room is made by
whoever has most of it, a member, a job or what was refused: nobody pushes out what others did.

What the event log says of nodes, clients, groups and workers. Pure.

What the head has refused, for the event log. Pure.

House rule: whoever is refused can make us write a line a minute, and not more: what a stranger sends must not push
everything else out of the log.
"""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from rlinf_actors.head.commands import Answer, Emit, LogEvent, Refusal
from rlinf_actors.head.records import Client, Group, Node, WorkerLife, WorkerRecord
from rlinf_actors.security.refusal_tally import Due, RefusalTally
from rlinf_actors.wire.client_messages import Events, GetEvents
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.values import ClusterEvent, EventKind, ending, orderly

KEPT_EVENTS = 10_000
KEPT_CHARS = 16 << 20
"""Most of what is kept: the last lines of workers that died make some events much longer than others."""
ANSWER_EVENTS = 1000
ANSWER_CHARS = 1 << 20
"""Most of one answer; a reader asks again for the rest."""
MAX_WAIT_S = 60.0
MAX_READERS = 1024
MAX_READERS_OF_ONE = 32
"""With one key: there is room for others."""


Sees = Callable[[str], bool]
"""Whether a reader is shown the events of a namespace; it sees what belongs to none."""


@dataclass(frozen=True)
class _Reader:
    peer: bytes
    id: int
    asked: GetEvents
    deadline: float
    sees: Sees
    key: str


@dataclass
class _Share:
    """What is kept because of one member, of a job, or of refusals: numbers, the oldest first."""

    seqs: deque[int] = field(default_factory=deque)
    chars: int = 0


_SEQ = attrgetter("seq")


class EventLog:
    """The newest events, and the readers that wait for the next.

    Args:
        log: name of this log; that of another head differs.
        emit: takes commands.
        kept: how many events at most.
        kept_chars: how many characters of text at most.
    """

    def __init__(self, log: str, emit: Emit, kept: int = KEPT_EVENTS, kept_chars: int = KEPT_CHARS) -> None:
        self._log = log
        self._emit = emit
        self._kept = kept
        self._kept_chars = kept_chars
        self._events: deque[ClusterEvent] = deque()
        self._shares: dict[str | None, _Share] = {}
        self._share_of: dict[int, str | None] = {}
        self._chars = 0
        self._last = 0
        self._flushed = 0
        self._readers: list[_Reader] = []

    def add(self, record: LogEvent, wall: float, whose: str = "") -> None:
        """Something happened, at *wall* seconds since the epoch; older events make room. *whose*: in whose share it is
        counted.
        """
        self._last += 1
        event = ClusterEvent(self._last, wall, **{name: getattr(record, name) for name in record.__struct_fields__})
        self._events.append(event)
        key = None if event.kind == "refused" else whose
        share = self._shares.setdefault(key, _Share())
        share.seqs.append(event.seq)
        self._share_of[event.seq] = key
        self._count(share, _chars(event))
        while len(self._events) > self._kept or (self._chars > self._kept_chars and len(self._events) > 1):
            self._make_room()

    def ask(
        self,
        peer: bytes,
        id: int,
        asked: GetEvents,
        now: float,
        wall: float,
        sees: Sees = lambda namespace: True,
        key: str = "",
    ) -> Events | None:
        """The answer, or None when it comes later; *key* is the asker's.

        Raises:
            Refusal: too many wait already.
        """
        if asked.log and asked.log != self._log:
            asked = msgspec.structs.replace(asked, since=0)
        since = self._last if asked.since < 0 else min(asked.since, self._last)
        asked = msgspec.structs.replace(asked, since=since, log=self._log)
        found = self._find(asked, wall, sees)
        if found.events or found.missing or not asked.wait_s > 0:
            return found
        if len(self._readers) >= MAX_READERS:
            raise Refusal("usage", f"{MAX_READERS} readers of the event log wait already")
        if key and sum(reader.key == key for reader in self._readers) >= MAX_READERS_OF_ONE:
            raise Refusal("usage", f"{MAX_READERS_OF_ONE} readers of the event log with your key wait already")
        self._readers.append(_Reader(peer, id, asked, now + min(asked.wait_s, MAX_WAIT_S), sees, key))
        return None

    def flush(self, wall: float) -> None:
        """Answer the readers for whom something has happened since the last flush."""
        if self._flushed < self._last:
            self._flushed = self._last
            self._answer([(reader, self._find(reader.asked, wall, reader.sees)) for reader in self._readers])

    def tick(self, now: float, wall: float) -> None:
        """Answer the readers whose time is over: nothing has happened."""
        for reader in [reader for reader in self._readers if now >= reader.deadline]:
            self._readers.remove(reader)
            self._emit(Answer(reader.peer, reader.id, self._find(reader.asked, wall, reader.sees)))

    def forget(self, peer: bytes) -> None:
        """A client has ended: nobody reads there any more."""
        self._readers = [reader for reader in self._readers if reader.peer != peer]

    def forget_keys(self, keys: Container[str]) -> None:
        """Nobody with these keys reads any more."""
        self._readers = [reader for reader in self._readers if reader.key not in keys]

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        return min((reader.deadline for reader in self._readers), default=math.inf)

    def _make_room(self) -> None:
        """Drop the oldest event of whoever has most; never the newest."""
        others = [share for share in self._shares.values() if share.seqs[0] != self._last]
        share = max(others, key=lambda share: len(share.seqs) / self._kept + share.chars / self._kept_chars)
        place = bisect_left(self._events, share.seqs.popleft(), key=_SEQ)
        event = self._events[place]
        del self._events[place]
        self._count(share, -_chars(event))
        key = self._share_of.pop(event.seq)
        if not share.seqs:
            del self._shares[key]

    def _count(self, share: _Share, chars: int) -> None:
        share.chars += chars
        self._chars += chars

    def _answer(self, found: list[tuple[_Reader, Events]]) -> None:
        self._readers = [reader for reader, events in found if not events.events]
        for reader, events in found:
            if events.events:
                self._emit(Answer(reader.peer, reader.id, events))

    def _find(self, asked: GetEvents, wall: float, sees: Sees) -> Events:
        limit, room = min(max(asked.limit, 1), ANSWER_EVENTS), ANSWER_CHARS
        chosen: list[ClusterEvent] = []
        seen, missing = asked.since, 0
        for event in itertools.islice(self._events, bisect_right(self._events, asked.since, key=_SEQ), None):
            if not event.namespace or (asked.namespace in (None, event.namespace) and sees(event.namespace)):
                if chosen and (len(chosen) >= limit or room < _chars(event)):
                    break
                chosen.append(event)
                room -= _chars(event)
            missing += event.seq - seen - 1
            seen = event.seq
        return Events(self._log, wall, chosen, seen, missing, seen < self._last)


def _chars(event: ClusterEvent) -> int:
    """About how long it is."""
    exit = event.exit
    return len(event.text) + (0 if exit is None else len(exit.reason) + sum(map(len, exit.stderr_tail)))


ERRORS = frozenset({"robot_conflict"})
"""Kinds of events that need a person."""
WARNINGS = frozenset({"node_lost", "worker_died", "lease_lost", "estop", "estop_released", "refused", "events_missing"})
"""Kinds of events that are no part of an orderly life."""


def level(kind: str) -> int:
    """Return the level at which the head logs an event of *kind*."""
    if kind in ERRORS:
        return logging.ERROR
    return logging.WARNING if kind in WARNINGS else logging.INFO


def of_node(kind: EventKind, node: Node, text: str) -> LogEvent:
    """*text* follows the node's name."""
    return LogEvent(kind, f"node {node.name} {text}", node=node.report.hostname, node_id=node.id)


def of_driver(kind: EventKind, client: Client, text: str) -> LogEvent:
    """*text* follows what the driver is called."""
    return LogEvent(kind, f"{client} {text}", namespace=client.namespace, pid=client.pid)


def of_group(kind: EventKind, group: Group, text: str) -> LogEvent:
    """*text* follows the group's name."""
    name = f"group {group.name!r} of namespace {group.namespace!r}"
    return LogEvent(kind, f"{name} {text}", namespace=group.namespace, group=group.name)


def of_worker(kind: EventKind, worker: WorkerRecord, node: str, text: str) -> LogEvent:
    """*text* follows the worker's name; *node* is the name of its node."""
    spec = worker.spec
    process = f" (process {worker.pid})" if worker.pid else ""
    return LogEvent(
        kind,
        f"worker {spec.group}:{spec.rank}{process} on node {node} {text}",
        node=node,
        node_id=worker.node_id,
        namespace=spec.namespace,
        group=spec.group,
        rank=spec.rank,
        worker_id=worker.id,
        pid=worker.pid,
        exit=worker.exit,
    )


def of_life(worker: WorkerRecord, before: WorkerLife, node: str) -> LogEvent | None:
    """What a step of a worker's life is; None for one that is no news."""
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


def of_end(group: Group) -> LogEvent:
    """All workers of a group are gone."""
    died = [w for w in group.workers.values() if w.exit is not None and not orderly(group.name, w.exit)]
    count = len(group.workers)
    how = f"{len(died)} of its {count} workers died" if died else f"its workers ({count}) were stopped"
    return of_group("group_ended", group, f"has ended; {how}")


NAME_CHARS = 200


def shown(record: LogEvent) -> LogEvent:
    """An entry of the log as it may be kept and shown."""
    fields = ("node", "node_id", "namespace", "group", "worker_id")
    names = {name: printable(getattr(record, name), NAME_CHARS) for name in fields}
    return msgspec.structs.replace(record, text=printable(record.text), **names)


WINDOW_S = 60.0


class RefusalLog:
    """All refusals of the head.

    Args:
        emit: takes commands.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._tally: RefusalTally[LogEvent] = RefusalTally(WINDOW_S)

    @property
    def count(self) -> int:
        """Refusals so far."""
        return self._tally.count

    def note(self, who: str, kind: str, text: str, now: float, times: int = 1) -> None:
        """The head has refused something, *times* times.

        Args:
            who: was refused; a refusal is a repetition of the one before if *who* and *kind* are the same.
            kind: of the refusal.
            text: one line for people.
            now: the time.
            times: how often.
        """
        if self._tally.note(who, kind, LogEvent("refused", text), now, times):
            self.tick(now)

    def tick(self, now: float) -> None:
        """Time has passed: say how often what was said has happened since."""
        for due in self._tally.take(now):
            self._emit(replace(due.what, text=_text(due)))

    def next_deadline(self) -> float:
        """When `tick` has something to say, infinity for never."""
        return self._tally.next_deadline()


def _text(due: Due[LogEvent]) -> str:
    text = due.what.text
    if due.others:
        return f"{due.times} more refusals of other kinds in the last {WINDOW_S:.0f} s, the last one: {text}"
    if due.again:
        return f"{text} ({due.times} more in the last {WINDOW_S:.0f} s)"
    return f"{text} ({due.times} times)" if due.times > 1 else text
