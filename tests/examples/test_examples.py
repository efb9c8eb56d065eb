"""Every example runs as its own page says, in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PATIENCE_S = 90
"""Shorter than tests may take, so that what is waited for is ended. Slurm's with keys are eight processes one after the
other: 40 s in three copies at once.
"""

pytestmark = pytest.mark.live


def run(cwd: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLINF_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip


def succeeds(cwd: Path, name: str, *arguments: str) -> str:
    done = run(cwd, name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_hello(tmp_path):
    out = succeeds(tmp_path, "hello.py")
    for rank in range(4):
        assert f"Hello, world! I am rank {rank} of 4, process " in out
    assert "Hello, you! I am rank 2 of 4" in out
    assert "12 numbers streamed by ranks [0, 1, 2, 3]" in out
    assert "raised ValueError: rank 1 would rather not" in out


def test_hello_blocking(tmp_path):
    out = succeeds(tmp_path, "hello_blocking.py")
    assert "Hello, world! I am rank 3 of 4, process " in out
    assert "a worker's ValueError, caught here: greeters:" in out
    assert "and the group lives on: Hello, again! I am rank 3 of 4" in out


FIRST_PROGRAM = "hydra_first_program/main.py"


def test_the_first_program_says_what_to_write_where_there_is_no_accelerator(tmp_path):
    done = run(tmp_path, FIRST_PROGRAM)
    assert done.returncode == 1
    assert (
        "cluster.component_placement.test_worker: placement '0-3' names resource 3 of node group 'a800', which has "
        "one resource (the node): rank 0; to put 4 processes there, write `0:0-3`"
    ) in done.stderr


def test_the_first_program_with_what_it_was_told_to_write(tmp_path):
    done = run(tmp_path, FIRST_PROGRAM, 'cluster.component_placement.test_worker.placement="0:0-3"')
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()  # a worker logs to its stderr
    for rank in range(4):
        (line,) = [line for line in lines if line.endswith(f"Hello from TestWorker rank {rank}!")]
        assert line.startswith(f"[worker_group_TestWorker:{rank}@")


def test_the_first_program_differs_from_rlinfs_by_its_import_alone():
    source = (EXAMPLES / FIRST_PROGRAM).read_text()
    assert [line for line in source.splitlines() if "rlinf" in line and "import" in line] == [
        '"""The first program of an RLinf user. Only the import differs (RLinf: ``from rlinf.scheduler import ...``).',
        "from rlinf_actors import Cluster, ComponentPlacement, Worker",
    ]


def test_rollout_pipeline(tmp_path):
    out = succeeds(tmp_path, "rollout_pipeline.py", "--workers", "2", "--episodes", "30", "--batch", "100")
    assert "2 rollout workers, 60 episodes, 960 steps" in out
    assert "inference answered 960 observations" in out
    assert "trainer saw 960 steps in " in out
    assert "steps/s" in out


@pytest.mark.torch
def test_ddp_training(tmp_path):
    out = succeeds(tmp_path, "ddp_training.py", "--workers", "2", "--steps", "10")
    losses = [float(line.rsplit(" ", 1)[1]) for line in out.splitlines() if line.startswith("round ")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "all ranks have the same model: True" in out


def test_point_to_point(tmp_path):
    out = succeeds(tmp_path, "point_to_point.py", "--mib", "2", "--steps", "3")
    for rank in (0, 1):
        assert f"sensor {rank} got 3 answers, the last: step 2: sensor {rank} seen" in out
    assert "GB/s received" in out
    assert "a small object there and back: " in out


@pytest.mark.torch
def test_parameter_sync(tmp_path):
    out = succeeds(tmp_path, "parameter_sync.py", "--width", "256", "--rounds", "2", "--rollouts", "3")
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    assert len(lines) == 2
    for line in lines:
        assert line.endswith("the same everywhere: True")


@pytest.mark.nightly("18 agentds: tests/live/test_heterogeneous.py has the settings of nodes, the plan is tested below")
def test_heterogeneous(tmp_path):
    out = succeeds(tmp_path, "heterogeneous/main.py", "--small")
    assert "actor: 8 workers on nodes 0 (1), 1 (1), 2 (1), 3 (1), 4 (1), 5 (1), 6 (1), 7 (1)" in out
    assert "rollout: 8 workers on nodes 8 (1), " in out
    assert "env: 2 workers on nodes 16 (1), 17 (1)" in out
    assert "agent: 8 workers on nodes 0 (2), 1 (2), 2 (2), 3 (2)" in out
    assert "'robot_ip': '10.10.10.1'" in out
    assert "'ACCELERATOR_MODEL': 'RTX 4090', 'CUDA_VISIBLE_DEVICES': '0', 'GLOO_SOCKET_IFNAME': 'eth1'" in out


def test_the_whole_heterogeneous_plan(tmp_path):
    out = succeeds(tmp_path, "heterogeneous/main.py", "--plan-only")
    assert out.startswith("18 nodes, 128 accelerators")
    assert "agent: 400 processes on node (0-1:0-199,2-3:200-399)" in out


MATRIX = pytest.mark.nightly("tests/robots has each fault")


@pytest.mark.parametrize(
    "fault",
    ["none", "worker", pytest.param("watchdog", marks=MATRIX), pytest.param("template", marks=MATRIX), "agentd"],
)
def test_the_robot_arm_is_stopped_last(tmp_path, fault):
    out = succeeds(tmp_path, "robot_arm.py", "--fault", fault)
    assert re.search(r"commands in the arm's record; the last two: move \d\.\d+, stop\n", out)
    assert fault == "none" or f"after its {fault} was killed" in out


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
@pytest.mark.parametrize("fault", ["worker", "template"])
def test_the_robot_arm_that_a_loop_in_c_moves_is_stopped_last(tmp_path, fault):
    out = succeeds(tmp_path, "robot_arm.py", "--native", "--fault", fault)
    assert re.search(r"commands in the arm's record; the last two: move \d\.\d+, stop\n", out)
    assert "the driver gets: " in out
