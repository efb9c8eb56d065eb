"""What every worker of a benchmark can do, whatever runs it. Light to import: worker processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class Methods:
    def noop(self) -> None:
        return None

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: object) -> object:
        return value


def message(size: int) -> object:
    """What workers exchange: an array of *size* bytes, or a small dict."""
    if not size:
        return {"step": 1}
    import numpy as np  # not at the top: workers of other cases do without

    return np.ones(size, np.uint8)


def each_timed(count: int, action: Callable[[], object]) -> list[float]:
    """Seconds of each of *count* runs."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken
