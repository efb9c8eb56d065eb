"""Durations as text for people. Pure."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a duration, given in seconds, as text: ``12 s``, ``3 min``, ``5 h`` or ``2 d``. A negative one is 0 s."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
