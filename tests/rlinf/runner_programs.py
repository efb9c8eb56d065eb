"""RLinf's runners with small CPU workers, here and on Ray: run the programs of tests/rlinf/runners, compare, record.

    RLINF_SRC=~/RLinf python -m tests.rlinf.runner_programs --ray ~/ray/bin/python [PROGRAM ...] [--rounds 3] [--record]

`--ray` names an interpreter that has Ray and RLinf's packages. Each round runs every program on Ray, then here. The
digits of all runs must be the same. The table has the medians: until the cluster is there, until the workers are ready,
the run, and its steps after the first. `--record` writes the digits of Ray to runner_digits.json, with which
test_runners.py compares.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.rlinf.on_ray import apart

HERE = Path(__file__).resolve().parent
DIGITS = HERE / "runner_digits.json"
PROGRAMS = ("embodied", "async_embodied", "async_ppo", "agent", "multi_turn")
CLOSE = 1e-6  # relative: other machines add up in another order


def run(command: list[str], program: str, source: str, seconds: float, ray: str | None = None) -> dict[str, Any]:
    """Run `program` by `command`, or on Ray by the Python `ray`, with the checkout `source`; return its report."""
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "RLINF_SRC": source, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as directory:
        if ray is not None:
            command, variables = apart(ray, directory)
            env |= variables
        errors = Path(directory, "stderr")
        with errors.open("w") as stderr:
            child = subprocess.Popen(
                [*command, str(HERE / "runners" / f"{program}.py")],
                cwd=directory,
                env=env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                output, _ = child.communicate()
        lines = output.splitlines()
        reports = [line for line in lines if line.startswith('{"digits"')]
        if child.returncode != 0 or not reports:
            tail = "\n".join([*lines[-10:], *errors.read_text().splitlines()[-40:]])
            raise AssertionError(f"{program} ended with {child.returncode} (-9: after {seconds:g} s):\n{tail}")
    report: dict[str, Any] = json.loads(reports[-1])
    return report


def run_here(program: str, source: str, seconds: float = 300) -> dict[str, Any]:
    """Run `program` on rlinf_actors."""
    return run([sys.executable, "-m", "rlinf_actors.dropin"], program, source, seconds)


def differences(one: Any, other: Any, at: str = "digits") -> list[str]:
    """Return where two reports of digits differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in differences(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{at}[{index}]")]
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-9):
        return []
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]


def recorded() -> dict[str, Any]:
    """Return the digits of each program on Ray."""
    found: dict[str, Any] = json.loads(DIGITS.read_text())
    return found


def medians(reports: list[dict[str, Any]]) -> dict[str, float]:
    seconds = [report["seconds"] for report in reports]
    found = {part: statistics.median(each[part] for each in seconds) for part in ("cluster", "workers", "run")}
    steps = [step for each in seconds for step in each["steps"][1:]]
    return {**found, "a step": statistics.median(steps) if steps else math.nan}


def main() -> None:
    """Run the programs that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    parser.add_argument("--source", default=os.environ.get("RLINF_SRC"), help="RLinf's checkout (RLINF_SRC)")
    parser.add_argument("--ray", help="a Python with Ray and RLinf's packages; without it only the runs here")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write runner_digits.json")
    parser.add_argument("--seconds", type=float, default=600, help="the longest time of one run")
    args = parser.parse_args()
    digits = recorded() if DIGITS.exists() else {}
    reports: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for program in args.programs:
            if args.ray:
                report = run([], program, args.source, args.seconds, ray=args.ray)
                reports.setdefault((program, "Ray"), []).append(report)
            reports.setdefault((program, "here"), []).append(run_here(program, args.source, args.seconds))
            print(f"{program}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    if args.record:
        digits |= {program: each[0]["digits"] for (program, where), each in reports.items() if where == "Ray"}
        DIGITS.write_text(json.dumps(dict(sorted(digits.items())), indent=1) + "\n")
    print("| program | | cluster | workers | run | a step |\n|---|---|---|---|---|---|")
    different = []
    for (program, where), each in reports.items():
        figures = " | ".join(f"{value:.2f} s" for value in medians(each).values())
        print(f"| {program} | {where} | {figures} |")
        for report in each:
            different += [f"{program} {where}: {line}" for line in differences(digits[program], report["digits"])]
    sys.exit("\n".join(different) or None)


if __name__ == "__main__":
    main()
