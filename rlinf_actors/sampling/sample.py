"""What one round of questions has found, and what it means together with the rounds before: rates and histories. Pure.

`sampler` makes a Sample of the head's status and the figures of the nodes, and gives it to the Board. Pages, metrics
and `top` read the Board. Nothing here grows faster than the cluster: what a sample does not name any more is dropped.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import msgspec

from rlinf_actors.counters import BOUNDS_S
from rlinf_actors.runtime.worker_ends import breakpoint_clause
from rlinf_actors.sampling.hardware_text import hardware_text, held_on, probed
from rlinf_actors.sampling.node_names import node_names
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.figure_values import ChannelFigures, MethodFigures, NodeFigures, WorkerFigures
from rlinf_actors.wire.values import CHANNEL_GROUPS, GroupState, NodeState, WorkerState

KEPT = 120
"""Number of samples that a history has."""
KEPT_EVENTS = 500
"""Number of events that are kept for the page."""
MOST_METHODS = 16
"""Most methods of a group that are counted by name. The calls of the others count under ""."""
SHORTEST_S = 0.2
"""Seconds below which no rate is made of a difference."""


class Sample(msgspec.Struct, frozen=True):
    """One round of questions.

    Attributes:
        at: when it began, in seconds since the epoch.
        clock: the same, in seconds of CLOCK_MONOTONIC.
        status: the head's answer; None if there was none.
        figures: the answers of the nodes, by id.
        faults: why nodes have not answered, by id.
        fault: why the head has not answered, for people; "" if it has.
        answer_s: how long the head took to answer for its status.
        took_s: how long the round took.
    """

    at: float
    clock: float
    status: Status | None = None
    figures: Mapping[str, NodeFigures] = {}
    faults: Mapping[str, str] = {}
    fault: str = ""
    answer_s: float = 0.0
    took_s: float = 0.0


class Rates:
    """How fast counters grow. A counter that falls has begun anew, with its process."""

    def __init__(self) -> None:
        self._last: dict[object, tuple[float, float, float | None]] = {}
        self._new: dict[object, tuple[float, float, float | None]] = {}

    def take(self, key: object, at: float, value: float) -> float | None:
        """Note the *value* of a counter at *at*, in seconds. Return its growth in a second; None if unknown."""
        known = self._last.get(key)
        rate = None
        if known is not None:
            before, last, rate = known
            if at - before < SHORTEST_S:
                self._new[key] = known
                return rate
            grown = value - last if value >= last else value
            rate = grown / (at - before)
        self._new[key] = (at, value, rate)
        return rate

    def turn(self) -> None:
        """Drop the counters that were not taken since the last turn."""
        self._last, self._new = self._new, {}


class MethodTotals(msgspec.Struct):
    """The calls of one method of a group, of all its ranks and incarnations that were seen.

    `recent` has the same of the last sample alone: (done, failed, seconds, buckets).
    """

    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    recent: MethodFigures = MethodFigures("")


class Channel(msgspec.Struct):
    """A channel: the sum of its replicas, and how many items it had at the last samples."""

    job: str
    name: str
    group: GroupState
    figures: ChannelFigures
    entered_rate: float | None
    depths: collections.deque[int]


class WorkerView(msgspec.Struct, frozen=True):
    """A worker with its group, node, figures, and the rates of the last two samples. None stands for unknown.

    `breakpoint` says where it waits in a breakpoint, for how long, and how to attach; "" if it waits in none.
    `place` is the name of its node, as in NodeView; the node's address if the head does not know the node.
    """

    group: GroupState
    state: WorkerState
    node: NodeState | None
    figures: WorkerFigures | None
    cpu: float | None = None  # processors that it keeps busy
    calls: float | None = None  # in a second
    breakpoint: str = ""
    place: str = ""

    @property
    def name(self) -> str:
        return f"{self.group.name}:{self.state.rank}"

    @property
    def condition(self) -> str:
        """The state of the worker, or "unresponsive" or "breakpoint" if it does not answer or waits in a breakpoint."""
        if self.state.pulse is not None and self.state.pulse.unresponsive:
            return "unresponsive"
        return "breakpoint" if self.breakpoint else self.state.state


class NodeView(msgspec.Struct, frozen=True):
    """A node with its figures, and the share of its processors that were busy between the last two samples.

    Attributes:
        name: its host's name, with the rank if another node has the same.
        hardware: what it has reported, and the robots that groups hold there, for people.
    """

    state: NodeState
    figures: NodeFigures | None
    fault: str
    cpu: float | None
    workers: int
    name: str
    hardware: str = ""

    @property
    def id(self) -> str:
        return self.state.report.node_id


class Board:
    """The newest sample with what was learnt before.

    Attributes:
        sample: the newest sample.
        last_status: the newest status of the head, which may be older than `sample`; None if there never was one.
        last_at: when the head was asked for it, in seconds since the epoch.
        nodes, workers, channels: what the newest status names.
        methods: calls by (job, group) and method.
        events: the newest events.
        event_counts: number of events by kind: those in the head's event log when this process began, and all since.
        calls_history, cpu_history: calls in a second, and busy processors, of the cluster at the last samples. A
            machine with several nodes counts once.
        cpus: number of the processors whose use the newest of `cpu_history` has, 0 if no node's use is known.
        node_history: busy share of each node's processors at the last samples, by id.
        number: number of samples so far.
    """

    def __init__(self) -> None:
        self.sample = Sample(0.0, 0.0, fault="the head was not asked yet")
        self.last_status: Status | None = None
        self.last_at = 0.0
        self.nodes: list[NodeView] = []
        self.workers: list[WorkerView] = []
        self.channels: list[Channel] = []
        self.methods: dict[tuple[str, str], dict[str, MethodTotals]] = {}
        self.events: collections.deque[ClusterEvent] = collections.deque(maxlen=KEPT_EVENTS)
        self.event_counts: collections.Counter[str] = collections.Counter()
        self.calls_history: collections.deque[float] = collections.deque(maxlen=KEPT)
        self.cpu_history: collections.deque[float] = collections.deque(maxlen=KEPT)
        self.cpus = 0
        self.node_history: dict[str, collections.deque[float]] = {}
        self.number = 0
        self._rates = Rates()
        self._calls: dict[str, dict[str, MethodFigures]] = {}  # of each worker at the last sample, by id

    def take(self, sample: Sample) -> None:
        """Take the newest sample. One without a status keeps what the page shows."""
        self.sample = sample
        self.number += 1
        if sample.status is None:
            return
        self.last_status, self.last_at = sample.status, sample.at
        self._take_nodes(sample, sample.status)
        self._take_machines()
        self._take_workers(sample, sample.status)
        self._take_channels(sample)
        self._rates.turn()

    def take_events(self, events: Iterable[ClusterEvent]) -> None:
        for event in events:
            self.events.append(event)
            self.event_counts[event.kind] += 1

    def worker(self, id: str) -> WorkerView | None:
        return next((worker for worker in self.workers if worker.state.id == id), None)

    def node(self, id: str) -> NodeView | None:
        return next((node for node in self.nodes if node.id == id), None)

    def _take_nodes(self, sample: Sample, status: Status) -> None:
        counts = collections.Counter(
            worker.node_rank for group in status.groups for worker in group.workers if worker.state != "gone"
        )
        names = node_names(status.nodes)
        self.nodes = []
        for state in sorted(status.nodes, key=lambda node: (node.rank < 0, node.rank, node.report.hostname)):
            id = state.report.node_id
            figures, cpu = sample.figures.get(id), None
            if figures is not None and figures.cpus:
                busy = self._rates.take(("node", state.incarnation), sample.clock - figures.age_s, figures.cpu_s)
                cpu = None if busy is None else min(1.0, busy / figures.cpus)
                if cpu is not None:
                    self.node_history.setdefault(id, collections.deque(maxlen=KEPT)).append(cpu)
            hardware = hardware_text(probed(state), held_on(state, status.leases))
            fault, workers = sample.faults.get(id, ""), counts[state.rank]
            self.nodes.append(NodeView(state, figures, fault, cpu, workers, names[id], hardware))
        known = {node.id for node in self.nodes}
        self.node_history = {id: history for id, history in self.node_history.items() if id in known}

    def _take_machines(self) -> None:
        machines: dict[str, tuple[float, int]] = {}  # share of the processors that are busy, and their number
        for node in self.nodes:
            if node.figures is not None and node.cpu is not None:
                machines.setdefault(node.figures.machine or node.id, (node.cpu, node.figures.cpus))
        self.cpus = sum(cpus for _, cpus in machines.values())
        if machines:
            self.cpu_history.append(sum(share * cpus for share, cpus in machines.values()))

    def _take_workers(self, sample: Sample, status: Status) -> None:
        nodes = {node.state.rank: node for node in self.nodes if node.state.rank >= 0}
        found = {one.id: one for figures in sample.figures.values() for one in figures.workers}
        ages = {one.id: figures.age_s for figures in sample.figures.values() for one in figures.workers}
        calls: dict[str, dict[str, MethodFigures]] = {}
        recent: dict[tuple[str, str], dict[str, MethodFigures]] = {}
        self.workers = []
        for group in status.groups:
            for state in sorted(group.workers, key=lambda worker: worker.rank):
                figures, node = found.get(state.id), nodes.get(state.node_rank)
                cpu = rate = None
                if figures is not None:
                    at = sample.clock - ages[state.id]
                    if figures.process is not None:
                        cpu = self._rates.take(("cpu", state.id), at, figures.process.cpu_s)
                    if not figures.fault:
                        done = sum(method.done + method.failed for method in figures.calls)
                        rate = self._rates.take(("calls", state.id), at, done)
                        calls[state.id] = {method.method: method for method in figures.calls}
                        self._add_calls(recent.setdefault((group.namespace, group.name), {}), figures)
                if state.id in self._calls and state.id not in calls and state.state != "gone":
                    calls[state.id] = self._calls[state.id]  # it has not answered this time
                pulse, place = state.pulse, ""
                if pulse is not None and pulse.breakpoint and not pulse.unresponsive:
                    place = breakpoint_clause(f"{group.name}:{state.rank}", group.namespace, pulse, status.at)
                where = (None, state.node_ip) if node is None else (node.state, node.name)
                self.workers.append(WorkerView(group, state, where[0], figures, cpu, rate, place, where[1]))
        self._calls = calls
        alive = {(group.namespace, group.name) for group in status.groups}
        self.methods = {key: methods for key, methods in self.methods.items() if key in alive}
        for key, methods in recent.items():
            self._add_to_totals(self.methods.setdefault(key, {}), methods)
        rates = [worker.calls for worker in self.workers if worker.calls is not None]
        if rates or not self.workers:  # else this is the first sample
            self.calls_history.append(sum(rates))

    def _add_calls(self, recent: dict[str, MethodFigures], figures: WorkerFigures) -> None:
        """Add what a worker has called since the sample before to *recent*, which has that of its whole group."""
        before = self._calls.get(figures.id, {})
        for now in figures.calls:
            last = before.get(now.method)
            if last is None or last.done > now.done or last.failed > now.failed:
                last = MethodFigures(now.method)
            so_far = recent.get(now.method) or MethodFigures(now.method)
            recent[now.method] = MethodFigures(
                now.method,
                so_far.done + now.done - last.done,
                so_far.failed + now.failed - last.failed,
                so_far.seconds + max(0.0, now.seconds - last.seconds),
                _sum(so_far.buckets, _difference(now.buckets, last.buckets)),
            )

    def _add_to_totals(self, totals: dict[str, MethodTotals], recent: dict[str, MethodFigures]) -> None:
        for total in totals.values():
            total.recent = MethodFigures("")
        for name, new in sorted(recent.items(), key=lambda pair: -pair[1].done):
            key = name if name in totals or len(totals) < MOST_METHODS - 1 else ""
            total = totals.setdefault(key, MethodTotals())
            total.done += new.done
            total.failed += new.failed
            total.seconds += new.seconds
            total.buckets = _sum(total.buckets, new.buckets)
            total.recent = MethodFigures(
                key,
                total.recent.done + new.done,
                total.recent.failed + new.failed,
                total.recent.seconds + new.seconds,
                _sum(total.recent.buckets, new.buckets),
            )

    def _take_channels(self, sample: Sample) -> None:
        depths = {(channel.job, channel.name): channel.depths for channel in self.channels}
        sums: dict[tuple[str, str], tuple[GroupState, ChannelFigures]] = {}
        for worker in self.workers:
            if worker.group.name.startswith(CHANNEL_GROUPS) and worker.figures is not None and worker.figures.channel:
                key = worker.group.namespace, worker.group.name.removeprefix(CHANNEL_GROUPS)
                sums[key] = worker.group, added(sums.get(key, (None, ChannelFigures()))[1], worker.figures.channel)
        self.channels = []
        for (job, name), (group, figures) in sorted(sums.items()):
            rate = self._rates.take(("channel", job, name), sample.clock, figures.entered)
            history = depths.get((job, name)) or collections.deque(maxlen=KEPT)
            history.append(figures.items)
            self.channels.append(Channel(job, name, group, figures, rate, history))


def added(one: ChannelFigures, other: ChannelFigures) -> ChannelFigures:
    """Return the sum of the figures of two replicas of a channel. Each replica has the limits for itself."""
    return ChannelFigures(*(getattr(one, name) + getattr(other, name) for name in ChannelFigures.__struct_fields__))


def quantile(buckets: list[int], share: float) -> float | None:
    """Return the bound of BOUNDS_S below which *share* of the calls were; infinity beyond them; None without calls."""
    wanted = sum(buckets) * share
    if not wanted:
        return None
    seen = 0
    for bound, number in zip((*BOUNDS_S, float("inf")), buckets, strict=False):
        seen += number
        if seen >= wanted:
            return bound
    return None


def _sum(one: list[int], other: list[int]) -> list[int]:
    length = max(len(one), len(other))
    return [sum(pair) for pair in zip(_padded(one, length), _padded(other, length), strict=True)]


def _difference(now: list[int], before: list[int]) -> list[int]:
    return [max(0, a - b) for a, b in zip(now, _padded(before, len(now)), strict=True)]


def _padded(numbers: list[int], length: int) -> list[int]:
    return numbers[:length] + [0] * (length - len(numbers))
