"""What every worker of a benchmark can do, whatever runs it. Light to import: worker processes do."""

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
        """A process of a session of its own, which outlives this one unless somebody ends it."""
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(sleeper, start_new_session=True).pid

    def wait_in_call(self, fifo: str) -> None:
        """Says by *fifo* that it runs, and never returns."""
        with open(fifo, "w") as tell:
            tell.write("here")
        threading.Event().wait()

    def echo(self, value: object) -> object:
        return value


def message(size: int) -> object:
    """What workers exchange: an array of *size* bytes, or a small dict."""
    if not size:
        return {"step": 1}
    import numpy as np  # not at the top: workers of other cases do without

    return np.ones(size, np.uint8)


def item(size: int) -> object:
    """What goes through a queue: bytes, or from 16 KiB up an array."""
    return b"x" * size if size < 1 << 14 else message(size)


def numbered(tensor: Any, n: int) -> Any:
    """*tensor* with *n* written at both ends, so that its receiver can tell it from the one before."""
    tensor[0] = tensor[-1] = n % 251
    return tensor


def seen(tensor: Any, n: int) -> float:
    """When the receiver had what `numbered` made, by the clock that all processes of a machine share."""
    if not int(tensor[0]) == int(tensor[-1]) == n % 251:
        raise RuntimeError(f"transfer {n} arrived as {int(tensor[0])}, {int(tensor[-1])}; both were to be {n % 251}")
    return time.perf_counter()


def each_timed(count: int, action: Callable[[], object]) -> list[float]:
    """Seconds of each of *count* runs."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return taken
