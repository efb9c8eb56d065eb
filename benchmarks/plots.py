"""Plots of cost against ranks, nodes and sizes, from the JSON files of compare and scale. Needs matplotlib."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BACKENDS = {"ours": "this project", "raw": "raw", "prototype": "prototype", "ray": "Ray"}
NODES = {
    ("join", "all_s"): "all agents join",
    ("launch", "all_run_s"): "a client launches 10 workers a node",
    ("driver", "ready_s"): "a script launches 10 workers a node",
    ("restart", "all_s"): "all are back after a restart of the head",
}
RANKS = {1: ("one_call", "await"), 8: ("fan_out", "await_8"), 32: ("fan_out", "await_32")}
RAW_RANKS = {1: ("one_call", "ping_pong"), 8: ("fan_out", "zmq_8"), 32: ("fan_out", "zmq_32")}
SIZES = (1, 64, 256)
WIDTH, HEIGHT = 6.4, 3.6

Points = dict[str, list[tuple[float, float]]]
"""The points of each line, by the line's name."""


def ranks(report: Mapping[str, Any]) -> Points:
    """Return the microseconds of a call of all workers, by the number of workers."""
    rows = {(row["case"], row["name"]): row for row in report["rows"]}
    lines: Points = {}
    for backend, name in BACKENDS.items():
        points = []
        for count, key in RANKS.items():
            row = rows.get(("fan_out", RAW_RANKS[count][1]) if backend == "raw" and count > 1 else key, {})
            value = row.get(backend)
            if value is not None:
                points.append((count, value))
        if points:
            lines[name] = points
    return lines


def sizes(report: Mapping[str, Any]) -> Points:
    """Return the GB/s of tensors from worker to worker, by their MiB."""
    rows = {row["name"]: row for row in report["rows"] if row["case"] == "transfers"}
    lines: Points = {}
    for way, title in (("object", "send, recv"), ("tensor", "send_tensor, recv_tensor")):
        for backend, name in BACKENDS.items():
            points = [
                (size, rows[f"{way}_{size}"][backend])
                for size in SIZES
                if f"{way}_{size}" in rows and rows[f"{way}_{size}"][backend] is not None
            ]
            if points:
                lines[f"{name}: {('memcpy' if way == 'tensor' else 'one copy') if backend == 'raw' else title}"] = (
                    points
                )
    return lines


def nodes(report: Mapping[str, Any]) -> Points:
    """Return the seconds of operations on all nodes, by the number of nodes."""
    lines: Points = {}
    for (phase, figure), title in NODES.items():
        found = [(size["agents"], size["figures"].get(phase, {}).get(figure)) for size in report["sizes"]]
        if points := [(count, value) for count, value in found if value is not None]:
            lines[title] = points
    return lines


def draw(folder: Path, compare: Mapping[str, Any] | None, scale: Mapping[str, Any] | None) -> list[Path]:
    """Write the plots whose data is given as SVG files into *folder*, and return their paths."""
    written = []
    if compare is not None:
        written.append(_plot(folder / "ranks.svg", ranks(compare), "workers", "us until all have answered", log=True))
        written.append(_plot(folder / "sizes.svg", sizes(compare), "MiB", "GB/s, worker to worker", log=False))
    if scale is not None:
        written.append(_plot(folder / "nodes.svg", nodes(scale), "nodes", "seconds", log=True))
    return written


def _plot(path: Path, lines: Points, across: str, up: str, *, log: bool) -> Path:
    with _axes(path) as axes:
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        axes.set(xlabel=across, ylabel=up, xscale="log", yscale="log" if log else "linear")
        ticks: Sequence[float] = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return path


@contextlib.contextmanager
def _axes(path: Path) -> Iterator[Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": path.name, "font.size": 8}):  # equal data give equal files
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        yield figure.subplots()
        figure.savefig(path, metadata={"Date": None})
