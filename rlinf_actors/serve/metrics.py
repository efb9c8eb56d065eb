"""The metrics of the Board in the text format of Prometheus. A scrape reads what the last round has found.

Counters of workers begin anew when a worker is restarted. Those of groups do not: they are sums over all ranks and
incarnations since this process began.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rlinf_actors.counters import BOUNDS_S
from rlinf_actors.sampling.sample import Board, NodeView, WorkerView
from rlinf_actors.shown import printable
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.figure_values import ProcessFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "rlinf_actors_"
NODE = ("node",)
WORKER = ("job", "group", "rank", "node")
METHOD = ("job", "group", "method")
CHANNEL = ("job", "channel")
LABEL_CHARS = 200
"""Most characters of a label's value. Names of nodes, jobs and methods come from members."""


class BoardCollector(Collector):
    """Makes the metrics of *board* when they are read."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        board = self._board
        sample, status = board.sample, board.sample.status
        yield _gauge("up", "1 if the head has answered the last poll", [((), float(status is not None))])
        yield _gauge("poll_age_seconds", "Age of the last poll", [((), max(0.0, time.monotonic() - sample.clock))])
        yield _gauge("poll_seconds", "Duration of the last poll", [((), sample.took_s)])
        kinds = [((kind,), float(count)) for kind, count in board.event_counts.items()]
        yield _counter("events", "Events in the head's event log when this process began, and since", kinds, ("kind",))
        if status is not None:
            yield from _of_head(board, status)
            yield from _of_nodes(board.nodes)
            yield from _of_workers(board.workers, board.nodes)
            yield from _of_methods(board)
            yield from _of_channels(board)


def text(board: Board) -> bytes:
    """Return the metrics of *board*."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BoardCollector(board))
    return generate_latest(registry)


Rows = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, help: str, rows: Rows, labels: tuple[str, ...] = ()) -> Metric:
    metric = GaugeMetricFamily(PREFIX + name, help, labels=labels)
    for values, value in rows:
        metric.add_metric([printable(one, LABEL_CHARS) for one in values], value)
    return metric


def _counter(name: str, help: str, rows: Rows, labels: tuple[str, ...] = ()) -> Metric:
    metric = CounterMetricFamily(PREFIX + name, help, labels=labels)
    for values, value in rows:
        metric.add_metric([printable(one, LABEL_CHARS) for one in values], value)
    return metric


def _of_head(board: Board, status: Status) -> Iterator[Metric]:
    yield _gauge(
        "head_info", "The head's version and run", [((status.version, status.epoch), 1.0)], ("version", "epoch")
    )
    yield _gauge("head_answer_seconds", "Time in which the head answered", [((), board.sample.answer_s)])
    yield _gauge("head_uptime_seconds", "Time since the head's start", [((), status.uptime_s)])
    yield _gauge("head_troubles", "Problems of the head that need a person", [((), float(len(status.trouble)))])
    yield _gauge("emergency_stops", "Emergency stops in force", [((), float(len(status.stopped)))])
    yield _gauge("drivers", "Connected drivers", [((), float(len(status.drivers)))])
    leases = Counter((lease.title, lease.namespace, lease.group, lease.state) for lease in status.leases)
    yield _gauge(
        "robot_lease",
        "1 for each robot that a group holds; state lost: its node is lost, and the worker may still run",
        [(key, 1.0) for key in leases],
        ("robot", "job", "group", "state"),
    )
    robots = {lease.title: lease.held_s for lease in status.leases}
    yield _gauge("robot_lease_held_seconds", "Time since the lease", [((t,), s) for t, s in robots.items()], ("robot",))
    groups = Counter(group.state for group in status.groups)
    yield _gauge("groups", "Groups by state", [((state,), float(n)) for state, n in groups.items()], ("state",))


def _of_nodes(nodes: list[NodeView]) -> Iterator[Metric]:
    states = Counter(node.state.state for node in nodes)
    yield _gauge("nodes", "Nodes by state", [((state,), float(n)) for state, n in states.items()], ("state",))
    up = [((node.name,), float(node.state.state in ("ready", "draining"))) for node in nodes]
    yield _gauge("node_up", "1 if the node is ready or draining", up, NODE)
    answers = [((node.name,), float(node.figures is not None)) for node in nodes]
    yield _gauge("node_answers", "1 if the node has answered the last poll with its figures", answers, NODE)
    yield _gauge("node_last_seen_seconds", "Age of the node's last message", _each(nodes, "last_seen_s"), NODE)
    yield _gauge(
        "node_faults",
        "Things that the node could not read",
        [((n.name,), float(len(n.state.report.faults))) for n in nodes],
        NODE,
    )
    known = [(node, node.figures) for node in nodes if node.figures is not None]
    for name, help, attribute in (
        ("node_cpus", "Processors of the node", "cpus"),
        ("node_load1", "Processes that run or wait for a processor, on average over a minute", "load"),
        ("node_memory_bytes", "Memory of the node", "memory_bytes"),
        ("node_memory_free_bytes", "Memory that programs can still get", "memory_free_bytes"),
        ("agentd_loop_lag_seconds", "How late a timer of agentd was", "lag_s"),
    ):
        yield _gauge(name, help, [((node.name,), float(getattr(figures, attribute))) for node, figures in known], NODE)
    cpu = [((node.name,), figures.cpu_s) for node, figures in known]
    yield _counter("node_cpu_seconds", "CPU time that the processors of the node were busy", cpu, NODE)
    yield from _of_processes("agentd", NODE, [((node.name,), figures.agentd) for node, figures in known])
    disks = [((node.name, disk.purpose), disk) for node, figures in known for disk in figures.disks]
    labels = ("node", "purpose")
    yield _gauge("node_disk_bytes", "Size of a file system", [(k, float(d.total_bytes)) for k, d in disks], labels)
    free = [(k, float(d.free_bytes)) for k, d in disks]
    yield _gauge("node_disk_free_bytes", "Room in a file system", free, labels)
    devices = [
        ((node.name, device.type, str(index)), device)
        for node, figures in known
        for index, device in enumerate(figures.devices)
    ]
    of_device = ("node", "type", "index")
    for name, help, attribute, scale in (
        ("accelerator_utilization_ratio", "Share of time that the accelerator was busy", "utilization", 0.01),
        ("accelerator_temperature_celsius", "Temperature of the accelerator", "temperature", 1.0),
        ("accelerator_memory_bytes", "Memory of the accelerator", "memory_bytes", 1.0),
        ("accelerator_memory_used_bytes", "Memory in use on the accelerator", "memory_used_bytes", 1.0),
    ):
        rows = [(key, getattr(device, attribute) * scale) for key, device in devices if getattr(device, attribute) >= 0]
        yield _gauge(name, help, rows, of_device)
    counts = [
        ((node.name, resource.type), float(len(resource.infos)))
        for node in nodes
        for resource in node.state.report.resources
    ]
    yield _gauge("node_hardware", "Pieces of hardware of the node, by type", counts, ("node", "type"))


def _each(nodes: list[NodeView], attribute: str) -> list[tuple[tuple[str, ...], float]]:
    return [((node.name,), float(getattr(node.state, attribute))) for node in nodes]


def _of_processes(
    name: str, labels: tuple[str, ...], rows: list[tuple[tuple[str, ...], ProcessFigures]]
) -> Iterator[Metric]:
    yield _counter(f"{name}_cpu_seconds", f"CPU time of {name}", [(key, used.cpu_s) for key, used in rows], labels)
    yield _gauge(
        f"{name}_resident_bytes", f"Memory of {name}", [(key, float(used.rss_bytes)) for key, used in rows], labels
    )
    yield _gauge(f"{name}_threads", f"Threads of {name}", [(key, float(used.threads)) for key, used in rows], labels)
    seen = [(key, float(used.descriptors)) for key, used in rows if used.descriptors is not None]
    yield _gauge(f"{name}_open_descriptors", f"Open descriptors of {name}", seen, labels)


def _of_workers(workers: list[WorkerView], nodes: list[NodeView]) -> Iterator[Metric]:
    names = {node.state.rank: node.name for node in nodes}

    def key(worker: WorkerView) -> tuple[str, ...]:
        node = names.get(worker.state.node_rank, worker.state.node_ip)
        return worker.group.namespace, worker.group.name, str(worker.state.rank), node

    states = Counter((worker.group.namespace, worker.group.name, worker.state.state) for worker in workers)
    labels = ("job", "group", "state")
    yield _gauge("workers", "Workers by state", [(one, float(number)) for one, number in states.items()], labels)
    living = [worker for worker in workers if worker.state.state != "gone"]
    silent = [(key(w), float(bool(w.state.pulse and w.state.pulse.unresponsive))) for w in living]
    yield _gauge("worker_unresponsive", "1 if the worker's I/O thread does not answer", silent, WORKER)
    restarts = [(key(worker), float(worker.state.restarts)) for worker in living]
    yield _counter("worker_restarts", "Restarts of the rank", restarts, WORKER)
    used = [(key(w), w.figures.process) for w in living if w.figures is not None and w.figures.process is not None]
    yield from _of_processes("worker", WORKER, used)
    known = [(key(w), w.figures) for w in living if w.figures is not None and not w.figures.fault]
    for name, help, attribute in (
        ("worker_queued_calls", "Calls that wait for their turn", "queued"),
        ("worker_current_call_seconds", "Time for which the longest call has been running", "call_s"),
        ("worker_unacknowledged_bytes", "Bytes sent that receivers have not acknowledged", "unacknowledged_bytes"),
        ("worker_messages_waiting", "Messages that wait for room at their receivers", "waiting_messages"),
        ("worker_loop_lag_seconds", "Time until the worker's I/O thread had a question", "delay_s"),
    ):
        yield _gauge(name, help, [(one, float(getattr(figures, attribute))) for one, figures in known], WORKER)
    paths = [((*one, path.path), path) for one, figures in known for path in figures.sent]
    by_path = (*WORKER, "path")
    sizes = [(one, float(path.size)) for one, path in paths]
    yield _counter("worker_sent_bytes", "Bytes of messages and large parts, by path", sizes, by_path)
    numbers = [(one, float(path.messages)) for one, path in paths]
    yield _counter("worker_sent_messages", "Messages and large parts, by path", numbers, by_path)


def _of_methods(board: Board) -> Iterator[Metric]:
    calls = CounterMetricFamily(PREFIX + "calls", "Calls of a group's methods by outcome", labels=(*METHOD, "outcome"))
    times = HistogramMetricFamily(PREFIX + "call_duration_seconds", "How long calls ran that returned", labels=METHOD)
    for (job, group), methods in board.methods.items():
        for method, total in methods.items():
            labels = [printable(one, LABEL_CHARS) for one in (job, group, method or "(others)")]
            calls.add_metric([*labels, "returned"], total.done)
            calls.add_metric([*labels, "raised"], total.failed)
            seen, buckets = 0, []
            for bound, number in zip([*map(str, BOUNDS_S), "+Inf"], total.buckets, strict=True):
                seen += number
                buckets.append((bound, seen))
            times.add_metric(labels, buckets, total.seconds)
    yield calls
    yield times


def _of_channels(board: Board) -> Iterator[Metric]:
    rows = [((channel.job, channel.name), channel.figures) for channel in board.channels]
    for name, help, attribute in (
        ("channel_items", "Items that wait in the channel", "items"),
        ("channel_bytes", "Bytes of the items that the channel holds", "size"),
        ("channel_keys", "Keys in use", "keys"),
        ("channel_unacknowledged", "Deliveries that are not acknowledged", "out"),
        ("channel_puts_waiting", "Puts that wait for room", "puts_waiting"),
        ("channel_gets_waiting", "Gets that wait for items", "gets_waiting"),
        ("channel_undeliverable", "Items that were delivered too often", "undeliverable"),
        ("channel_max_items", "Most items under a key, 0 for no limit", "max_items"),
        ("channel_max_bytes", "Most bytes of all items, 0 for no limit", "max_bytes"),
    ):
        yield _gauge(name, help, [(key, float(getattr(figures, attribute))) for key, figures in rows], CHANNEL)
    entered = [(key, float(figures.entered)) for key, figures in rows]
    yield _counter("channel_entered", "Items that have entered the channel", entered, CHANNEL)
