"""kill -9 of each process, alone and in pairs, under load. Usage: pytest tests/kills --kill-rounds 100 [--kill-seed N].

Each wait ends, with the right exception; each process of the group ends; the group of another driver lives on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pace
import pytest
from kills_scene import NODES, VICTIMS, Scene, start_bystanders
from nightly import Figures

from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

SHORT_PAIRS = (("worker", "template"), ("template", "agentd"), ("agentd", "head"), ("head", "driver"))
"""Pairs of the short form: neighbours, one of which reports the other's end. `--kill-rounds 2` kills every pair."""
LEASES = pace.timers(lease_s=60.0)
"""On a busy machine a restart of agentd may take more than the usual lease of 10 s, and its workers would end rightly.
No test here waits for a lease.
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with LocalCluster(NODES, options=LEASES) as local:
        bystanders = start_bystanders(local.cluster())
        yield Scene(local, bystanders, tmp_path_factory.mktemp("kills"))


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "victims", [*itertools.combinations(VICTIMS, 1), *itertools.combinations(VICTIMS, 2)], ids="+".join
)
def test_waits_of_killed_processes_end_and_bystanders_live(
    scene: Scene, victims: tuple[str, ...], kill_rounds: int, kill_seed: int, figures: Figures
) -> None:
    if kill_rounds == 1 and len(victims) == 2 and victims not in SHORT_PAIRS:
        pytest.skip("of the long form: --kill-rounds 2")
    rng = random.Random(f"{kill_seed} {victims}")
    figures.done(0, kill_rounds, "rounds")
    for number in range(kill_rounds):
        found = scene.round(victims, rng)
        assert not found, f"round {number}, seed {kill_seed}:\n" + "\n".join(found)
        figures.done(number + 1, kill_rounds, "rounds")
