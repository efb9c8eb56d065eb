"""Workers under a profiler: the command, the worker's own pid, its output and its death, and the report at the end."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from profile_workers import Profiled
from resize_workers import Elastic

from rlinf_actors import NodePlacementStrategy, WorkerDiedError, WorkerGroup, WorkerStartError, procfs
from rlinf_actors.testing import LocalCluster
from tests import pace

pytestmark = pytest.mark.live

FAKE = Path(__file__).with_name("fake_nsys.py")
Launch = Callable[..., Any]


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "nsys"
    path.parent.mkdir()
    path.symlink_to(FAKE)
    return path


@contextlib.contextmanager
def cluster(nsys: Path, output: Path, grace_s: float = 30.0, **section: Any) -> Iterator[Any]:
    options = {"workers": {"profilers": [str(nsys)], "profile_grace_s": grace_s}}
    profiling = {"backend": "nsight", "worker_groups": ["profiled"], "output_dir": str(output), **section}
    with LocalCluster(1, options=options) as local:
        yield local.cluster(cluster_cfg={"num_nodes": 1, "profiling": profiling})


def launch(cluster: Any, name: str = "profiled", count: int = 1, **options: Any) -> WorkerGroup[Profiled]:
    return Profiled.create_group().launch(cluster, NodePlacementStrategy([0] * count), name=name, **options)


def report(output: Path, name: str = "profiled-0") -> dict[str, int]:
    found: dict[str, int] = json.loads((output / f"{name}.profile.nsys-rep").read_text())
    return found


def pid_at_head(cluster: Any, group: WorkerGroup[Profiled]) -> int:
    (state,) = cluster.runtime.io.submit(cluster.runtime.status(cluster.namespace)).result().groups
    return int(state.workers[0].pid)


def test_worker_under_a_profiler_is_itself_and_the_report_is_written(nsys: Path, tmp_path: Path, capfd: Any) -> None:
    output = tmp_path / "profiles"
    with cluster(nsys, output, options={"t": "cuda,nvtx"}, flags=["x-flag"]) as job:
        group = launch(job, count=2)
        (pid, parent), _ = group.pids().wait()
        words = json.loads((output / "profiled-0.profile.arguments").read_text())
        assert words[:6] == ["profile", "--x-flag", "-t", "cuda,nvtx", "-o", str(output / "profiled-0.profile")]
        assert parent != pid
        assert pid_at_head(job, group) == pid
        stat = procfs.stat(pid)
        assert stat is not None
        assert procfs.mark_of(parent) == procfs.mark_of(pid)
        group.shutdown()
        assert report(output)["pid"] == pid
        assert {path.name for path in output.glob("*.nsys-rep")} == {
            "profiled-0.profile.nsys-rep", "profiled-1.profile.nsys-rep",
        }  # fmt: skip
        assert procfs.stat(parent) is None
        other = launch(job, "not_profiled")
        assert other.pids().wait()
        assert len(list(output.glob("*.arguments"))) == 2
    out = capfd.readouterr()
    assert "said to stdout" in out.out + out.err
    assert "said to stderr" in out.out + out.err


def test_death_of_the_worker_reaches_the_caller_with_its_signal_or_code(nsys: Path, tmp_path: Path) -> None:
    with cluster(nsys, tmp_path) as job:
        group = launch(job)
        with pytest.raises(WorkerDiedError) as died:
            group.die().wait()
        assert died.value.signal == 9
        assert report(tmp_path)["code"] == -9
        group.shutdown()
        again = launch(job)
        with pytest.raises(WorkerDiedError) as left:
            again.leave(7).wait()
        assert left.value.exit_code == 7


def test_profiler_that_dies_takes_its_worker_with_it(nsys: Path, tmp_path: Path) -> None:
    with cluster(nsys, tmp_path) as job:
        group = launch(job)
        ((pid, parent),) = group.pids().wait()
        waiting = group.never()
        worker = os.pidfd_open(pid)
        os.kill(parent, 9)
        with pytest.raises(WorkerDiedError):
            waiting.wait()
        group.shutdown()
        assert procfs.has_ended(worker)  # the template may not have reaped it yet
        os.close(worker)


def test_profiler_that_hangs_is_killed_after_its_grace(nsys: Path, tmp_path: Path) -> None:
    with cluster(nsys, tmp_path, grace_s=0.5) as job:
        group = launch(job, env_vars={"FAKE_NSYS": "hang"})
        ((pid, parent),) = group.pids().wait()
        processes = [os.pidfd_open(pid), os.pidfd_open(parent)]
        began = time.monotonic()
        group.shutdown()
        assert time.monotonic() - began < pace.PATIENCE_S
        for process in processes:
            assert procfs.has_ended(process)  # the template may not have reaped it yet
            os.close(process)
        assert not list(tmp_path.glob("*.nsys-rep"))


def test_profiler_that_cannot_be_started_costs_no_other_worker(nsys: Path, tmp_path: Path) -> None:
    nsys.unlink()
    nsys.write_text("neither a program nor a script")
    nsys.chmod(0o755)
    with cluster(nsys, tmp_path) as job:
        other = launch(job, "other")
        for _ in range(2):
            group = launch(job, count=2)
            with pytest.raises(WorkerStartError, match=r"node0 cannot start .*nsys: Exec format error"):
                group.pids().wait()
            group.shutdown()
        assert other.pids().wait()


def test_program_that_is_not_allowed_is_refused_with_file_and_key(nsys: Path, tmp_path: Path) -> None:
    with cluster(nsys, tmp_path, backend="rocprof_sys") as job:
        group = launch(job)
        with pytest.raises(WorkerStartError, match=r"rocprof-sys-python.*workers\.profilers in agentd\.toml"):
            group.pids().wait()


def test_torch_profile_has_a_file_for_each_rank_and_step(nsys: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with cluster(nsys, tmp_path, backend="torch", steps=[2], ranks=[1]) as job:
        group = launch(job, count=2, preload=["torch"])  # once, not in each worker
        for step in (1, 2):
            assert group.compute(step).wait() == [10, 10]
        group.shutdown()
    (found,) = tmp_path.glob("*.profile.json")
    assert found.name == "profiled-1-step2.profile.json"
    assert json.loads(found.read_text())["traceEvents"]


def test_added_ranks_have_the_network_and_the_profiler_of_the_configuration(nsys: Path, tmp_path: Path) -> None:
    options = {"workers": {"profilers": [str(nsys)]}}
    profiling = {"backend": "nsight", "worker_groups": ["elastic"], "output_dir": str(tmp_path)}
    pairs = [{"src": ["elastic"], "dst": ["b"], "delay_ms": 1}]
    cfg = {"num_nodes": 1, "profiling": profiling, "net_emulation": {"enabled": True, "crossdc_pairs": pairs}}
    with LocalCluster(1, options=options) as local:
        group = Elastic.create_group().launch(local.cluster(cluster_cfg=cfg), NodePlacementStrategy([0]), "elastic")
        group.add_ranks(NodePlacementStrategy([0]))
        first, added = group.variable("RLINF_ACTORS_NET_EMULATION").wait()
        assert first == added != ""
        assert len(set(group.parent().wait())) == 2, "each worker has a profiler of its own"
