"""Render the table as text for a terminal and as Markdown for the documentation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = (
    "figure", "ours", "raw", "raw there", "prototype", "Ray", "ours/raw", "reach", "ours/prototype", "reach",
    "Ray/ours", "reach", "reached",
)  # fmt: skip
"""``raw there`` is the raw figure on the reference machine."""
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Line = Mapping[str, Any]
"""A `benchmarks.summary.Row` as a dictionary, as in the JSON file."""


def cells(line: Line) -> list[str]:
    """Return the cells of one row as text."""
    lower = line["better"] == "lower"
    return [
        line["title"],
        *(quantity(line[backend], line["unit"]) for backend in ("ours", "raw")),
        quantity(line["reference"], line["unit"]) if line["reference"] else "",
        *(quantity(line[backend], line["unit"]) for backend in ("prototype", "ray")),
        ratio(line["ours_raw"]),
        bound(line["reach_limit"], at_most=lower),
        ratio(line["ours_prototype"]),
        bound(line["reach_prototype"], at_most=lower),
        ratio(line["ray_ours"]),
        bound(line["reach_ray"], at_most=not lower),
        {None: "", True: "yes", False: "no"}[line["reached"]],
    ]


def text(lines: Sequence[Line], titles: Mapping[str, str]) -> str:
    """Render for a terminal, with aligned columns and a heading for each case."""
    body = [(line["case"], cells(line)) for line in lines]
    widths = [max(len(row[i]) for row in [list(HEADINGS), *(row for _, row in body)]) for i in range(len(HEADINGS))]

    def align(row: Sequence[str]) -> str:
        first, *rest = row
        return "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()

    out, last = [align(HEADINGS)], ""
    for case, row in body:
        if case != last:
            out += ["", titles[case]]
            last = case
        out.append(align(row))
    return "\n".join(out)


def markdown(report: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Render for docs/explanation/performance.md: the command, the machine and the table."""
    machine = report["machine"]
    out = [
        f"`{report['command']}`, medians of {report['repetitions']}, on {machine['processors']} processors, "
        f"{machine['memory_gib']} GiB, {machine['kernel']}, Python {machine['python']}.",
        "",
        "| case | " + " | ".join(HEADINGS) + " |",
        "|---|---|" + "---:|" * (len(HEADINGS) - 1),
    ]
    last = ""
    for line in report["rows"]:
        case = "" if line["case"] == last else titles[line["case"]]
        last = line["case"]
        out.append(f"| {case} | " + " | ".join(cells(line)) + " |")
    return "\n".join(out)


def put_between(document: str, section: str, begin: str = BEGIN, end: str = END) -> str:
    """Return *document* with *section* in place of the text between the lines *begin* and *end*.

    Raises:
        ValueError: it does not have both marks, in order.
    """
    before, begins, rest = document.partition(begin)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise ValueError(f"the document has no lines {begin} and {end} to put the figures between")
    return f"{before}{begin}\n{section}\n{end}{after}"


def quantity(value: float | None, unit: str) -> str:
    """Format a number with three significant digits and a suitable unit."""
    if value is None:
        return "-"
    if unit == "s":
        value, unit = (value * 1e3, "ms") if value < 1 else (value, unit)
    elif unit == "us":
        value, unit = (value / 1e3, "ms") if value >= 1000 else (value, unit)
    return f"{number(value)} {unit}".rstrip() if unit != "/s" else f"{number(value)}/s"


def number(value: float) -> str:
    """Format a number with three significant digits and no exponent."""
    if abs(value) >= 100:
        digits = len(str(int(abs(value)))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def ratio(value: float | None) -> str:
    return "-" if value is None else number(value)


def bound(value: float | None, at_most: bool) -> str:
    return "" if value is None else f"{'≤' if at_most else '≥'} {number(value)}"
