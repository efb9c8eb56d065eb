"""RLinf's own dynamic scheduler, from its checkout, moves GPUs from rollouts to the actor over our channels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not os.environ.get("RLINF_SRC"), reason="needs a checkout of RLinf: RLINF_SRC=DIR"),
]
PROGRAM = Path(__file__).with_name("dynamic_scheduler_program.py")


def test_the_scheduler_of_rlinf_runs_unchanged(tmp_path):
    path = os.pathsep.join(filter(None, [os.environ["RLINF_SRC"], os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_actors.dropin", str(PROGRAM)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    sequences = [name for names in found["rollouts"] for name in names]
    assert sorted(sequences) == sorted(f"{rank}.{n}" for rank in range(4) for n in range(2)), "each ran once"
    assert found["rollouts"][0] == [], "its sequences were moved to the other rollouts"
    grown = [told["world_size"] for told in found["actor"] if told]
    assert grown, "the actor got the GPUs of the rollouts that ended"
    assert grown[-1] == 1, "and gave them back at the end of the step"
