"""Random work with random deaths. Usage: pytest tests/soak -m soak --soak-seconds 300 [--soak-seed N].

The seed is printed; it gives the same plan of operations and deaths again, though not the same order in time.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import deliveries as soak_checker
import pytest
import soak_log
from nightly import Figures

from rlinf_actors.settings import SEND_WINDOW
from rlinf_actors.testing import LocalCluster

pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.torch]

OWN_KIB = 24 << 10
"""Permitted growth of a process from the first half to the second; or a tenth of its size, if that is more."""
SHARED_KIB = 128 << 10
"""The same for shared memory. Blocks lent by dead workers are kept for 10 s, so the size varies with the deaths."""
DESCRIPTORS = 8
GROWTH_FROM_S = 60
"""A shorter soak ends before the first dead workers are forgotten."""


@pytest.mark.timeout(0)
def test_random_work_with_deaths_loses_no_items_and_leaks_no_memory(
    tmp_path: Path, rlinf_leak_check: None, soak_seconds: float, soak_seed: int | None, figures: Figures
) -> None:
    from soak_driver import Soak

    seed = random.SystemRandom().randrange(1 << 32) if soak_seed is None else soak_seed
    print(f"soak: seed {seed}")
    with LocalCluster(num_nodes=2, env={SEND_WINDOW: str(8 << 20)}) as local, local.cluster() as cluster:
        soak = Soak(cluster, str(tmp_path), seed, {f"agentd of node {node.rank}": node.pid for node in local.nodes})
        try:
            end = time.monotonic() + soak_seconds
            while time.monotonic() < end:
                soak.round()
            soak.drain()
        finally:
            soak.close()
    logs = soak_log.read(str(tmp_path))
    events = sum(map(len, logs.values()))
    found = soak_checker.problems(logs, soak.killed)
    growth = growing_processes(soak.samples, soak.rounds)
    figures.done(round(time.monotonic() - end + soak_seconds), round(soak_seconds), "s")
    figures.add("soak", f"{soak.rounds} rounds, {events:,} events, {len(soak.killed)} killed; seed {seed}")
    figures.add("lost, doubled, out of order or damaged", len(found))
    figures.add("that grew", len(growth))
    if soak_seconds >= GROWTH_FROM_S:
        found += growth
    assert not found, f"seed {seed}, {soak.rounds} rounds:\n" + "\n".join(found[:30])


def growing_processes(samples: Any, rounds: int) -> list[str]:
    """The growth of processes that lived through the soak, a sentence each."""
    found = []
    for kind, limit in (("own", OWN_KIB), ("shared", SHARED_KIB), ("descriptors", DESCRIPTORS)):
        unit = "" if kind == "descriptors" else " KiB"
        for name, values in getattr(samples, kind).items():
            if len(values) < rounds:
                continue
            quarters = [soak_checker.middle(part) for part in soak_checker.quarters(values)]
            print(f"soak: {name}: {kind}, medians of the quarters {quarters}{unit}")
            more = soak_checker.growth(values)
            if more > max(limit, soak_checker.middle(values) / 10):
                found.append(f"{name}: {kind} grew by {more:.0f}{unit}: {values}")
    return found
