"""Time to import the package, in a new interpreter each time.

A package may import its parts at their first use, so the names that scripts need first are measured too.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.model import Case, Figure, Figures, Runtime
from benchmarks.timing import timed

RUNS = 5


def interpreter_s(statement: str) -> float:
    """Return the median seconds of an interpreter that runs *statement*. The first run warms caches."""
    command = [sys.executable, "-c", statement]
    runs = [timed(lambda: subprocess.run(command, check=True, stdin=subprocess.DEVNULL)) for _ in range(RUNS + 1)]
    return statistics.median(runs[1:])


def measure(runtime: Runtime) -> Figures:
    empty = interpreter_s("pass")
    return {"import": interpreter_s(runtime.IMPORT) - empty, "names": interpreter_s(runtime.NAMES) - empty}


CASE = Case(
    "import_time",
    "Import, more than an empty interpreter (raw: its own start)",
    (
        Figure("import", "the package", "s", "lower", "empty", 10, 3.6),
        Figure("names", "and the names that a script uses", "s", "lower", "empty", 10, 3.6),
    ),
    measure,
)
