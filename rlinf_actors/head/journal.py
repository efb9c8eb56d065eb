"""The event log: who joined, died, and why. Pure.

House rules: an event is added by a Record alone, so that this log and the head's own never differ. What is kept is
bounded, and so is what waits here for a reader: a question that nobody can answer yet, never an event. Room is made by
whoever has most of it, a member, a job or what was refused: nobody pushes out what others did.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from rlinf_actors.head.commands import Answer, Emit, Record, Refused
from rlinf_actors.wire.operators import Events, GetEvents
from rlinf_actors.wire.values import ClusterEvent

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


class Journal:
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

    def add(self, record: Record, wall: float, whose: str = "") -> None:
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
            Refused: too many wait already.
        """
        if asked.log and asked.log != self._log:
            asked = msgspec.structs.replace(asked, since=0)
        since = self._last if asked.since < 0 else min(asked.since, self._last)
        asked = msgspec.structs.replace(asked, since=since, log=self._log)
        found = self._find(asked, wall, sees)
        if found.events or found.missing or not asked.wait_s > 0:
            return found
        if len(self._readers) >= MAX_READERS:
            raise Refused("usage", f"{MAX_READERS} readers of the event log wait already")
        if key and sum(reader.key == key for reader in self._readers) >= MAX_READERS_OF_ONE:
            raise Refused("usage", f"{MAX_READERS_OF_ONE} readers of the event log with your key wait already")
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
