"""Numbers as text for people. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def duration(seconds: float) -> str:
    """Return a duration, given in seconds, as text: ``12 s``, ``3 min``, ``5 h`` or ``2 d``. A negative one is 0 s."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def byte_count(count: int) -> str:
    """Return a number of bytes as text: ``12 B``, ``1.5 KiB``, ``3.0 MiB`` or ``4.2 GiB``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} B"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, each once: ``0-3, 7``."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(set(numbers))), lambda at: at[1] - at[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(parts)
