"""Draws a Chrome trace as a small SVG for the documentation: a track for each thread, spans in it, and arrows."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

WIDTH, GUTTER, ROW = 900, 130, 20
CHAR = 6.2
"""Width of a character of a label, about."""
COLOURS = ("#4e79a7", "#59a14f", "#b07aa1", "#f28e2b", "#76b7b2", "#e15759")
STYLE = "text{font:11px system-ui,sans-serif}.in{fill:#fff}.arrow{fill:none;stroke:#d62728;stroke-width:1.2}"


def drawn(events: Sequence[dict[str, Any]]) -> str:
    """Return the SVG of a trace, in linear time. Each span and arrow has a title, which `outline` reads."""
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    spans = [one for one in events if one["ph"] == "X"]
    begin = min(one["ts"] for one in spans)
    scale = (WIDTH - GUTTER - 10) / (max(one["ts"] + one["dur"] for one in spans) - begin)
    tracks = sorted({(names[one["pid"]], one["pid"], one["tid"]) for one in spans})
    colours = {cat: COLOURS[at % len(COLOURS)] for at, cat in enumerate(sorted({one["cat"] for one in spans}))}
    parts: list[str] = []
    tops: dict[tuple[int, int], float] = {}
    y = 6.0

    def x(ts: float) -> float:
        return GUTTER + (ts - begin) * scale

    for name, pid, tid in tracks:
        tops[pid, tid] = y
        parts.append(f'<text x="4" y="{y + 14:g}" font-weight="bold">{html.escape(name)}</text>')
        ends: list[float] = []
        deepest = 0
        here = [one for one in spans if (one["pid"], one["tid"]) == (pid, tid)]
        for one in sorted(here, key=lambda span: (span["ts"], -span["dur"])):
            while ends and ends[-1] <= one["ts"]:
                ends.pop()
            left, width, top = x(one["ts"]), max(1.5, one["dur"] * scale), y + ROW * len(ends)
            deepest = max(deepest, len(ends))
            ends.append(one["ts"] + one["dur"])
            text = html.escape(one["name"])
            parts.append(
                f'<rect x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{ROW - 3}" rx="2" '
                f'fill="{colours[one["cat"]]}"><title>{html.escape(name)}: {text}</title></rect>'
            )
            if len(one["name"]) * CHAR + 6 < width:
                parts.append(f'<text class="in" x="{left + 4:.1f}" y="{top + 13:g}">{text}</text>')
        y += ROW * (deepest + 1) + 8
    starts = {one["id"]: one for one in events if one["ph"] == "s"}
    for end in (one for one in events if one["ph"] == "f" and one["id"] in starts):
        start = starts[end["id"]]
        (x1, y1), (x2, y2) = ((x(one["ts"]), tops[one["pid"], one["tid"]] + ROW / 2) for one in (start, end))
        title = html.escape(f"{names[start['pid']]} → {names[end['pid']]}")
        path = f"M{x1:.1f},{y1:g} C{x1 + 12:.1f},{y1:g} {x2 - 12:.1f},{y2:g} {x2:.1f},{y2:g}"
        parts.append(f'<path class="arrow" d="{path}"><title>{title}</title></path>')
        parts.append(f'<circle cx="{x2:.1f}" cy="{y2:g}" r="2.5" fill="#d62728"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" role="img">'
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{y:g}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def outline(svg: str) -> set[str]:
    """Return what a picture shows, whatever the times: its spans with their processes, and its arrows."""
    return {html.unescape(title) for title in re.findall(r"<title>(.*?)</title>", svg)}
