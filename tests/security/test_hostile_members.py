"""Members with valid keys that send a head all that they can: safety holds, and each refusal says why.

The run is that of ``python -m benchmarks.hostile``: head and victims on one processor, the hostile members on another,
all in processes of their own. How late answers are is measured there and not asserted here, because it depends on the
machine. The nightly run is longer, with more members.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live
ROOT = Path(__file__).resolve().parents[2]


def test_hostile_members_take_no_lease_and_are_told_which_rule_refuses_them(request, figures, rlinf_leak_check):
    seconds = request.config.getoption("hostile_seconds")
    members, lease_s = (8, 2.0) if seconds > 10 else (3, 8.0)  # a lease that other tests on the machine do not end
    command = [sys.executable, "-m", "benchmarks.hostile", "--json", "--seconds", f"{seconds:g}"]
    command += ["--members", str(members), "--robot-lease", f"{lease_s:g}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 120)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    waits = sorted(wait for of_kind in outcome["waits"].values() for wait in of_kind)
    figures.add("control p99 of the others", f"{1e3 * waits[int(0.99 * (len(waits) - 1))]:.0f} ms")
    figures.add("longest time between renewals of the robot lease", f"{outcome['renewals']:.2f} s")
    figures.done(int(seconds), int(seconds), "s")
    assert outcome["lost"] == []
    assert outcome["failed"] == []
    assert outcome["renewals"] < lease_s
    refused = [line for line in outcome["log"] if line.startswith("refused")]
    assert refused
    assert [line for line in refused if "hostile" not in line and "have exceeded their budget" not in line] == []
