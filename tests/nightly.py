"""Run the long forms of the tests and write a report: ``python -m tests.nightly --report DIR``.

Each leg is one command, mostly a pytest run with the options that make its tests long. Legs run beside one another, as
many as ``--parallel`` says; a leg whose timings others would change runs alone. A leg that fails, or that takes longer
than its limit, does not stop the others; the exit code is 1 if any leg failed.

DIR gets ``report.md``, ``report.json`` and the output of each leg. Beside each leg stands what the machine itself did
meanwhile (`Control`), because most figures are times on a machine that does other things too.

Tests report figures by the fixture ``figures`` (`Figures`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "RLINF_NIGHTLY_LEG"
"""Environment variable of all processes of a leg: what is left of one that took too long is found by it."""
INTERRUPTED_S = 60.0
"""How long a leg that took too long may clean up."""
LEFT_S = 10.0
"""How long processes of a leg may go on after it."""
TAIL = 4000
"""Characters of a failed leg's output in the report."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-s")


class Figures:
    """What a test measured: printed, and kept for the report of the long forms.

    Args:
        test: names the test.
        path: file of JSON lines that gets each figure, or None.
    """

    def __init__(self, test: str, path: str | None) -> None:
        self._test = test
        self._path = path

    def done(self, done: int, asked: int, unit: str) -> None:
        """Say how much of the size asked for is done, such as 7 of 100 "rounds". The last word counts."""
        self._keep({"unit": unit, "done": done, "asked": asked})

    def add(self, name: str, value: object) -> None:
        """Report one figure; *value* has its unit in it."""
        print(f"\n{name}: {value}")
        self._keep({"name": name, "value": str(value)})

    def _keep(self, entry: dict[str, object]) -> None:
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps({"test": self._test, **entry}) + "\n")


class Tally:
    """A plugin of pytest: tell *figures* how many tests passed."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test, or of its fixtures."""
        self._passed += report.when == "call" and report.passed

    def pytest_sessionfinish(self, session: Any) -> None:
        """All have ended."""
        self._figures.done(self._passed, session.testscollected, "tests")


@dataclasses.dataclass(frozen=True)
class Leg:
    """One command.

    Attributes:
        name: of the leg.
        command: ``{size}`` in it becomes the size, ``{seed}`` the seed, ``{figures}`` the file for `Figures`.
        size: what the promise was tried with; ``--scale`` multiplies it.
        unit: of the size.
        limit_s: longest time at scale 1. A shorter leg gets a proportional part of it, and `START_S` for its start.
        alone: true if it measures times that other legs would change.
        least: smallest size, whatever the scale.
    """

    name: str
    command: tuple[str, ...]
    size: float
    unit: str
    limit_s: float
    alone: bool = False
    least: int = 1

    START_S = 300.0

    def at(self, scale: float) -> Leg:
        """This leg at that scale."""
        limit = min(self.limit_s, self.START_S + self.limit_s * scale) if scale < 1 else self.limit_s * scale
        return dataclasses.replace(self, size=max(self.least, math.ceil(self.size * scale)), limit_s=limit)

    def words(self, seed: int, figures: str) -> list[str]:
        """The command to run."""
        filled = {"{size}": f"{self.size:g}", "{seed}": str(seed), "{figures}": figures}
        return [filled.get(word, word) for word in self.command]


def tests(*arguments: str) -> tuple[str, ...]:
    """The command of a leg that is a pytest run."""
    return (*PYTEST, *arguments, "--figures", "{figures}")


LEGS = (
    Leg("chaos", tests("tests/chaos/test_chaos_live.py", "--chaos-seconds", "{size}", "--chaos-seed", "{seed}"),
        1800, "s", 2700),
    Leg("kills of one", tests("tests/kills", "-k", "not +", "--kill-rounds", "{size}", "--kill-seed", "{seed}"),
        100, "rounds of 5", 3600),
    Leg("kills of two", tests("tests/kills", "-k", "+", "--kill-rounds", "{size}", "--kill-seed", "{seed}"),
        100, "rounds of 10", 4200),
    Leg("robots stopped", tests("tests/robots", "--robot-rounds", "{size}"), 20, "rounds", 4500, alone=True),
    Leg("interruptions", tests("tests/live/test_interrupted.py", "--interruptions", "{size}"), 10_000, "of each", 1800),
    Leg("year", tests("tests/year", "--year-minutes", "{size}"), 60, "minutes", 5400),
    Leg("head restarts", tests("tests/live/test_head_restarts.py", "-k", "sigterm", "--head-restarts", "{size}"),
        20, "restarts", 600),
    Leg("cycles", tests("tests/cycles", "--cycles", "{size}"), 1000, "cycles of 4 kinds", 3600),
    Leg("daemons that hide", tests("tests/agentd/test_leftovers.py", "-k", "everything_ends and True",
        "--grandchildren", "{size}"), 60, "of each worker", 600),
    Leg("soak", tests("tests/soak/test_soak.py", "--soak-seconds", "{size}", "--soak-seed", "{seed}"), 300, "s", 900),
    Leg("calls", tests("tests/cycles/test_many_calls.py", "--calls", "{size}"), 10_000_000, "calls", 3600),
    Leg("channel items", tests("tests/live/test_channel_bounds.py", "-k", "nothing_behind",
        "--channel-items", "{size}"), 1_000_000, "items", 900),
    Leg("shared memory", tests("tests/soak/test_memory_soak.py", "--soak-gib", "{size}"), 100, "GiB", 1800),
    Leg("GIL", tests("tests/live/test_no_false_death.py", "--default-timers", "--gil-seconds", "{size}"), 30, "s", 900),
    Leg("strangers", tests("tests/live/test_strangers.py", "-k", "cost_little", "--strangers", "{size}"),
        10_000, "at each socket", 1200, alone=True),
    Leg("strangers from far", tests("tests/netns/test_strangers_from_far.py", "-k", "reach_nothing",
        "--strangers", "{size}"), 10_000, "at each socket", 1200, alone=True, least=1000),
    Leg("cuts with default leases", tests("tests/netns/test_partitions.py", "--default-timers"), 1, "time", 1800),
    Leg("hostile members", tests("tests/security/test_hostile_members.py", "--hostile-seconds", "{size}"),
        60, "s", 300, alone=True),
    Leg("idle connections", tests("tests/live/test_strangers.py", "-k", "idle", "--idle-connections", "{size}"),
        5000, "at the head", 600),
    Leg("idle connections from far", tests("tests/netns/test_strangers_from_far.py", "-k", "idle",
        "--idle-connections", "{size}"), 5000, "at each process", 600, least=1000),
    Leg("live over ZeroMQ", ("env", "RLINF_ACTORS_LOCAL_LINK=zmq", *tests("tests/live")), 1, "time", 3600),
    Leg("examples and schedules", tests("tests", "-m", "model or hypothesis", "--rounds", "{size}"), 10, "times", 3600),
    Leg("tests left out of CI", tests("tests", "-m", "nightly", "--nightly"), 1, "time", 3600),
    Leg("requeued jobs of Slurm", tests("tests/cli/test_run_in_slurm.py", "--rounds", "{size}"),
        5, "starts", 900, least=2),
    Leg("aarch64 wheels", tests("tests/packaging/test_aarch64.py", "--look-up"), 1, "time", 600),
    Leg("image", tests("tests/packaging/test_image.py", "--engine", "any"), 1, "time", 1800),
)  # fmt: skip


class Control:
    """What the machine does by itself, measured all the time: how late a timer of 10 ms is, and an echo through `cat`.

    A figure of a leg means something beside these. Samples are taken by one thread; `close` ends it.
    """

    EVERY_S = 0.1

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float, float]] = []
        self._over = threading.Event()
        self._echo = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._thread = threading.Thread(target=self._measure, name="control")
        self._thread.start()

    def _measure(self) -> None:
        assert self._echo.stdin is not None
        assert self._echo.stdout is not None
        while not self._over.wait(self.EVERY_S):
            begun = time.perf_counter()
            time.sleep(0.01)
            late = time.perf_counter() - begun - 0.01
            begun = time.perf_counter()
            self._echo.stdin.write(b"x" * 100)
            self._echo.stdout.read(100)
            self._samples.append((time.monotonic(), late, time.perf_counter() - begun, os.getloadavg()[0]))

    def since(self, begun: float) -> dict[str, float]:
        """Of the time since *begun* (time.monotonic()): milliseconds, and the load."""
        samples = [sample for sample in list(self._samples) if sample[0] >= begun]
        if not samples:
            return {}
        late, echo, load = (sorted(sample[n] for sample in samples) for n in (1, 2, 3))
        return {
            "timer_late_p50_ms": round(1e3 * percentile(late, 0.5), 2),
            "timer_late_p99_ms": round(1e3 * percentile(late, 0.99), 2),
            "timer_late_max_ms": round(1e3 * late[-1], 2),
            "echo_p50_ms": round(1e3 * percentile(echo, 0.5), 2),
            "echo_p99_ms": round(1e3 * percentile(echo, 0.99), 2),
            "load_p50": percentile(load, 0.5),
            "load_max": load[-1],
        }

    def close(self) -> None:
        """End the thread and the echo."""
        self._over.set()
        self._thread.join()
        self._echo.terminate()
        self._echo.communicate()


def percentile(ordered: Sequence[float], part: float) -> float:
    """Of values in order."""
    return ordered[int(part * (len(ordered) - 1))]


@dataclasses.dataclass
class Outcome:
    """How a leg ended.

    Attributes:
        leg, command, seed: as asked for.
        outcome: "passed", "failed (exit code N)", "took longer than N s", "interrupted", "left processes: ...", or
            "nothing was done" where all tests were skipped.
        seconds: that it took.
        done: a line for each unit: how much was done of what was asked.
        figures: name and value of each, in order.
        control: what the machine did meanwhile.
        output: name of the file with its output.
        tail: the end of its output, if it failed.
    """

    leg: Leg
    command: str
    seed: int
    outcome: str
    seconds: float
    done: list[str]
    figures: list[tuple[str, str]]
    control: dict[str, float]
    output: str
    tail: str = ""

    @property
    def passed(self) -> bool:
        """True if nothing failed."""
        return self.outcome == "passed"


class Stop:
    """A flag that a signal handler sets and that `select` waits for."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def __call__(self, *_: object) -> None:
        """Set it."""
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        """For `select`."""
        return self._fd

    def __bool__(self) -> bool:
        return bool(select.select([self], [], [], 0)[0])

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self._fd)


def run(leg: Leg, seed: int, folder: Path, control: Control, stop: Stop) -> Outcome:
    """Run one leg to its end. Blocks; if *stop* is set, the leg is interrupted, as at its limit."""
    name = leg.name.replace(" ", "-")
    figures, output = folder / f"{name}.figures", folder / f"{name}.log"
    figures.unlink(missing_ok=True)
    words = leg.words(seed, str(figures))
    mark = f"{os.getpid()} {name}"
    begun = time.monotonic()
    with output.open("wb") as out:
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        ended = _ended(process, leg.limit_s, stop)
        left = _end(process, mark)
    seconds = time.monotonic() - begun
    done, found = _read(figures)
    if not ended:
        outcome = "interrupted" if stop else f"took longer than {leg.limit_s:.0f} s"
    elif process.returncode:
        outcome = f"failed (exit code {process.returncode})"
    elif left:
        outcome = f"left processes: {', '.join(left)}"
    else:
        outcome = "passed" if any(not line.startswith("0 of ") for line in done) else "nothing was done"
    tail = "" if outcome == "passed" else output.read_text(errors="replace")[-TAIL:]
    shown = ["python" if word == sys.executable else word for word in words]
    command = " ".join(f"'{word}'" if " " in word else word for word in shown[: -2 if "--figures" in shown else None])
    return Outcome(leg, command, seed, outcome, round(seconds, 1), done, found, control.since(begun), output.name, tail)


def _ended(process: subprocess.Popen[bytes], limit_s: float, stop: Stop) -> bool:
    """Wait for a leg's end, for its limit, or for *stop*; true if the leg ended by itself."""
    pidfd = os.pidfd_open(process.pid)
    try:
        return pidfd in select.select([pidfd, stop], [], [], limit_s)[0]
    finally:
        os.close(pidfd)


def _end(process: subprocess.Popen[bytes], mark: str) -> list[str]:
    """Let a leg that is still there clean up, kill what is left of it then, and return the names of that."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_S)
    deadline = time.monotonic() + LEFT_S
    left = []
    for pid in [pid for pid in _marked(mark) if pid != process.pid]:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            pidfd = os.pidfd_open(pid)
            if not select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                left.append(f"{name} ({pid})")
                os.kill(pid, signal.SIGKILL)
            os.close(pidfd)
    if process.poll() is None:
        process.kill()
    process.wait()
    return left


def _marked(mark: str) -> Iterator[int]:
    """Pids of a leg's processes."""
    wanted = f"{MARK}={mark}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path("/proc", pid, "environ").read_bytes().split(b"\0"):
                yield int(pid)


def _read(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """What tests reported by `Figures`: sizes, summed over tests, and figures."""
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = {(entry["test"], entry["unit"]): entry for entry in entries if "unit" in entry}
    units = {unit: [entry for (_, its), entry in last.items() if its == unit] for _, unit in last}
    done = [
        f"{sum(entry['done'] for entry in of):,} of {sum(entry['asked'] for entry in of):,} {unit}"
        for unit, of in units.items()
    ]
    return done, [(entry["name"], entry["value"]) for entry in entries if "name" in entry]


def machine() -> dict[str, object]:
    """What the report was made on."""
    with open("/proc/meminfo") as file:
        memory_kib = int(file.readline().split()[1])
    return {
        "commit": _git("rev-parse", "--short=10", "HEAD") + (" and changes" if _git("status", "--porcelain") else ""),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def markdown(about: Mapping[str, object], outcomes: Sequence[Outcome]) -> str:
    """The report for people."""
    lines = [
        f"{about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}, Python {about['python']}, "
        f"commit {about['commit']}, {about['begun']}, {about['parallel']} legs at a time, "
        f"load at the start {about['load_at_start']}",
        "",
        "| leg | asked | done | outcome | took | figures | the machine meanwhile |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        machine_did = (
            f"load {one.control['load_p50']:.1f} (p50), {one.control['load_max']:.1f} (max); timer late by "
            f"{one.control['timer_late_p50_ms']:g} / {one.control['timer_late_p99_ms']:g} / "
            f"{one.control['timer_late_max_ms']:g} ms (p50 / p99 / max); echo through a pipe "
            f"{one.control['echo_p50_ms']:g} / {one.control['echo_p99_ms']:g} ms (p50 / p99)"
            if one.control
            else ""
        )
        cells = (
            one.leg.name, f"{one.leg.size:,.0f} {one.leg.unit}", "; ".join(one.done),
            one.outcome, f"{one.seconds:.0f} s", "; ".join(f"{name}: {value}" for name, value in one.figures),
            machine_did,
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "Commands:", ""]
    lines += [f"* {one.leg.name}: `{one.command}`" for one in outcomes]
    for one in outcomes:
        if not one.passed:
            lines += ["", f"## {one.leg.name}: {one.outcome}", "", f"The end of {one.output}:", "", "```"]
            lines += [one.tail.strip(), "```"]
    return "\n".join(lines) + "\n"


def nightly(
    legs: Sequence[Leg],
    scale: float,
    parallel: int,
    seed: int,
    folder: Path,
    stop: Stop,
) -> list[Outcome]:
    """Run these legs and write the report, anew after each. Returns how they ended."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {**machine(), "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "parallel": parallel}
    outcomes: list[Outcome] = []
    writing = threading.Lock()
    control = Control()

    def one(leg: Leg) -> None:
        if stop:
            return
        _say(f"{leg.name}: begins, at most {leg.limit_s:.0f} s")
        outcome = run(leg, seed, folder, control, stop)
        _say(f"{leg.name}: {outcome.outcome} after {outcome.seconds:.0f} s; {'; '.join(outcome.done)}")
        with writing:
            outcomes.append(outcome)
            outcomes.sort(key=lambda one: [leg.name for leg in legs].index(one.leg.name))
            whole: dict[str, Any] = {**about, "seed": seed, "legs": [dataclasses.asdict(one) for one in outcomes]}
            (folder / "report.json").write_text(json.dumps(whole, indent=2) + "\n")
            (folder / "report.md").write_text(markdown(about, outcomes))

    try:
        for group, width in (
            ([leg for leg in legs if not leg.alone], parallel),
            ([leg for leg in legs if leg.alone], 1),
        ):
            with ThreadPoolExecutor(width, "leg") as pool:
                for done in [pool.submit(one, leg.at(scale)) for leg in group]:
                    done.result()
    finally:
        control.close()
    return outcomes


def main(arguments: Sequence[str] | None = None, legs: Sequence[Leg] = LEGS) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the legs and run none")
    parser.add_argument("--only", metavar="LEG", action="append", help="only this leg; may be given several times")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the size of each leg")
    parser.add_argument("--parallel", type=int, default=3, metavar="N", help="legs at a time (default 3)")
    parser.add_argument("--seed", type=int, help="of an earlier run; by default a new one")
    parser.add_argument("--report", type=Path, metavar="DIR", help="default: a new directory in outputs/")
    options = parser.parse_args(arguments)
    chosen = [leg for leg in legs if not options.only or leg.name in options.only]
    if unknown := set(options.only or ()) - {leg.name for leg in legs}:
        parser.error(f"no leg {', '.join(sorted(unknown))}; the legs are {', '.join(leg.name for leg in legs)}")
    if options.list:
        for leg in (leg.at(options.scale) for leg in chosen):
            print(f"{leg.name}: {leg.size:g} {leg.unit}, at most {leg.limit_s:.0f} s{', alone' if leg.alone else ''}")
        return 0
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    folder = (options.report or ROOT / "outputs" / time.strftime("nightly-%Y%m%d-%H%M%S")).resolve()
    with contextlib.closing(Stop()) as stop, _handled(stop):
        outcomes = nightly(chosen, options.scale, options.parallel, seed, folder, stop)
    print(f"\n{(folder / 'report.md').read_text()}\nreport: {folder}")
    return 0 if len(outcomes) == len(chosen) and all(outcome.passed for outcome in outcomes) else 1


@contextlib.contextmanager
def _handled(stop: Stop) -> Iterator[None]:
    """Ctrl-C and SIGTERM interrupt the legs, which clean up; what is done until then is reported."""
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
