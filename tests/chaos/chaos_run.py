"""Run random faults in a real cluster on this machine and judge what all processes recorded.

`chaos_plan` chooses the faults, `chaos_scene` has the processes and applies the faults. `chaos_load` is a driver,
`chaos_workers` are its workers, `chaos_record` is what every process writes down. `chaos_invariants` and `deliveries`
judge the records. test_chaos_live.py is the command.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import chaos_record
from chaos_invariants import Limits, violations
from chaos_load import LIMIT_S
from chaos_plan import Plan
from chaos_report import Report
from chaos_scene import LEASE_S, Scene

from rlinf_actors.testing.leaks import LeakCheck

ORPHAN_S = 20.0
"""How long a worker may outlive its driver: several leases, because the head may be away meanwhile."""
JUDGE_S = 120.0
"""Seconds between two judgements of the records while the run goes on."""

SETTLED_S = 5.0
"""Younger lines are not judged yet: a stopped process may have read the clock and not written its line."""


def run(seconds: float, every: float, seed: int, kinds: list[str], folder: str) -> Report:
    """Start a cluster, apply faults, end everything and return the report. Blocks.

    Args:
        seconds: length of the run.
        every: seconds between two faults.
        seed: seed of the faults.
        kinds: kinds of faults (chaos_plan.KINDS); all if empty.
        folder: directory of the records.

    Raises:
        ConfigError: a kind is unknown.
    """
    plan = Plan(seed, kinds, LEASE_S)
    check = LeakCheck()
    limits = Limits(LIMIT_S, ORPHAN_S)
    scene = Scene(folder, plan)

    def judge() -> int:
        until = time.monotonic() - SETTLED_S
        return len(violations(chaos_record.read(folder, until), until, limits))

    try:
        scene.start()
        with ThreadPoolExecutor(
            1, "chaos-judge"
        ) as judges:  # faults go on meanwhile, and stopped processes are continued
            judging, left = judges.submit(judge), seconds
            while left > 0:
                scene.run(min(left, JUDGE_S), every)
                left -= JUDGE_S
                if judging.done() and left > 0:
                    found = judging.result() + len(scene.problems)
                    print(f"chaos: {left:.0f} s left, {found} violations", flush=True)
                    judging = judges.submit(judge)
        scene.stop()
    finally:
        scene.close()
        left_behind = check.problems()
    records = chaos_record.read(folder)
    broken = [*scene.problems, *violations(records, time.monotonic(), limits), *left_behind]
    return Report.of(records, seed, seconds, every, broken)
