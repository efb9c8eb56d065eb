"""The short form of `python -m rlinf_actors.testing.chaos`. Usage: pytest tests/chaos --chaos-seconds 1800."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlinf_actors.testing.chaos.__main__ import run

pytestmark = pytest.mark.live


@pytest.mark.timeout(0)
def test_a_random_fault_every_two_seconds_breaks_no_promise(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seconds, seed = (request.config.getoption(f"chaos_{name}") for name in ("seconds", "seed"))
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    print(f"chaos: seed {seed}")
    report = run(seconds, 2.0, seed, [], str(tmp_path))
    print(report.text())
    assert not report.violations, report.text()
    assert sum(report.faults.values()) > seconds / 4
    assert report.outcomes["call"]["ok"]
