"""Invariants that hold for all faults, judged from the records of all processes. Pure.

Every operation ends once and in time; a call runs once at most, on each rank; a rank is never there twice at once; no
worker outlives its owner; streams, messages and channel items are what they have to be (`deliveries`); names are free
again (a launch that finds its name in use is an error that is not expected, unless a worker on a lost node holds it).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import deliveries
from chaos_record import Line, Records

SCENE = "scene"
"""The record of the process that applies the faults."""
EXPECTED = frozenset(
    {
        "ChannelBrokenError",
        "ChannelClosedError",
        "GroupClosedError",
        "GroupNotFoundError",
        "NodeLostError",
        "PeerDiedError",
        "PlacementError",
        "WorkerDiedError",
        "WorkerStartError",
    }
)
"""Permitted ends of an operation in a cluster with faults. Timeouts are not permitted: they are hangs."""


@dataclass(frozen=True)
class Limits:
    """Seconds.

    Attributes:
        operation: limit of one operation.
        orphan: how long a worker may outlive its driver while head and agents are there.
    """

    operation: float
    orphan: float


@dataclass(frozen=True)
class Operation:
    """One operation of a driver; *end* is None if it is still under way."""

    who: str
    begin: Line
    end: Line | None


def operations(records: Records) -> Iterator[Operation]:
    """The operations of all drivers."""
    for who, lines in records.items():
        begun = {line["id"]: line for line in lines if line.what == "begin"}
        ended = {line["id"]: line for line in lines if line.what == "end"}
        for number, line in begun.items():
            yield Operation(who, line, ended.get(number))


def violations(records: Records, now: float, limits: Limits) -> list[str]:
    """The violated invariants, a sentence each.

    Args:
        records: the records of all processes of the run.
        now: the time at which they were read.
        limits: times.
    """
    drivers = _Drivers(records)
    return [
        *_operations(records, now, limits, drivers),
        *_executions(records),
        *_twice(records),
        *_orphans(records, limits, drivers),
        *_wrong(records),
        *_deliveries(records),
    ]


class _Drivers:
    """The lifetimes of drivers, by pid; the kernel reuses pids."""

    def __init__(self, records: Records) -> None:
        self._begins: defaultdict[int, list[float]] = defaultdict(list)
        self._ends: defaultdict[int, list[float]] = defaultdict(list)
        for lines in records.values():
            for line in lines:
                if line.what == "driver":
                    self._begins[line["pid"]].append(line.at)
        for line in records.get(SCENE, ()):
            if line.what == "ended":
                self._ends[line["pid"]].append(line.at)

    def end(self, pid: int, at: float) -> float | None:
        """The end of the driver with this pid at that time or before it; None if it has not ended."""
        begin = max((begin for begin in self._begins[pid] if begin <= at), default=0.0)
        return next((end for end in self._ends[pid] if end >= begin), None)


def _operations(records: Records, now: float, limits: Limits, drivers: _Drivers) -> Iterator[str]:
    pids = {who: line["pid"] for who, lines in records.items() for line in lines if line.what == "driver"}
    for who, lines in records.items():
        for number, times in Counter(line["id"] for line in lines if line.what == "end").items():
            if times > 1:
                yield f"{who}: operation {number} ended {times} times"
    for who, begin, end in ((one.who, one.begin, one.end) for one in operations(records)):
        what = f"{who}: {begin['doing']} {begin.more.get('call') or begin.more.get('label')}"
        if end is None:
            end_of = drivers.end(pids[who], begin.at)
            last = now if end_of is None else end_of
            if last - begin.at > limits.operation:
                yield f"{what} hangs: it began {last - begin.at:.1f} s before {'its end' if last < now else 'now'}"
            continue
        if end.at - begin.at > limits.operation:
            yield f"{what} took {end.at - begin.at:.1f} s ({end['outcome']})"
        if end["outcome"] != "ok" and end["outcome"] not in EXPECTED and not _held(end):
            yield f"{what} ended with {end['outcome']} after {end.at - begin.at:.1f} s: {end['text']}"


def _held(end: Line) -> bool:
    """True if a launch was refused because a worker on a lost node may still run under its name."""
    return end["outcome"] == "NameInUseError" and "was lost with node" in end["text"]


def _executions(records: Records) -> Iterator[str]:
    ran: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for lines in records.values():
        me = next((line["me"] for line in lines if line.what == "born"), "")
        for line in lines:
            if line.what == "ran":
                ran[line["call"]][me] += 1
    for call, ranks in ran.items():
        for me, times in ranks.items():
            if times > 1:
                yield f"call {call} ran {times} times in {me}"
    for one in operations(records):
        if "call" in one.begin.more and one.end is not None and one.end["outcome"] == "ok":
            told = ran[one.begin["call"]]
            if len(told) != one.begin.more.get("ranks", 2):
                yield f"call {one.begin['call']} was answered and ran in {sorted(told)}"


def _twice(records: Records) -> Iterator[str]:
    """Violations: a rank in two processes at once, or a driver's name in two groups."""
    spans: defaultdict[tuple[int, str, int], list[tuple[float, float, str]]] = defaultdict(list)
    for who, lines in records.items():
        if lines and lines[0].what == "born":
            born = lines[0]
            spans[born["owner"], born["group"], born["rank"]].append((born.at, lines[-1].at, who))
    for found in spans.values():
        found.sort()
        for (_, end, first), (begin, _, second) in itertools.pairwise(found):
            if begin < end:
                yield f"{first} was still there {end - begin:.2f} s after {second}, which has its name and rank, began"


def _orphans(records: Records, limits: Limits, drivers: _Drivers) -> Iterator[str]:
    for who, lines in records.items():
        if lines and lines[0].what == "born":
            end = drivers.end(lines[0]["owner"], lines[0].at)
            if end is not None and lines[-1].at > _due(end, records, limits):
                yield f"{who} was there {lines[-1].at - end:.1f} s after the end of its driver"


def _due(end: float, records: Records, limits: Limits) -> float:
    """The time after which a driver's workers must have ended; a returned head or agentd counts anew."""
    due = end + limits.orphan
    for line in records.get(SCENE, ()):
        if line.what == "fault" and line["kind"].endswith((" head", " agentd")) and end <= line.at <= due:
            due = max(due, line.at + line["seconds"] + limits.orphan)
    return due


def _wrong(records: Records) -> Iterator[str]:
    for who, lines in records.items():
        for line in lines:
            if line.what == "wrong":
                yield f"{who}: {line['text']}"


def _deliveries(records: Records) -> list[str]:
    drained = {line["place"] for lines in records.values() for line in lines if line.what == "drained"}
    logs: dict[str, list[deliveries.Event]] = {}
    dead = set()
    for who, lines in records.items():
        name = next((line["me"] for line in lines if line.what == "born"), who)
        logs[name] = [event for line in lines if line.what == "item" for event in _event(line, drained)]
        if not any(line.what in ("rest", "bye") for line in lines):
            dead.add(name)
    return deliveries.problems(logs, dead)


def _event(line: Line, drained: set[str]) -> Iterator[deliveries.Event]:
    stream = deliveries.Stream(*line["stream"])
    if stream.kind == "queue" and line["what"] == "sent" and stream.place not in drained:
        return  # its round was given up, so the remaining items were not taken
    yield deliveries.Event(line["what"], stream, line["n"], line["note"])


def noticed(records: Records) -> list[float]:
    """Seconds from each kill of a worker until an operation on its group, begun before, ended with an error."""
    born = [lines[0] for lines in records.values() if lines and lines[0].what == "born"]
    label = {line["pid"]: line["me"].rpartition(":")[0] for line in born}
    failed: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in operations(records):
        if one.end is not None and one.end["outcome"] != "ok" and one.begin["doing"] not in ("launch", "shutdown"):
            failed[one.begin.more.get("label", "")].append((one.begin.at, one.end.at))
    times = []
    for line in records.get(SCENE, ()):
        if line.what == "fault" and line["kind"] == "kill worker" and line["pid"] in label:
            after = [end - line.at for begin, end in failed[label[line["pid"]]] if begin <= line.at <= end]
            times += [min(after)] if after else []
    return sorted(times)


def outcomes(records: Records) -> dict[str, dict[str, int]]:
    """Maps each operation to its ends and their numbers."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in operations(records):
        found[one.begin["doing"]]["under way" if one.end is None else one.end["outcome"]] += 1
    return {doing: dict(count) for doing, count in sorted(found.items())}


def faults(records: Records) -> dict[str, int]:
    """Maps each kind of fault to its number."""
    return dict(Counter(line["kind"] for line in records.get(SCENE, ()) if line.what == "fault"))


def percentile(values: Sequence[float], part: float) -> float:
    """The percentile of sorted values; 0 without values."""
    return values[min(len(values) - 1, int(len(values) * part))] if values else 0.0
