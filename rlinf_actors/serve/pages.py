"""The pages of `rlinf-actors serve`: what the templates in templates/ show of the Board, and how they write numbers.

Everything that a template writes is escaped for HTML, and control characters of members' texts are made visible
(`printable`). A page needs nothing from elsewhere.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from rlinf_actors.messaging.routes import MEANING
from rlinf_actors.model.hardware import is_accelerator_type
from rlinf_actors.model.readable import duration
from rlinf_actors.plurals import counted
from rlinf_actors.sampling.choice import memory_share
from rlinf_actors.sampling.sample import Board, MethodTotals, WorkerView, quantile
from rlinf_actors.shown import printable
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.endings import ending
from rlinf_actors.wire.figure_values import DiskFigures, MethodFigures, NodeFigures
from rlinf_actors.wire.values import CHANNEL_GROUPS, NodeReport

TEXT_CHARS = 2000
"""Most characters of one text on a page."""
SHOWN_EVENTS = 12
"""Number of events on the overview."""
NONE = "–"
SPARK_WIDTH, SPARK_HEIGHT = 120.0, 28.0

_LEVELS: Mapping[str, str] = {
    **dict.fromkeys(("ready", "running", "held", "node_joined", "node_heard", "worker_responsive"), "good"),
    **dict.fromkeys(("estop_released", "group_launched", "driver_joined", "node_undrained", "breakpoint_left"), "good"),
    **dict.fromkeys(("suspect", "draining", "starting", "restarting", "degraded", "stopping", "registering"), "warn"),
    **dict.fromkeys(("unresponsive", "node_suspect", "worker_unresponsive", "worker_restarted", "refused"), "warn"),
    **dict.fromkeys(("node_draining", "events_missing", "head_stopped", "node_left", "output_lost"), "warn"),
    **dict.fromkeys(("breakpoint", "breakpoint_reached", "breakpoint_attached"), "warn"),
    **dict.fromkeys(("lost", "node_lost", "worker_died", "lease_lost", "robot_conflict", "estop"), "bad"),
}


class GroupRow(msgspec.Struct, frozen=True):
    """A group on the overview. `mean` and `p99` are seconds, of the calls that returned in the last round; of all calls
    if none did.
    """

    name: str
    job: str
    cls: str
    state: str
    workers: str
    cpu: float | None
    memory: int | None
    calls: float | None
    mean: float | None
    p99: float | None
    failed: int
    restarts: int


class Output(msgspec.Struct, frozen=True):
    """The last lines of one stream of a worker. `fault` says why there are none, "" without a fault."""

    stream: str
    title: str
    lines: list[str]
    fault: str = ""


def group_rows(board: Board) -> list[GroupRow]:
    """Return the groups, without the hosts of channels."""
    members: dict[tuple[str, str], list[WorkerView]] = {}
    for worker in board.workers:
        members.setdefault((worker.group.namespace, worker.group.name), []).append(worker)
    rows = []
    for (job, name), workers in sorted(members.items()):
        if name.startswith(CHANNEL_GROUPS):
            continue
        group, methods = workers[0].group, board.methods.get((job, name), {})
        timed: Sequence[MethodFigures | MethodTotals] = [one.recent for one in methods.values() if one.recent.done]
        timed = timed or [*methods.values()]
        done = sum(method.done for method in timed)
        buckets = [sum(numbers) for numbers in zip(*(method.buckets for method in timed), strict=False)]
        processes = [one.figures.process for one in workers if one.figures is not None and one.figures.process]
        rows.append(
            GroupRow(
                name,
                job,
                group.cls.partition(":")[2] or group.cls,
                group.state,
                _counts(worker.state.state for worker in workers),
                _sum(worker.cpu for worker in workers),
                sum(process.rss_bytes for process in processes) if processes else None,
                _sum(worker.calls for worker in workers),
                sum(method.seconds for method in timed) / done if done else None,
                quantile(buckets, 0.99) if buckets else None,
                sum(total.failed for total in methods.values()),
                sum(worker.state.restarts for worker in workers),
            )
        )
    return rows


def summary(board: Board, status: Status | None) -> dict[str, Any]:
    """Return the numbers of the tiles."""
    nodes = [node for node in board.nodes if node.state.state != "lost"]
    figures = [node.figures for node in nodes if node.figures is not None]
    found = [device.utilization for one in figures for device in one.devices if device.utilization >= 0]
    living = [worker.state.state for worker in board.workers if worker.state.state != "gone"]
    hardware = [one for node in nodes for one in node.state.report.resources if is_accelerator_type(one.type)]
    return {
        "nodes": len(board.nodes),
        "node_states": _counts(node.state.state for node in board.nodes) or "none",
        "workers": len(living),
        "worker_states": _counts(living) or "none",
        "calls": _sum(worker.calls for worker in board.workers) or 0.0,
        "busy": board.cpu_history[-1] if board.cpus else None,
        "cpus": board.cpus,
        "devices": sum(len(one.infos) for one in hardware),
        "device_busy": sum(found) / len(found) / 100 if found else None,
    }


def warnings(board: Board) -> list[str]:
    """Return what a person should see first, besides the troubles of the head."""
    named = {
        "Lost": [node.name for node in board.nodes if node.state.state == "lost"],
        "Unresponsive": [worker.name for worker in board.workers if worker.condition == "unresponsive"],
        "At a breakpoint": [worker.name for worker in board.workers if worker.condition == "breakpoint"],
    }
    found = [
        f"{what}: {', '.join(names[:10])}{f' and {len(names) - 10} more' if len(names) > 10 else ''}."
        for what, names in named.items()
        if names
    ]
    faults = [
        (node.name, fault) for node in board.nodes if node.state.state != "lost" for fault in node.state.report.faults
    ]
    found += [f"{name}: {fault}" for name, fault in faults[:5]]
    if len(faults) > 5:
        found.append(f"{counted(len(faults) - 5, 'further fault')} of nodes: see their pages.")
    return found


class Pages:
    """Renders the templates. *endpoint* is the head's, and *every_s* the seconds between two rounds."""

    def __init__(self, board: Board, endpoint: str, every_s: float) -> None:
        self._board = board
        self._endpoint = endpoint.removeprefix("tcp://").removeprefix("ipc://")
        self._every_s = every_s
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            finalize=_finalize,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(FILTERS)

    def render(self, template: str, here: str, *, live: bool = True, **values: Any) -> str:
        """Return the page *template*. *here* is its path, and *live* True if the page is kept up to date."""
        board = self._board
        sample, status = board.sample, board.last_status
        return self._environment.get_template(template).render(
            board=board,
            sample=sample,
            status=status,
            fault=sample.fault,
            warnings=warnings(board),
            here=here,
            live=live,
            endpoint=self._endpoint,
            every_s=self._every_s,
            has_logs=status is not None,
            at_text=time.strftime("%H:%M:%S", time.localtime(sample.at)) if sample.at else NONE,
            at_iso=_iso(sample.at),
            **values,
        )

    def refused(self, status: int, text: str) -> str:
        """Return the page for a request that is not served. It has nothing of the cluster: the token may be missing."""
        phrase = HTTPStatus(status).phrase
        template = self._environment.get_template("refused.html")
        return template.render(status=status, phrase=phrase, text=text, here="", live=False)


# --- how templates write values ---


def _finalize(value: Any) -> Any:
    return printable(value, TEXT_CHARS) if type(value) is str else value


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return NONE
    if value >= 10_000:
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:.3g} {unit}"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _size(value: int | None) -> str:
    if value is None:
        return NONE
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value} B"


def _short(seconds: float | None) -> str:
    """Return a duration of any size as text."""
    if seconds is None:
        return NONE
    if math.isinf(seconds):
        return "over 5 min"
    if seconds >= 120:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 else f"{seconds * 1e6:.0f} µs"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"


def _share(cpus: float | None) -> str:
    return NONE if cpus is None else f"{100 * cpus:.0f} %"


def _points(values: Sequence[float]) -> list[tuple[float, float]]:
    top = max(*values, 0.0) or 1.0
    step = SPARK_WIDTH / (len(values) - 1)
    return [(at * step, SPARK_HEIGHT - 2 - value / top * (SPARK_HEIGHT - 4)) for at, value in enumerate(values)]


def _line(values: Sequence[float]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in _points(list(values)))


def _area(values: Sequence[float]) -> str:
    return f"M0,{SPARK_HEIGHT:g} L{_line(values)} L{SPARK_WIDTH:g},{SPARK_HEIGHT:g} Z"


def _used(disk: DiskFigures) -> float:
    return 1 - disk.free_bytes / disk.total_bytes if disk.total_bytes else 0.0


def _fullest(figures: NodeFigures | None) -> DiskFigures | None:
    return max(figures.disks, key=_used, default=None) if figures is not None else None


def _model(report: NodeReport, type: str, index: int) -> str:
    infos = next((resource.infos for resource in report.resources if resource.type == type), [])
    return infos[index].model if index < len(infos) else ""


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds")


def _clock(at: float) -> str:
    moment = time.localtime(at)
    today = time.localtime()[:3] == moment[:3]
    return time.strftime("%H:%M:%S" if today else "%d %b %H:%M", moment)


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common())


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


FILTERS: Mapping[str, Callable[..., Any]] = {
    "ago": lambda seconds: "now" if seconds < 2 else f"{duration(seconds)} ago",
    "area": _area,
    "clock": _clock,
    "duration": duration,
    "ending": ending,
    "fullest": _fullest,
    "iso": _iso,
    "level": lambda name: _LEVELS.get(name, ""),
    "line": _line,
    "meaning": lambda path: MEANING.get(path, {"bulk": "large arrays, by a stream between two nodes"}.get(path, "")),
    "memory": memory_share,
    "model": _model,
    "number": _number,
    "p99": lambda buckets: quantile(buckets, 0.99),
    "percent": _percent,
    "share": _share,
    "short": _short,
    "size": _size,
    "used": _used,
    "words": lambda kind: kind.replace("_", " "),
}
