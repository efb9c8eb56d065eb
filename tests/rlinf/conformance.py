"""Runs RLinf's own unit tests, unmodified, on rlinf_actors.dropin, and compares the counts with those on Ray.

    RLINF_SRC=~/RLinf python -m tests.rlinf.conformance [FILE ...] [--out DIR] [--ray PYTHON]

Each test file runs in a process of its own: ``python -m rlinf_actors.dropin -m pytest FILE``. A line for each file has
what junit counted and the seconds, and the same as recorded on Ray (tests/rlinf/recorded.py). With --ray, the file then
runs on Ray too, by an interpreter that has Ray and not rlinf_actors: machines are compared with themselves. Then come
the counts of each tier, and every test of tiers A and B that failed, with its message. Exit status: 0 if as many tests
of tiers A and B pass as on Ray (for named files: if none of them fails), else 1.
"""

from __future__ import annotations

import argparse
import collections
import compileall
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import agentd
import rlinf_actors
from tests.rlinf.on_ray import apart
from tests.rlinf.recorded import COMMIT, FILES, GOALS, TIERS, OnRay, tier_of

ASKED = "AB"
PLUGINS = ("pytest_asyncio", "pytest_timeout")
"""What RLinf's tests need. Other installed plugins, which the figures on Ray do not have either, are not loaded."""
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


class Case(NamedTuple):
    """One test: ``file::class::test``, its outcome, the message of a test that did not pass, and its seconds."""

    test: str
    outcome: str
    message: str
    seconds: float


class Ran(NamedTuple):
    """One test file: its tests, the seconds of its process, and why it has no report ("" if it has)."""

    cases: list[Case]
    seconds: float
    trouble: str


def read_junit(name: str, report: Path) -> list[Case]:
    """Return the tests of the junit file *report* of the test file *name*."""
    cases = []
    for case in ElementTree.parse(report).iter("testcase"):
        group = (case.get("classname") or "").rpartition(".")[2]
        test = "::".join([name, *([group] if group not in ("", name) else []), case.get("name", "")])
        outcome, message = "passed", ""
        for tag, word in OUTCOMES.items():
            if (found := case.find(tag)) is not None:
                outcome, message = word, (found.get("message") or "")
                break
        cases.append(Case(test, outcome, message, float(case.get("time") or 0)))
    return cases


def environment(source: Path) -> dict[str, str]:
    """Return the environment of a test process for the checkout *source*."""
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [str(source), str(source / "tests" / "unit_tests"), *inherited]
    changed = {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return {**os.environ, **changed}


def run_file(
    source: Path, name: str, out: Path, test_s: float, file_s: float, command: list[str], env: dict[str, str]
) -> Ran:
    """Run the test file *name* of the checkout *source* by *command*; its log and junit file go to *out*."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [*command, "-m", "pytest", "-p", "no:cacheprovider", "-ra"]
    command += [word for plugin in PLUGINS for word in ("-p", plugin)]
    command += [f"--timeout={test_s:g}", f"--junitxml={report}", str(source / "tests" / "unit_tests" / f"{name}.py")]
    began, trouble = time.monotonic(), ""
    with open(out / f"{name}.log", "w") as log:
        child = subprocess.Popen(
            command, cwd=out, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait(file_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
            trouble = f"killed after {file_s:g} s"
    seconds = time.monotonic() - began
    if report.exists():
        return Ran(read_junit(name, report), seconds, trouble)
    return Ran([], seconds, trouble or f"no report, exit status {status}: see {log.name}")


def run_on_ray(source: Path, name: str, out: Path, test_s: float, file_s: float, python: str) -> OnRay:
    """Run the test file *name* on Ray by the interpreter *python*, apart from other clusters; return its figures."""
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as directory:
        command, variables = apart(python, directory)
        ran = run_file(source, name, out, test_s, file_s, command, environment(source) | variables)
    counts = collections.Counter(case.outcome for case in ran.cases)
    if ran.trouble:
        print(f"{name} on Ray: {ran.trouble}", flush=True)
    return OnRay(len(ran.cases), counts["passed"], counts["skipped"], ran.seconds)


def line(name: str, ran: Ran, ray: OnRay) -> str:
    """Return the line of the table for the test file *name*."""
    counts = collections.Counter(case.outcome for case in ran.cases)
    figures = "".join(f"{counts[word]:6}" for word in ("passed", "failed", "error", "skipped"))
    on_ray = f"{ray.collected:5}{ray.passed:6}{ray.skipped:6}{ray.seconds:8.1f}"
    return f"{name:36}{len(ran.cases):5}{figures}{ran.seconds:8.1f} |{on_ray}  {ran.trouble}".rstrip()


def summary(results: dict[str, Ran], on_ray: dict[str, OnRay]) -> tuple[list[str], bool]:
    """Return the lines after the table, which compare with the figures *on_ray*, and True if the exit status is 0."""
    tiers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for ran in results.values():
        for case in ran.cases:
            tiers[tier_of(case.test)][case.outcome] += 1
    lines = []
    for tier in sorted(tiers):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tiers[tier].items()))
        goal = f"; on Ray {GOALS[tier]} passed" if tier in GOALS and results.keys() >= FILES.keys() else ""
        lines.append(f"tier {tier} ({TIERS[tier]}): {counts}{goal}")
    failed = [
        case
        for ran in results.values()
        for case in ran.cases
        if tier_of(case.test) in ASKED and case.outcome in ("failed", "error")
    ]
    lines += [f"{case.outcome} {case.test}: {(case.message.splitlines() or [''])[0][:160]}" for case in failed]
    slower = [
        f"slower than on Ray: {name}, {ran.seconds:.1f} s, {on_ray[name].seconds:.1f} s on Ray"
        for name, ran in results.items()
        if name in on_ray and ran.seconds > on_ray[name].seconds
    ]
    complete = results.keys() < FILES.keys() or all(tiers[tier]["passed"] >= goal for tier, goal in GOALS.items())
    return [*lines, *slower], complete and not failed and not any(ran.trouble for ran in results.values())


def main() -> None:
    """Run the files that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files without .py; all of the table without one")
    parser.add_argument("--source", type=Path, default=os.environ.get("RLINF_SRC"), help="RLinf's checkout (RLINF_SRC)")
    parser.add_argument("--out", type=Path, help="directory of logs, junit files and results.json")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter with Ray: run each file on Ray as well")
    parser.add_argument("--test-seconds", type=float, default=60)
    parser.add_argument("--file-seconds", type=float, default=900)
    args = parser.parse_args()
    if args.source is None or not (args.source / "rlinf" / "scheduler").is_dir():
        parser.error(f"RLINF_SRC or --source must name a checkout of RLinf (commit {COMMIT[:9]}), not {args.source}")
    out = (args.out or Path(tempfile.mkdtemp(prefix="conformance-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    source, results, on_ray = args.source.resolve(), {}, dict(FILES)
    for package in (rlinf_actors, agentd):  # as an installation does, because the tests write no bytecode
        compileall.compile_dir(Path(package.__file__).parent, quiet=2)
    print(f"{'':36}  all  pass  fail error  skip       s |  Ray  pass  skip       s")
    for name in args.files or FILES:
        limits = (args.test_seconds, args.file_seconds)
        here = [sys.executable, "-m", "rlinf_actors.dropin"]
        results[name] = run_file(source, name, out, *limits, here, environment(source))
        if args.ray is not None:
            on_ray[name] = run_on_ray(source, name, out / "ray", *limits, args.ray)
        print(line(name, results[name], on_ray.get(name, OnRay(0, 0, 0, 0.0))), flush=True)
    (out / "results.json").write_text(json.dumps({name: ran._asdict() for name, ran in results.items()}, indent=1))
    lines, good = summary(results, on_ray)
    print("\n".join(lines))
    print(f"logs: {out}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
