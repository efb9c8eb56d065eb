"""Import of the package, in a fresh interpreter each time."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import timed

RUNS = 5


def interpreter_s(statement: str) -> float:
    """Median seconds from starting an interpreter to its end, given *statement*. The first run warms caches."""
    command = [sys.executable, "-c", statement]
    runs = [timed(lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL)) for _ in range(RUNS + 1)]
    return statistics.median(runs[1:])


def measure(runtime: Runtime) -> Figures:
    empty, loaded = interpreter_s("pass"), interpreter_s(runtime.IMPORT)
    return {"import": loaded, "added": loaded - empty}


CASE = Case(
    "import_time",
    "Import of the package",
    (
        Figure("import", "interpreter and import (raw: an empty interpreter)", "s", reach_limit=11),
        Figure("added", "more than an empty interpreter (raw: its own start)", "s", "lower", "import", 10, 3.6),
    ),
    measure,
)
