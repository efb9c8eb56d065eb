"""What messages and channels must have kept, judged from what processes wrote down. Pure.

A process writes an event before and after each operation, so what it had begun when it was killed is known too.
Streams: what one worker sends another ("pair"), the broadcasts of one source in one round ("cast"), what one producer
puts under one key of one channel ("queue").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Stream(NamedTuple):
    """Numbered items in order: `place` is the receiver, the round's members, or a channel and key."""

    kind: Literal["pair", "cast", "queue"]
    source: str
    place: str


@dataclass(frozen=True)
class Event:
    """One line of a process's log.

    Attributes:
        what: "offer" before an item is sent or put and "sent" after; "ask" before a get and "got" after, or "stopped";
            "refused" where an operation raised that its peer died; "late" where it did not end in time;
            "member" where a process takes part in broadcasts.
        stream: of the item; of an ask, one without a source.
        n: number of the item in its stream, from 0.
        note: of "got": "" or "damaged" or "again" or both; else the error.
    """

    what: Literal["offer", "sent", "ask", "got", "stopped", "refused", "late", "member"]
    stream: Stream
    n: int = 0
    note: str = ""


Logs = Mapping[str, Sequence[Event]]
"""Name of a process, unique among all that ever ran, to what it wrote."""


def problems(logs: Logs, killed: Iterable[str]) -> list[str]:
    """What broke a promise, one sentence each; empty if nothing did.

    Args:
        logs: of all processes, the killed ones included.
        killed: names of those that were killed.
    """
    dead = frozenset(killed)
    return [*_plain(logs), *_refusals(logs, dead), *_ordered(logs, dead), *_queues(logs, dead)]


def open_operations(log: Sequence[Event]) -> list[str]:
    """What a process had begun and not ended."""
    count: Counter[tuple[str, Stream]] = Counter()
    for event in log:
        if event.what in ("offer", "sent"):
            count["sending on", event.stream] += 1 if event.what == "offer" else -1
        elif event.what == "ask":
            count["getting from", _place(event.stream)] += 1
        elif event.what in ("got", "stopped"):
            count["getting from", _place(event.stream)] -= 1
        elif event.what in ("refused", "late"):
            doing = "getting from" if event.note.startswith("get") else "sending on"
            count[doing, _place(event.stream) if doing == "getting from" else event.stream] -= 1
    return [f"{what} {stream}: {left} open" for (what, stream), left in count.items() if left > 0]


def _place(stream: Stream) -> Stream:
    """Where a get asks: of a queue it is not known whose item comes."""
    return stream._replace(source="") if stream.kind == "queue" else stream


def _plain(logs: Logs) -> list[str]:
    found = []
    for who, log in logs.items():
        for event in log:
            if event.what == "late":
                found.append(f"{who}: {event.note} on {event.stream}, item {event.n}, did not end in time")
            elif event.what == "got" and "damaged" in event.note:
                found.append(f"{who}: item {event.n} of {event.stream} was changed on its way")
    return found


def _refusals(logs: Logs, dead: frozenset[str]) -> list[str]:
    """Whoever is told of a death takes part in something with somebody who died."""
    return [
        f"{who}: {event.note} on {event.stream}, item {event.n}, was refused though nobody in it was killed"
        for who, log in logs.items()
        for event in log
        if event.what == "refused" and not _parties(event.stream, logs) & dead
    ]


def _parties(stream: Stream, logs: Logs) -> frozenset[str]:
    if stream.kind == "pair":
        return frozenset((stream.source, stream.place))
    if stream.kind == "cast":
        return frozenset(stream.place.split(":", 1)[1].split(","))
    return frozenset()  # a channel goes on, whoever dies


def _ordered(logs: Logs, dead: frozenset[str]) -> list[str]:
    """Sends and broadcasts: 0, 1, 2, ... at every receiver, and all of it where nobody died."""
    found = []
    got: defaultdict[tuple[Stream, str], list[int]] = defaultdict(list)
    sent: defaultdict[Stream, set[int]] = defaultdict(set)
    for who, log in logs.items():
        for event in log:
            if event.stream.kind == "queue":
                continue
            if event.what == "got":
                got[event.stream, who].append(event.n)
            elif event.what == "sent":
                sent[event.stream].add(event.n)
    for (stream, who), numbers in got.items():
        for due, n in enumerate(numbers):
            if n != due:
                kind = "again" if n in numbers[:due] else "out of order"
                found.append(f"{who}: item {n} of {stream} came {kind}: {due} was due")
                break
    for stream, offered in sent.items():
        parties = _parties(stream, logs)
        if parties & dead:
            continue
        for who in sorted(parties - {stream.source}):
            if lost := offered - set(got[stream, who]):
                found.append(f"{who}: items {_some(lost)} of {stream} were sent and did not come")
    return found


@dataclass(frozen=True)
class _Taken:
    who: str
    again: bool


def _queues(logs: Logs, dead: frozenset[str]) -> list[str]:
    found: list[str] = []
    offered: defaultdict[Stream, set[int]] = defaultdict(set)
    put: defaultdict[Stream, set[int]] = defaultdict(set)
    taken: defaultdict[Stream, defaultdict[int, list[_Taken]]] = defaultdict(lambda: defaultdict(list))
    open_gets: Counter[str] = Counter()
    deaths: set[str] = set()
    for who, log in logs.items():
        last: dict[Stream, int] = {}
        for event in log:
            stream = event.stream
            if stream.kind != "queue":
                continue
            if event.what == "offer":
                offered[stream].add(event.n)
            elif event.what == "sent":
                put[stream].add(event.n)
            elif event.what == "ask" and who in dead:
                open_gets[stream.place] += 1
                deaths.add(stream.place)
            elif event.what == "stopped" and who in dead:
                open_gets[stream.place] -= 1
            elif event.what == "got":
                open_gets[stream.place] -= who in dead
                again = "again" in event.note
                taken[stream][event.n].append(_Taken(who, again))
                if not again and event.n <= last.get(stream, -1):
                    found.append(f"{who}: item {event.n} of {stream} came after item {last[stream]}")
                if not again:
                    last[stream] = event.n
    for stream, items in taken.items():
        found += _deliveries(stream, items, offered[stream], stream.place in deaths, dead)
    return found + _lost(put, taken, open_gets)


def _deliveries(
    stream: Stream, items: Mapping[int, Sequence[_Taken]], offered: set[int], died: bool, dead: frozenset[str]
) -> list[str]:
    """Once to the living; more often only after a consumer's death, and marked."""
    found = []
    for n, deliveries in items.items():
        who = ", ".join(delivery.who for delivery in deliveries)
        if n not in offered:
            found.append(f"{who}: got item {n} of {stream}, which nobody put")
        living = [delivery for delivery in deliveries if delivery.who not in dead]
        unmarked = [delivery for delivery in deliveries if not delivery.again]
        if len(living) > 1:
            found.append(f"item {n} of {stream} was got more than once by the living: {who}")
        elif len(unmarked) > 1:
            found.append(f"item {n} of {stream} was got more than once without a mark: {who}")
        if len(unmarked) < len(deliveries) and not died:
            found.append(f"{who}: item {n} of {stream} is marked as delivered again, and no consumer there died")
    return found


def _lost(
    put: Mapping[Stream, set[int]], taken: Mapping[Stream, Mapping[int, object]], open_gets: Mapping[str, int]
) -> list[str]:
    """What was put is got, but for what a killed consumer may have had in its hands: one item for each open get."""
    found = []
    lost: defaultdict[str, list[str]] = defaultdict(list)
    for stream, numbers in put.items():
        missing = numbers - set(taken.get(stream, ()))
        if missing:
            lost[stream.place] += [f"{len(missing)} of {stream.source} ({_some(missing)})"] * len(missing)
    for place, items in lost.items():
        allowed = open_gets.get(place, 0)
        if len(items) > allowed:
            what = ", ".join(dict.fromkeys(items))
            found.append(f"queue {place}: {what} were put and never got; killed consumers had {allowed} gets open")
    return found


def growth(samples: Sequence[int]) -> float:
    """How much more the second half is than the first, as medians, once the first quarter has warmed up."""
    warm = samples[len(samples) // 4 :]
    if len(warm) < 4:
        return 0.0
    return middle(warm[len(warm) // 2 :]) - middle(warm[: len(warm) // 2])


def quarters(samples: Sequence[int]) -> list[Sequence[int]]:
    """Up to four parts of equal length, none of them empty."""
    step = max(1, -(-len(samples) // 4))
    return [samples[at : at + step] for at in range(0, len(samples), step)]


def middle(samples: Sequence[int]) -> int:
    """The median."""
    return sorted(samples)[len(samples) // 2]


def _some(numbers: Iterable[int]) -> str:
    first = sorted(numbers)
    return ", ".join(map(str, first[:5])) + (f", … ({len(first)})" if len(first) > 5 else "")
