"""Run sessions in turn: repetition 1 of every backend, then repetition 2, and so on, each in a new process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.backends.prototype import CASES as PROTOTYPE_CASES
from benchmarks.model import Case, Figures
from benchmarks.processes import sweep

ROOT = Path(__file__).resolve().parent.parent
SESSION_LIMIT_S = 180.0
_KILL_AFTER_S = 20.0
_LOG_LINES = 25
# what would make a session use something that is already there, or measure something else
_NOT_INHERITED = ("RLINF_HEAD", "RLINF_NODE_RANK", "RAY_ADDRESS", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH")


@dataclass(frozen=True)
class Session:
    """The result of one repetition of a case on a backend.

    Attributes:
        figures: empty if the session failed.
        error: last lines of its output when it failed, else "".
        load: of the machine before it, over a minute.
        calibration_s: of a fixed piece of Python before and after it.
        left_running: names of the processes that had not ended with it; they have been killed.
        left_files: what it had not removed of its temporary directory; it has been removed.
    """

    case: str
    backend: str
    repetition: int
    figures: Figures
    error: str = ""
    load: float = 0.0
    calibration_s: Sequence[float] = ()
    left_running: Sequence[str] = ()
    left_files: Sequence[str] = field(default=())


def run(
    cases: Sequence[Case], pythons: Mapping[str, str], repetitions: int, show: Callable[[Session], object]
) -> list[Session]:
    """Measure the cases. The process must be a subreaper (`benchmarks.processes.become_subreaper`).

    Args:
        cases: what to measure.
        pythons: backend to its interpreter, in the order to run them.
        repetitions: of each.
        show: called after each session.
    """
    sessions = []
    for case in cases:
        for repetition in range(1, repetitions + 1):
            for backend, python in pythons.items():
                if backend in case.without or (backend == "prototype" and case.name not in PROTOTYPE_CASES):
                    continue
                session = run_one(case, backend, python, repetition)
                sessions.append(session)
                show(session)
    return sessions


def run_one(case: Case, backend: str, python: str, repetition: int) -> Session:
    """Run one session in a temporary directory, which is removed afterwards."""
    load = os.getloadavg()[0]
    with _scratch() as scratch:
        result, log, folder = scratch / "result.json", scratch / "log", scratch / "t"
        folder.mkdir()
        command = [python, "-m", "benchmarks.session", backend, case.name, str(result), str(SESSION_LIMIT_S)]
        try:
            with (
                open(log, "wb") as output,
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_environment(folder, case.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                ) as process,
            ):
                try:
                    code = process.wait(SESSION_LIMIT_S + _KILL_AFTER_S)
                except BaseException:
                    process.kill()
                    raise
        finally:
            left = sweep()
        files = sorted(os.listdir(folder))
        if code or not result.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            error = f"ended with {code}; its last lines:\n{tail}"
            return Session(case.name, backend, repetition, {}, error, load, (), left, files)
        said = json.loads(result.read_text())
    return Session(case.name, backend, repetition, said["figures"], "", load, said["calibration_s"], left, files)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    # short, since unix sockets are made below it
    with tempfile.TemporaryDirectory(prefix="rab-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _environment(folder: Path, added: Mapping[str, str]) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **added,
    }


def describe_machine() -> dict[str, object]:
    """Return the properties of the machine and the software on which the figures depend."""
    with open("/proc/meminfo") as file:
        memory_kib = int(file.readline().split()[1])
    system = os.uname()
    return {
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "kernel": f"{system.sysname} {system.release} {system.machine}",
        "python": sys.version.split()[0],
    }
