"""What `rlinf-actors top` shows of the Board: views, sorting, filter, rows and JSON; and what each key does. Pure.

The ``..._dict`` functions return what --json prints: their keys are stable; new keys may be added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rlinf_actors.model.readable import byte_count, duration
from rlinf_actors.sampling.choice import (
    CHANNEL_SORTS,
    NODE_SORTS,
    WORKER_SORTS,
    chosen_channels,
    chosen_nodes,
    chosen_workers,
)
from rlinf_actors.sampling.sample import Board, Channel, NodeView, WorkerView
from rlinf_actors.wire.figure_values import DeviceFigures

NONE = "-"
GAP = 2
"""Characters between two columns."""
VIEWS = ("workers", "nodes", "channels")
SORT_KEYS: Mapping[str, str] = {"c": "CPU", "m": "memory", "g": "GPU", "d": "depth", "n": "name"}
"""The key of each order."""
SORTS: Mapping[str, frozenset[str]] = {
    "workers": frozenset(WORKER_SORTS),
    "nodes": frozenset(NODE_SORTS),
    "channels": frozenset(CHANNEL_SORTS),
}
HELP = (
    ("1 2 3", "workers, nodes, channels"),
    ("Tab", "next"),
    ("c m g d n", "sort by CPU, memory, GPU, depth, name"),
    ("/", "filter"),
    ("q", "quit"),
)
MOST_QUERY = 200
"""Most characters of a filter."""
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_STEPS: Mapping[str, int] = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10}


class Choice(msgspec.Struct, frozen=True):
    """What a person has chosen to see.

    Attributes:
        view: one of VIEWS.
        sort: one of the values of SORT_KEYS. A view that has no such order is sorted by name.
        query: the filter: words that a row has, "" for all rows.
        typing: True while a person types the filter.
        first: index of the first row on the screen.
    """

    view: str = "workers"
    sort: str = "name"
    query: str = ""
    typing: bool = False
    first: int = 0

    @property
    def order(self) -> str:
        return self.sort if self.sort in SORTS[self.view] else "name"


class Table(msgspec.Struct, frozen=True):
    """The rows of a view, all of them.

    Attributes:
        headings: one for each cell of a row.
        rows: the texts.
        empty: why there is no row.
        spare: headings of columns that a narrow screen can do without, the least important first.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str
    spare: Sequence[str]

    def narrowed(self, width: int) -> Table:
        """Return the table for a screen of *width* characters, without columns for which there is no room. Columns
        without a value are left out first.
        """
        columns = dict(zip(self.headings, zip(*self.rows, strict=True), strict=True)) if self.rows else {}
        empty = [heading for heading, cells in columns.items() if set(cells) == {NONE}]
        for heading in (*empty, *self.spare):
            if sum(max(map(len, (name, *cells))) + GAP for name, cells in columns.items()) - GAP <= width:
                break
            columns.pop(heading, None)
        rows = [*zip(*columns.values(), strict=True)]
        return replace(self, headings=[*columns], rows=rows) if self.rows else self


def keys(text: str) -> list[str]:
    """Return the keys of what a terminal has sent: characters, and escape sequences such as those of the arrows."""
    return _KEY.findall(text)


def pressed(choice: Choice, key: str) -> Choice | None:
    """Return what is shown after *key* was pressed, None to quit."""
    if choice.typing:
        return _typed(choice, key)
    if key in ("q", "Q", "\x03", "\x04"):
        return None
    if key in SORT_KEYS:
        return replace(choice, sort=SORT_KEYS[key], first=0)
    if key in ("1", "2", "3"):
        return replace(choice, view=VIEWS[int(key) - 1], first=0)
    if key in ("\t", "\x1b[C", "\x1b[D", "\x1b[Z"):
        step = 1 if key in ("\t", "\x1b[C") else -1
        return replace(choice, view=VIEWS[(VIEWS.index(choice.view) + step) % len(VIEWS)], first=0)
    if key in _STEPS:
        return replace(choice, first=max(0, choice.first + _STEPS[key]))
    if key == "/":
        return replace(choice, typing=True)
    return replace(choice, query="", first=0) if key == "\x1b" else choice


def _typed(choice: Choice, key: str) -> Choice:
    if key in ("\r", "\n"):
        return replace(choice, typing=False)
    if key == "\x1b":
        return replace(choice, typing=False, query="", first=0)
    if key in ("\x7f", "\b"):
        return replace(choice, query=choice.query[:-1], first=0)
    if key == "\x15":  # Ctrl-U
        return replace(choice, query="", first=0)
    return replace(choice, query=(choice.query + key)[:MOST_QUERY], first=0) if key.isprintable() else choice


def table(board: Board, choice: Choice) -> Table:
    """Return the rows of a view that pass the filter, in their order."""
    return _TABLES[choice.view](board, choice)


def headline(board: Board) -> str:
    """Return the line about the whole cluster."""
    nodes, workers = (node.state.state for node in board.nodes), (worker.state.state for worker in board.workers)
    cpus = sum(node.figures.cpus for node in board.nodes if node.figures and node.cpu is not None)
    parts = [f"nodes: {_counts(nodes)}", f"workers: {_counts(state for state in workers if state != 'gone')}"]
    return "; ".join([*parts, f"{board.cpu_history[-1]:.1f} of {cpus} CPUs busy"] if cpus else parts)


_NODE_SPARE = ("CPUS", "HARDWARE", "WORKERS", "RANK", "GPU MEMORY", "FAULT", "MEMORY")
_WORKER_SPARE = ("PID", "JOB", "WAITING", "STATE", "NODE", "GPU MEMORY", "FAULT", "MEMORY", "FOR")
_CHANNEL_SPARE = ("KEYS", "OUT", "JOB", "STATE", "PUTS/S", "BYTES", "PUTS WAIT", "GETS WAIT")


def _nodes(board: Board, choice: Choice) -> Table:
    def row(node: NodeView) -> list[str]:
        figures, devices = node.figures, node.figures.devices if node.figures else []
        hardware = [f"{len(one.infos)} {one.type}" for one in node.state.report.resources]
        known = [one for one in devices if one.memory_used_bytes >= 0]
        held, size = sum(one.memory_used_bytes for one in known), sum(one.memory_bytes for one in known)
        return [
            str(node.state.rank) if node.state.rank >= 0 else NONE,
            node.name,
            node.state.state,
            str(node.workers),
            _percent(node.cpu),
            str(figures.cpus if figures else node.state.report.num_cpus),
            _of(figures.memory_bytes - figures.memory_free_bytes, figures.memory_bytes) if figures else NONE,
            ", ".join(hardware) or NONE,
            " ".join(str(one.utilization) if one.utilization >= 0 else NONE for one in devices) or NONE,
            _of(held, size) if known else NONE,
            node.fault or NONE,
        ]

    heads = ["RANK", "NODE", "STATE", "WORKERS", "CPU", "CPUS", "MEMORY", "HARDWARE", "GPU %", "GPU MEMORY", "FAULT"]
    return _table(
        heads, map(row, chosen_nodes(board, choice.query, choice.order)), choice, "no node has registered", _NODE_SPARE
    )


def _workers(board: Board, choice: Choice) -> Table:
    now = board.last_status.at if board.last_status is not None else 0.0

    def row(worker: WorkerView) -> list[str]:
        figures = worker.figures
        process = figures.process if figures else None
        return [
            worker.name,
            worker.group.namespace,
            worker.node.report.hostname if worker.node else worker.state.node_ip,
            worker.condition,
            str(worker.state.pid or NONE),
            _percent(worker.cpu),
            byte_count(process.rss_bytes) if process else NONE,
            byte_count(figures.accelerator_bytes) if figures and figures.accelerator_bytes >= 0 else NONE,
            figures.method if figures and figures.method else NONE,
            duration(figures.call_s) if figures and figures.method else NONE,
            str(figures.queued) if figures else NONE,
            fault(worker) or worker.breakpoint_clause(now) or NONE,
        ]

    heads = [
        "WORKER", "JOB", "NODE", "STATE", "PID", "CPU", "MEMORY", "GPU MEMORY", "METHOD", "FOR", "WAITING", "FAULT"
    ]  # fmt: skip
    return _table(
        heads,
        map(row, chosen_workers(board, choice.query, choice.order)),
        choice,
        "no worker is running",
        _WORKER_SPARE,
    )


def _channels(board: Board, choice: Choice) -> Table:
    def row(channel: Channel) -> list[str]:
        figures = channel.figures
        return [
            channel.name,
            channel.job,
            str(figures.items),
            byte_count(figures.size),
            str(figures.keys),
            str(figures.out),
            str(figures.puts_waiting),
            str(figures.gets_waiting),
            NONE if channel.entered_rate is None else f"{channel.entered_rate:.1f}",
            "closed" if figures.closed else "open",
        ]

    heads = ["CHANNEL", "JOB", "ITEMS", "BYTES", "KEYS", "OUT", "PUTS WAIT", "GETS WAIT", "PUTS/S", "STATE"]
    return _table(
        heads,
        map(row, chosen_channels(board, choice.query, choice.order)),
        choice,
        "no channel is open",
        _CHANNEL_SPARE,
    )


_TABLES: Mapping[str, Callable[[Board, Choice], Table]] = {
    "nodes": _nodes,
    "workers": _workers,
    "channels": _channels,
}


def _table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], choice: Choice, empty: str, spare: Sequence[str]
) -> Table:
    return Table(headings, list(rows), f"no row fits the filter {choice.query!r}" if choice.query else empty, spare)


def fault(worker: WorkerView) -> str:
    """Return why there are no figures of a worker, or why it counts as unresponsive; "" if there is no such fault."""
    if worker.state.pulse is not None and worker.state.pulse.unresponsive:
        return worker.state.pulse.unresponsive
    return worker.figures.fault if worker.figures is not None else ""


def report(board: Board, head: str) -> dict[str, Any]:
    """Return the JSON object of `top --json`."""
    status = board.last_status
    return {
        "head": head,
        "at": board.sample.at if status is None else status.at,
        "nodes": [node_dict(node) for node in board.nodes],
        "workers": [worker_dict(worker) for worker in board.workers],
        "channels": [channel_dict(channel) for channel in board.channels],
    }


def node_dict(node: NodeView) -> dict[str, Any]:
    figures = node.figures
    return {
        "rank": node.state.rank if node.state.rank >= 0 else None,
        "id": node.id,
        "hostname": node.name,
        "state": node.state.state,
        "workers": node.workers,
        "cpu": _rounded(node.cpu),
        "cpus": figures.cpus if figures else node.state.report.num_cpus,
        "load": figures.load if figures else None,
        "memory_bytes": figures.memory_bytes if figures else node.state.report.memory_bytes,
        "memory_used_bytes": figures.memory_bytes - figures.memory_free_bytes if figures else None,
        "devices": [device_dict(device) for device in figures.devices] if figures else [],
        "fault": node.fault,
    }


def device_dict(device: DeviceFigures) -> dict[str, Any]:
    return {key: None if value == -1 else value for key, value in msgspec.structs.asdict(device).items()}


def worker_dict(worker: WorkerView) -> dict[str, Any]:
    figures = worker.figures
    process = figures.process if figures else None
    return {
        "name": worker.name,
        "namespace": worker.group.namespace,
        "group": worker.group.name,
        "rank": worker.state.rank,
        "id": worker.state.id,
        "state": worker.state.state,
        "node": worker.node.report.hostname if worker.node else "",
        "pid": worker.state.pid,
        "cpu": _rounded(worker.cpu),
        "rss_bytes": process.rss_bytes if process else None,
        "accelerator_bytes": figures.accelerator_bytes if figures and figures.accelerator_bytes >= 0 else None,
        "method": figures.method if figures else "",
        "for_s": round(figures.call_s, 3) if figures and figures.method else 0.0,
        "queued": figures.queued if figures else None,
        "calls": _rounded(worker.calls),
        "fault": fault(worker),
        "breakpoint": worker.state.pulse.breakpoint if worker.state.pulse is not None else "",
    }


def channel_dict(channel: Channel) -> dict[str, Any]:
    names = ("items", "size", "keys", "out", "undeliverable", "puts_waiting", "gets_waiting", "entered")
    return {
        "name": channel.name,
        "job": channel.job,
        **{name: getattr(channel.figures, name) for name in names},
        "closed": bool(channel.figures.closed),
        "entered_rate": _rounded(channel.entered_rate),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


def _of(used: int, size: int) -> str:
    return f"{byte_count(used)} of {byte_count(size)}"


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common()) or "none"
