"""Methods of the workers of every backend. Every worker process imports this module, so it imports little."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


class Methods:
    def noop(self) -> None:
        return None

    def pid(self) -> int:
        return os.getpid()

    def start_child(self) -> int:
        """Start a process in its own session, which outlives this process. Return its pid."""
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(sleeper, start_new_session=True).pid

    def wait_in_call(self, fifo: str) -> None:
        """Write to *fifo*, then block forever."""
        with open(fifo, "w") as tell:
            tell.write("here")
        threading.Event().wait()

    def echo(self, value: object) -> object:
        return value


def message(size: int) -> object:
    """Return an array of *size* bytes, or a small dict if *size* is 0."""
    if not size:
        return {"step": 1}
    import numpy as np  # not at the top: other cases do not need numpy

    return np.ones(size, np.uint8)


def item(size: int) -> object:
    """Return an item for a queue: bytes, or from 16 KiB on an array."""
    return b"x" * size if size < 1 << 14 else message(size)


def numbered(tensor: Any, n: int) -> Any:
    """Write *n* at both ends of *tensor*, so that the receiver can recognize it. Return the tensor."""
    tensor[0] = tensor[-1] = n % 251
    return tensor


def seen(tensor: Any, n: int) -> float:
    """Check that *tensor* has number *n*, and return the present time, by a clock that all processes share."""
    if not int(tensor[0]) == int(tensor[-1]) == n % 251:
        raise RuntimeError(f"transfer {n} arrived as {int(tensor[0])}, {int(tensor[-1])}; both were to be {n % 251}")
    return time.perf_counter()


def each_timed(count: int, action: Callable[[], object]) -> list[float]:
    """Run *action* *count* times. Return the seconds of each run."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken
