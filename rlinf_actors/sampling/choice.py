"""Which rows of a Board a person wants to see, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rlinf_actors.sampling.sample import Board, Channel, NodeView, WorkerView
from rlinf_actors.wire.figure_values import NodeFigures

T = TypeVar("T")
Sorts = Mapping[str, Callable[[T], Any]]

WORKER_SORTS: Sorts[WorkerView] = {
    "name": lambda worker: (worker.group.namespace, worker.group.name, worker.state.rank),
    "CPU": lambda worker: -(worker.cpu or 0.0),
    "memory": lambda worker: -(worker.figures.process.rss_bytes if worker.figures and worker.figures.process else 0),
    "GPU": lambda worker: -(worker.figures.accelerator_bytes if worker.figures else -1),
    "calls": lambda worker: -(worker.calls or 0.0),
    "queue": lambda worker: -(worker.figures.queued if worker.figures else 0),
    "node": lambda worker: (worker.state.node_rank, worker.group.name, worker.state.rank),
}
NODE_SORTS: Sorts[NodeView] = {
    "name": lambda node: (node.state.rank < 0, node.state.rank, node.name),
    "CPU": lambda node: -(node.cpu or 0.0),
    "memory": lambda node: -(memory_share(node.figures) or 0.0),
    "GPU": lambda node: -(device_share(node.figures) or 0.0),
}
CHANNEL_SORTS: Sorts[Channel] = {
    "name": lambda channel: (channel.job, channel.name),
    "memory": lambda channel: -channel.figures.size,
    "depth": lambda channel: -channel.figures.items,
}


def chosen_workers(board: Board, query: str, sort: str) -> list[WorkerView]:
    """Return the workers of which each word of *query* is a part of the name, job, node, state, method or class."""

    def text(worker: WorkerView) -> str:
        method = worker.figures.method if worker.figures is not None else ""
        states = f"{worker.state.state} {worker.condition}"
        return f"{worker.name} {worker.group.namespace} {worker.place} {states} {method} {worker.group.cls}"

    return _chosen(board.workers, text, query, WORKER_SORTS, sort)


def chosen_nodes(board: Board, query: str, sort: str) -> list[NodeView]:
    """Return the nodes of which each word of *query* is a part of the name, address, state or hardware."""

    def text(node: NodeView) -> str:
        report = node.state.report
        return f"{node.name} {report.ip} {node.state.state} {' '.join(one.type for one in report.resources)}"

    return _chosen(board.nodes, text, query, NODE_SORTS, sort)


def chosen_channels(board: Board, query: str, sort: str) -> list[Channel]:
    """Return the channels of which each word of *query* is a part of the name or job."""
    return _chosen(board.channels, lambda channel: f"{channel.name} {channel.job}", query, CHANNEL_SORTS, sort)


def memory_share(figures: NodeFigures | None) -> float | None:
    """Return the share of a node's memory that is in use, None if unknown."""
    if figures is None or not figures.memory_bytes:
        return None
    return 1 - figures.memory_free_bytes / figures.memory_bytes


def device_share(figures: NodeFigures | None) -> float | None:
    """Return how busy a node's accelerators are on average, as a share; None if unknown."""
    known = [one.utilization for one in figures.devices if one.utilization >= 0] if figures else []
    return sum(known) / len(known) / 100 if known else None


def _chosen(rows: Iterable[T], text: Callable[[T], str], query: str, sorts: Sorts[T], sort: str) -> list[T]:
    """Return the rows whose text has each word of *query*, sorted by *sort*, or by name where there is no such sort.

    Rows that are equal by *sort* are in the order of their names, so that they keep their places from round to round.
    """
    words, by_name = query.lower().split(), sorts["name"]
    found = [row for row in rows if all(word in text(row).lower() for word in words)]
    return sorted(sorted(found, key=by_name), key=sorts.get(sort, by_name))
