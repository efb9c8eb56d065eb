"""Clusters of two versions: peers of the previous protocol are served, and a running cluster is upgraded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import compat_workers as cw
import pace
import previous
import pytest

from rlinf_actors import Channel, NodePlacementStrategy, ProtocolMismatchError, RlinfActorsError, UsageError
from rlinf_actors.testing import LocalCluster, local_cluster
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL

pytestmark = pytest.mark.live

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The interpreter of the previous version's environment."""
    return previous.install(tmp_path_factory.mktemp("previous"))


@pytest.fixture
def later(tmp_path):
    """The interpreter of an environment with a later version, which shares no protocol with today's."""
    return previous.install_later(tmp_path / "later")


@pytest.fixture
def versions(monkeypatch):
    """Interpreters of another version for LocalCluster's nodes, by rank; they apply to agentds started later."""
    pythons: dict[int, str] = {}

    def start(arguments, run_dir, tell, env):
        python = pythons.get(int(arguments[arguments.index("--node-rank") + 1]))
        if python is None:
            return start_new(arguments, run_dir, tell, env)
        owner = ["--owner-pid", str(os.getpid())]
        command = [python, "-m", "agentd", *arguments, *owner, "--run-dir", run_dir, "--ready-fd", str(tell)]
        with open(f"{run_dir}/agentd.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(tell,), env=env, cwd=run_dir
            )

    start_new = local_cluster.start_agentd
    monkeypatch.setattr(local_cluster, "start_agentd", start)
    return pythons


def nodes(lease_s=8.0):
    return LocalCluster(2, env={"PYTHONPATH": str(HERE)}, options=pace.timers(beat_s=0.1, lease_s=lease_s))


class Driver:
    """compat_workers.main as a process."""

    def __init__(self, python, local) -> None:
        self.process = subprocess.Popen(
            [python, HERE / "compat_workers.py", local.head, "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **local.driver_env, "PYTHONPATH": str(HERE)},
            cwd=HERE,
        )
        self.pids = self.heard()

    def heard(self):
        return self.process.stdout.readline().split()

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.heard()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        with self.process:
            self.process.stdin.close()
            assert self.process.wait(pace.PATIENCE_S) == 0


def upgrade(local, rank):
    """Hand over from the node's agentd of the previous version to one of this version."""
    local.nodes[rank].process.send_signal(signal.SIGUSR1)
    assert local.nodes[rank].process.wait(pace.PATIENCE_S) == 0
    local.restart_agent(rank)


def test_previous_version_uses_the_previous_protocol(old):
    command = [old, "-c", "from rlinf_actors.wire.protocol import PROTOCOL; print(PROTOCOL)"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert (said.stdout.strip(), OLDEST) == (str(OLDEST), PROTOCOL - 1), "previous.txt names another protocol"


def test_a_cluster_is_upgraded_head_first_while_a_driver_works(versions, old):
    versions |= {0: old, 1: old}
    with nodes() as local, Driver(old, local) as driver:
        assert driver.ask("call 21") == ["42", "42", *driver.pids, "1", "0"]
        del versions[0]
        local.kill_agent(0)  # the head, and the agentd of its node
        local.restart_agent(0)
        assert driver.ask("call 4") == ["8", "8", *driver.pids, "1", "0"]
        assert driver.ask("exercise after-head") == [str(PROTOCOL), str(OLDEST)]
        with local.cluster(namespace="new") as cluster:
            assert cw.exercise(cluster, "across", [0, 1]) == [PROTOCOL, OLDEST]
            del versions[1]
            upgrade(local, 1)
            assert driver.ask("call 5") == ["10", "10", *driver.pids, "1", "0"]
            assert driver.ask("exercise after-node") == [str(PROTOCOL), str(PROTOCOL)]
            assert cw.exercise(cluster, "upgraded", [0, 1]) == [PROTOCOL, PROTOCOL]


TENSORS = """
import pickle, sys, torch
from rlinf_actors.wire import payload

AuthenticatedParts = payload.AuthenticatedParts if hasattr(payload, "AuthenticatedParts") else payload.Vouched

kinds = (torch.float32, torch.bfloat16, torch.bool, torch.complex128)
made = [torch.arange(n).to(kind) for kind in kinds for n in (0, 3, 50_000)] + [torch.arange(6).reshape(2, 3).t()]
pickle.dump([bytes(part) for part in payload.encode({"nested": made})], open(sys.argv[1], "wb"))
print("written", flush=True)
sys.stdin.readline()
back = payload.decode(AuthenticatedParts(pickle.load(open(sys.argv[2], "rb"))))["nested"]
assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(made, back, strict=True))
back[0] = back[1].add_(1)
"""


@pytest.mark.torch
def test_tensors_cross_versions(old, tmp_path):
    pytest.importorskip("torch")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = ["-c", TENSORS]
    with (
        subprocess.Popen([sys.executable, *command, "of newer", "of older"], cwd=tmp_path, **pipes) as newer,
        subprocess.Popen([old, *command, "of older", "of newer"], cwd=tmp_path, **pipes) as older,
    ):
        assert [one.stdout.readline() for one in (newer, older)] == [b"written\n"] * 2
        for one in (newer, older):
            one.communicate(b"\n")
    assert (newer.returncode, older.returncode) == (0, 0)


def test_head_of_the_previous_protocol_accepts_newer_nodes_and_drivers(versions, old):
    versions[0] = old
    with nodes() as local, local.cluster() as cluster:
        assert cw.exercise(cluster, "above", [0, 1]) == [OLDEST, PROTOCOL]
        plainly = cw.CountingPlainly.create_group().launch(cluster, NodePlacementStrategy([0, 1]))
        assert list(plainly.execute_on(1).numbers(3)) == [(1, 0), (1, 1), (1, 2)]
        with pytest.raises(UsageError, match=r"is of an older version .* streams async generators only"):
            list(plainly.execute_on(0).numbers(3))
        channel = Channel.create("old", node_rank=0)
        channel.put("kept")
        with pytest.raises(ProtocolMismatchError, match=r"take\(\) needs protocol 7"):
            channel.take().__enter__()
        with pytest.raises(ProtocolMismatchError, match=r"undeliverable\(\) needs protocol 7"):
            channel.undeliverable(drain=True)
        assert "['kept']" in channel.describe()
        assert channel.get() == "kept"
        channel.close()


def test_running_workers_import_nothing_from_an_upgraded_installation(tmp_path):
    with nodes() as local, local.cluster() as cluster:
        two = NodePlacementStrategy([1, 1])
        mixed = cw.Mixed.create_group().launch(cluster, two, name="mixed")
        counting = cw.Counting.create_group().launch(cluster, two, name="counting").wait_ready()
        assert mixed.double(1).wait() == [2, 2]
        channel = Channel.create("items", node_rank=0)
        assert channel.empty()
        installed = Path(local.nodes[1].run_dir, "pkg", "rlinf_actors")  # the installation of its workers
        installed.unlink()
        installed.symlink_to(tmp_path)
        cw.use(mixed, counting, channel)


def test_a_refused_agentd_ends_no_worker(versions, later):
    with nodes(lease_s=60.0) as local, local.cluster() as cluster:
        group = cw.Mixed.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="kept")
        pids = group.pid().wait()
        local.nodes[1].process.send_signal(signal.SIGUSR1)
        local.nodes[1].process.wait(pace.PATIENCE_S)
        versions[1] = later
        with pytest.raises(RlinfActorsError, match="upgrade the head first"):
            local.restart_agent(1)
        assert (
            local.nodes[1].process.wait(pace.PATIENCE_S) == 69
        )  # its unit would restart it with the version installed then
        assert group.double(1).wait() == [2, 2]
        del versions[1]
        local.restart_agent(1)
        assert group.pid().wait() == pids
        assert group.swap().wait() == [1, 0]
