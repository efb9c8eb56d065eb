"""What `rlinf-actors top` shows of the Board: views, sorting, filter, rows and JSON; and what each key does. Pure.

The ``..._dict`` functions return what --json prints: their keys are stable; new keys may be added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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

T = TypeVar("T")

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
    view = _VIEWS[choice.view]
    rows = [[cell(one) for cell in view.columns.values()] for one in view.chosen(board, choice.query, choice.order)]
    empty = f"no row fits the filter {choice.query!r}" if choice.query else view.empty
    return Table([*view.columns], rows, empty, view.spare)


def headline(board: Board) -> str:
    """Return the line about the whole cluster."""
    nodes, workers = (node.state.state for node in board.nodes), (worker.state.state for worker in board.workers)
    parts = [f"nodes: {_counts(nodes)}", f"workers: {_counts(state for state in workers if state != 'gone')}"]
    return "; ".join([*parts, f"{board.cpu_history[-1]:.1f} of {board.cpus} CPUs busy"] if board.cpus else parts)


def _memory(node: NodeView) -> str:
    figures = node.figures
    return _of(figures.memory_bytes - figures.memory_free_bytes, figures.memory_bytes) if figures else NONE


def _devices(node: NodeView) -> Sequence[DeviceFigures]:
    return node.figures.devices if node.figures else []


def _device_use(node: NodeView) -> str:
    return " ".join(str(one.utilization) if one.utilization >= 0 else NONE for one in _devices(node)) or NONE


def _device_memory(node: NodeView) -> str:
    known = [one for one in _devices(node) if one.memory_used_bytes >= 0]
    return _of(sum(one.memory_used_bytes for one in known), sum(one.memory_bytes for one in known)) if known else NONE


def _resident(worker: WorkerView) -> str:
    process = worker.figures.process if worker.figures else None
    return byte_count(process.rss_bytes) if process else NONE


def _accelerator_bytes(worker: WorkerView) -> str:
    figures = worker.figures
    return byte_count(figures.accelerator_bytes) if figures and figures.accelerator_bytes >= 0 else NONE


class _View(msgspec.Struct, Generic[T], frozen=True):
    """How a view is made: the cells of a row by heading, and the rows that pass a filter, in an order.

    `empty` and `spare` are those of its Table.
    """

    columns: Mapping[str, Callable[[T], str]]
    chosen: Callable[[Board, str, str], Iterable[T]]
    empty: str
    spare: Sequence[str]


_NODES: _View[NodeView] = _View(
    {
        "RANK": lambda node: str(node.state.rank) if node.state.rank >= 0 else NONE,
        "NODE": lambda node: node.name,
        "STATE": lambda node: node.state.state,
        "WORKERS": lambda node: str(node.workers),
        "CPU": lambda node: _percent(node.cpu),
        "CPUS": lambda node: str(node.figures.cpus if node.figures else node.state.report.num_cpus),
        "MEMORY": _memory,
        "HARDWARE": lambda node: node.hardware or NONE,
        "GPU %": _device_use,
        "GPU MEMORY": _device_memory,
        "FAULT": lambda node: node.fault or NONE,
    },
    chosen_nodes,
    "no node has registered",
    ("CPUS", "HARDWARE", "WORKERS", "RANK", "GPU MEMORY", "FAULT", "MEMORY"),
)
_WORKERS: _View[WorkerView] = _View(
    {
        "WORKER": lambda one: one.name,
        "JOB": lambda one: one.group.namespace,
        "NODE": lambda one: one.place,
        "STATE": lambda one: one.condition,
        "PID": lambda one: str(one.state.pid or NONE),
        "CPU": lambda one: _percent(one.cpu),
        "MEMORY": _resident,
        "GPU MEMORY": _accelerator_bytes,
        "METHOD": lambda one: (one.figures.method if one.figures else "") or NONE,
        "FOR": lambda one: duration(one.figures.call_s) if one.figures and one.figures.method else NONE,
        "WAITING": lambda one: str(one.figures.queued) if one.figures else NONE,
        "FAULT": lambda one: fault(one) or one.breakpoint or NONE,
    },
    chosen_workers,
    "no worker is running",
    ("PID", "JOB", "WAITING", "STATE", "NODE", "GPU MEMORY", "FAULT", "MEMORY", "FOR"),
)
_CHANNELS: _View[Channel] = _View(
    {
        "CHANNEL": lambda channel: channel.name,
        "JOB": lambda channel: channel.job,
        "ITEMS": lambda channel: str(channel.figures.items),
        "BYTES": lambda channel: byte_count(channel.figures.size),
        "KEYS": lambda channel: str(channel.figures.keys),
        "OUT": lambda channel: str(channel.figures.out),
        "PUTS WAIT": lambda channel: str(channel.figures.puts_waiting),
        "GETS WAIT": lambda channel: str(channel.figures.gets_waiting),
        "PUTS/S": lambda channel: NONE if channel.entered_rate is None else f"{channel.entered_rate:.1f}",
        "STATE": lambda channel: "closed" if channel.figures.closed else "open",
    },
    chosen_channels,
    "no channel is open",
    ("KEYS", "OUT", "JOB", "STATE", "PUTS/S", "BYTES", "PUTS WAIT", "GETS WAIT"),
)
_VIEWS: Mapping[str, _View[Any]] = {"nodes": _NODES, "workers": _WORKERS, "channels": _CHANNELS}


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
        "hostname": node.state.report.hostname,
        "state": node.state.state,
        "workers": node.workers,
        "cpu": _rounded(node.cpu),
        "cpus": figures.cpus if figures else node.state.report.num_cpus,
        "machine": figures.machine if figures else "",
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
