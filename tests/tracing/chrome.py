"""Checks a Chrome trace against the trace event format, as far as Perfetto needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PHASES = {"X", "M", "s", "f", "i"}


def check(events: Sequence[dict[str, Any]]) -> None:
    """Fail unless *events* is a valid trace: fields and their types, names of all pids and tids, nesting, arrows."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    pids = {event["pid"] for event in events if event["name"] == "process_name"}
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ts"] >= 0
        assert event["pid"] in pids
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            assert (event["pid"], event["tid"]) in named
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M":
            assert "args" in event
    _check_nesting(spans)
    _check_arrows(events, spans)


def _check_nesting(spans: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    for placed in spans.values():
        open_ends: list[float] = []
        for start, end in sorted(placed, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6, "spans cross on one tid"
            open_ends.append(end)


def _check_arrows(events: Sequence[dict[str, Any]], spans: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    arrows: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
            around = spans[event["pid"], event["tid"]]
            assert any(start - 1e-6 <= event["ts"] <= end + 1e-6 for start, end in around), "an arrow outside of spans"
    for pair in arrows.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[1].get("bp") == "e"
