"""A cluster in one loop under random faults, with the same judge as the live run."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from chaos_driver import LIMIT_S
from chaos_invariants import Limits, faults, outcomes, violations
from chaos_world import World
from virtual_time import VirtualLoop

SECONDS = 60.0
"""Seconds of virtual time."""


def live(seed: int, seconds: float, folder: str) -> World:
    """One run."""

    async def run() -> World:
        world = World(seed, folder)
        with world.noise():
            end = world.loop.time() + seconds
            while world.loop.time() < end:
                await asyncio.sleep(world.rng.expovariate(1.0))
                world.strike()
        await world.end()
        return world

    random.seed(seed)  # agents and drivers spread their beats and retries
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_break_no_invariant_in_process(seed: int, tmp_path: Path) -> None:
    world = live(seed, SECONDS, str(tmp_path))
    found = violations(world.records, world.loop.time(), Limits(LIMIT_S, 20.0))
    assert not found, f"seed {seed}:\n" + "\n".join(found[:20])
    assert set(faults(world.records)) == {"kill worker", "kill agentd", "kill head", "kill driver", "cut agentd"}
    assert outcomes(world.records)["call"]["ok"] > 200
