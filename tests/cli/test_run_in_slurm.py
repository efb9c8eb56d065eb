"""`rlinf-actors run --slurm`, in jobs of a real Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
import slurm_kit

from rlinf_actors.cluster.local_daemon import processes_with
from rlinf_actors.settings import TEST_MARK

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "run-a-program.md"
RUN = f"{sys.executable} -m rlinf_actors.cli.main run --slurm --"

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(bool(slurm_kit.missing()), reason=slurm_kit.missing() or "-"),
    pytest.mark.usefixtures("rlinf_leak_check"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="rls-", dir="/tmp") as folder, slurm_kit.slurm(Path(folder)) as env:
        yield env


@pytest.fixture
def job(slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands run, with what the page and the example say."""
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{slurm['PATH']}")
    monkeypatch.setenv("RLINF_ACTORS_KEPT_LOGS", str(tmp_path / "kept"))
    for path in (ROOT / "examples" / "slurm").iterdir():
        shutil.copy(path, tmp_path)
    (text,) = re.findall(r"^```python\n(# train.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "waits.py").write_text(
        text.replace("print(nodes)", "print(nodes, flush=True); await asyncio.sleep(1000)")
    )
    (tmp_path / "out").touch()
    return tmp_path


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=pace.PATIENCE_S,
    )  # fmt: skip


def left() -> list[int]:
    return processes_with(TEST_MARK, os.environ[TEST_MARK])


def test_the_program_has_a_node_on_each_node_of_its_job(job):
    (command,) = re.findall(r"^    (salloc .*)$", PAGE.read_text(), re.M)
    done = run(command, job)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_the_batch_script_of_the_example_ends_with_the_exit_code_of_its_program(job):
    with (job / "program.py").open("a") as program:
        program.write("    raise SystemExit(7)\n")
    done = run("sbatch --wait --output=out --error=err job.sbatch", job)
    assert done.returncode == 7, (job / "err").read_text()
    assert (job / "out").read_text().splitlines() == ["rank 0 runs on node 0", "rank 1 runs on node 1"]


@pytest.mark.skipif(pace.rounds == 1, reason="--rounds 2, in the nightly leg: Slurm starts a requeued job after 10 s")
def test_a_requeued_job_runs_again_and_leaves_nothing(job):
    number = run("sbatch --parsable --open-mode=append --output=out job.sbatch waits.py", job).stdout.strip()
    for started in range(1, pace.rounds + 1):
        assert pace.again_like(lambda: (job / "out").read_text().count("[0, 1]\n"), started) == started
        last = started == pace.rounds
        run(f"scancel {number}" if last else f"scontrol requeue {number}", job)
        assert pace.again_like(left, []) == []


def test_outside_of_a_job_and_in_several_tasks_it_says_what_to_do(job):
    done = run(f"{RUN} true", job)
    assert done.returncode == 64
    assert "salloc --nodes=2 rlinf-actors run --slurm -- python train.py" in done.stderr
    done = run(f"srun --nodes=2 {RUN} true", job)
    assert done.returncode == 64
    assert "srun has started 2: use srun --nodes=1 --ntasks=1" in done.stderr
