"""Random faults in a real cluster on this machine; the exit code is 1 if a promise was broken."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlinf_actors.errors import ConfigError
from rlinf_actors.testing.chaos import record
from rlinf_actors.testing.chaos.invariants import Limits, violations
from rlinf_actors.testing.chaos.load import LIMIT_S
from rlinf_actors.testing.chaos.plan import KINDS, Plan
from rlinf_actors.testing.chaos.report import Report
from rlinf_actors.testing.chaos.scene import LEASE_S, Scene
from rlinf_actors.testing.leaks import LeakCheck

ORPHAN_S = 20.0
"""How long a worker may outlive its driver: several leases, because the head may be away meanwhile."""
LOOK_S = 120.0
"""Between two looks at the records while the run goes on."""

SETTLED_S = 5.0
"""Lines that are younger are not judged yet: who was stopped has the time, and has not written the line."""


def run(seconds: float, every: float, seed: int, kinds: list[str], folder: str) -> Report:
    """Start a cluster, make faults happen, end everything, judge. Blocks.

    Args:
        seconds: how long.
        every: seconds between two faults.
        seed: of the faults.
        kinds: of faults, all if empty.
        folder: of records.

    Raises:
        ConfigError: no such kind.
    """
    plan = Plan(seed, kinds, LEASE_S)
    check = LeakCheck()
    limits = Limits(LIMIT_S, ORPHAN_S)
    scene = Scene(folder, plan)

    def look() -> int:
        until = time.monotonic() - SETTLED_S
        return len(violations(record.read(folder, until), until, limits))

    try:
        scene.start()
        with ThreadPoolExecutor(1, "chaos-look") as looks:  # faults go on meanwhile, and who was stopped is continued
            looking, left = looks.submit(look), seconds
            while left > 0:
                scene.run(min(left, LOOK_S), every)
                left -= LOOK_S
                if looking.done() and left > 0:
                    found = looking.result() + len(scene.problems)
                    print(f"chaos: {left:.0f} s left, {found} violations", flush=True)  # noqa: T201
                    looking = looks.submit(look)
        scene.stop()
    finally:
        scene.close()
        left_behind = check.problems()
    records = record.read(folder)
    broken = [*scene.problems, *violations(records, time.monotonic(), limits), *left_behind]
    return Report.of(records, seed, seconds, every, broken)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rlinf_actors.testing.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it lasts")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, help="the faults of an earlier run; by default new ones")
    parser.add_argument("--kinds", default="", help=f"only these, separated by commas: {', '.join(KINDS)}")
    parser.add_argument("--folder", help="keep the records of all processes there; by default only after a violation")
    parser.add_argument("--json", help="write the report to that file too")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    folder = options.folder or tempfile.mkdtemp(prefix="rlinf-chaos-")
    Path(folder).mkdir(parents=True, exist_ok=True)
    kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    try:
        report = run(options.seconds, options.every, seed, kinds, folder)
    except ConfigError as error:
        parser.error(str(error))
    print(report.text())  # noqa: T201
    if options.json:
        Path(options.json).write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    if report.violations:
        print(f"the records are in {folder}", file=sys.stderr)  # noqa: T201
        return 1
    if not options.folder:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
