"""torch on the CPU comes without numpy: tensors go all ways without it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import environments
import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.live, pytest.mark.torch]

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]


def test_tensors_travel_in_all_ways_without_numpy(tmp_path):
    python = environments.without(tmp_path / "env", "numpy")
    env = {**os.environ, "PYTHONPATH": f"{PROJECT}:{HERE}"}
    done = subprocess.run(
        [python, HERE / "tensors_without_numpy.py"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "all is there\n"), done.stdout + done.stderr
