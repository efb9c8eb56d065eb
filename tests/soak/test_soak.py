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
"""How much more a process may hold in the second half than in the first; or a tenth of it, whichever is more."""
SHARED_KIB = 128 << 10
"""The same of shared memory. What the dead lent is kept for 10 s, so it goes up and down with how many died."""
DESCRIPTORS = 8
GROWTH_FROM_S = 60
"""In a shorter soak the first dead have not been forgotten yet when it ends."""


@pytest.mark.timeout(0)
def test_soak(
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
    growth = grown(soak.samples, soak.rounds)
    figures.done(round(time.monotonic() - end + soak_seconds), round(soak_seconds), "s")
    figures.add("soak", f"{soak.rounds} rounds, {events:,} events, {len(soak.killed)} killed; seed {seed}")
    figures.add("lost, doubled, out of order or damaged", len(found))
    figures.add("that grew", len(growth))
    if soak_seconds >= GROWTH_FROM_S:
        found += growth
    assert not found, f"seed {seed}, {soak.rounds} rounds:\n" + "\n".join(found[:30])


def grown(samples: Any, rounds: int) -> list[str]:
    """What kept growing, of the processes that were there all the time."""
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
