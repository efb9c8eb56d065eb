"""An installation that is replaced under running workers, and a node whose version has another protocol."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pace
import pytest
import version_workers as vw

from rlinf_actors import Channel, NodePlacementStrategy, RlinfActorsError
from rlinf_actors.testing import LocalCluster, local_cluster
from rlinf_actors.wire.protocol import PROTOCOL

pytestmark = pytest.mark.live

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def nodes(lease_s=8.0):
    return LocalCluster(2, env={"PYTHONPATH": str(HERE)}, options=pace.timers(beat_s=0.1, lease_s=lease_s))


@pytest.fixture
def other(tmp_path):
    """A directory with today's code, but another protocol."""
    for package in ("rlinf_actors", "agentd"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "rlinf_actors/wire/protocol.py"
    path.write_text(re.sub(r"(?m)^(PROTOCOL|OLDEST) = \d+$", rf"\1 = {PROTOCOL + 2}", path.read_text()))
    return tmp_path


def start_agentd_of(directory):
    """Return a function in place of `local_cluster.start_agentd` that starts the agentd of *directory*."""

    def start(arguments, run_dir, tell, env):
        owner = ["--owner-pid", str(os.getpid())]
        command = [sys.executable, "-m", "agentd", *arguments, *owner, "--run-dir", run_dir, "--ready-fd", str(tell)]
        env = {**env, "PYTHONPATH": f"{directory}:{HERE}"}
        with open(f"{run_dir}/agentd.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(tell,), env=env, cwd=run_dir
            )

    return start


def test_running_workers_import_nothing_from_an_upgraded_installation(tmp_path):
    with nodes() as local, local.cluster() as cluster:
        two = NodePlacementStrategy([1, 1])
        busy = vw.Busy.create_group().launch(cluster, two, name="busy")
        counting = vw.Counting.create_group().launch(cluster, two, name="counting").wait_ready()
        assert busy.double(1).wait() == [2, 2]
        channel = Channel.create("items", node_rank=0)
        assert channel.empty()
        installed = Path(local.nodes[1].run_dir, "pkg", "rlinf_actors")  # the installation of its workers
        installed.unlink()
        installed.symlink_to(tmp_path)
        vw.use(busy, counting, channel)


def test_a_refused_agentd_ends_no_worker(monkeypatch, other):
    with nodes(lease_s=60.0) as local, local.cluster() as cluster:
        group = vw.Busy.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="kept")
        pids = group.pid().wait()
        local.nodes[1].process.send_signal(signal.SIGUSR1)
        local.nodes[1].process.wait(pace.PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr(local_cluster, "start_agentd", start_agentd_of(other))
            with pytest.raises(RlinfActorsError, match=rf"\(protocol {PROTOCOL + 2}\)"):
                local.restart_agent(1)
        # its unit would restart it with the version installed then
        assert local.nodes[1].process.wait(pace.PATIENCE_S) == 69
        assert group.double(1).wait() == [2, 2]
        local.restart_agent(1)
        assert group.pid().wait() == pids
        assert group.swap().wait() == [1, 0]
