"""Random faults in a real cluster break no invariant.

Usage: pytest -s tests/chaos/test_chaos_live.py --chaos-seconds 1800 --chaos-seed 7 [--chaos-kinds "kill worker"]
The suite runs a short form. The same seed gives the same faults, though not at the same point of the work.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos_run import run
from nightly import Figures

pytestmark = pytest.mark.live


@pytest.mark.timeout(0)
def test_random_faults_break_no_invariant_in_a_cluster(
    request: pytest.FixtureRequest, tmp_path: Path, figures: Figures
) -> None:
    seconds, seed = (request.config.getoption(f"chaos_{name}") for name in ("seconds", "seed"))
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    print(f"chaos: seed {seed}")
    kinds = [kind.strip() for kind in request.config.getoption("chaos_kinds").split(",") if kind.strip()]
    report = run(seconds, 2.0, seed, kinds, str(tmp_path))
    print(report.text())
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(report.faults.items()))
    ended = sum(sum(ends.values()) for ends in report.outcomes.values())
    answered = sum(ends.get("ok", 0) for ends in report.outcomes.values())
    noticed = "{p50:.1f} / {p99:.1f} / {max:.1f} ms (p50 / p99 / max) of {count:.0f}"
    figures.done(round(seconds), round(seconds), "s")
    figures.add("faults", f"{sum(report.faults.values())}: {faults}")
    figures.add("operations that ended", f"{ended:,}, {answered:,} with a result")
    figures.add("a kill was noticed after", noticed.format(**report.noticed_ms))
    figures.add("violations", len(report.violations))
    assert not report.violations, report.text()
    assert sum(report.faults.values()) > seconds / 4
    assert report.outcomes["call"]["ok"]
