"""Clusters that a test starts and ends itself: their life, starts that fail, heads out of reach."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import types
import venv

import live_workers as lw
import pytest

from rlinf_actors import (
    Cluster,
    ClusterTimeoutError,
    ConfigError,
    NodePlacementStrategy,
    RlinfActorsError,
    UsageError,
    Worker,
    WorkerStartError,
)
from rlinf_actors.runtime import switch_interval
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


class TestBothStyles:
    def test_cluster_works_in_blocking_code(self, rlinf_cluster):
        group = lw.Greeter.create_group("hi").launch(rlinf_cluster, name="greeters")
        assert group.greet("sync").wait() == ["hi sync from 0"]

    async def test_cluster_works_in_asyncio(self, rlinf_leak_check):
        async with Cluster.connect(num_nodes=1) as cluster:
            group = await lw.Greeter.create_group("hi").launch(cluster, name="greeters")
            assert await group.greet("async") == ["hi async from 0"]

    async def test_blocking_code_in_a_running_loop_works(self, rlinf_leak_check):
        """As in a notebook's cell: a loop runs, and the code in it blocks."""
        cluster = Cluster(num_nodes=1)
        group = lw.Greeter.create_group().launch(cluster)
        assert group.greet().wait() == ["hello you from 0"]
        assert await group.greet() == ["hello you from 0"]
        await group.shutdown()
        assert sys.getswitchinterval() < switch_interval.PYTHONS_S
        cluster.shutdown()
        assert sys.getswitchinterval() == pytest.approx(switch_interval.PYTHONS_S)

    def test_one_event_loop_per_call_works(self, rlinf_cluster):
        group = lw.Greeter.create_group().launch(rlinf_cluster)

        async def main():
            return await group.greet()

        assert asyncio.run(main()) == asyncio.run(main()) == ["hello you from 0"]


class TestLife:
    def test_new_cluster_can_start_after_a_shutdown(self, rlinf_leak_check):
        for _ in range(2):
            cluster = Cluster(num_nodes=1)
            run_dir = cluster._daemon.run_dir
            assert os.stat(run_dir).st_mode & 0o777 == 0o700
            cluster.shutdown()
            cluster.shutdown()
            assert not os.path.exists(run_dir)
            assert not Cluster.has_initialized()

    def test_several_nodes_without_a_head_are_an_error_with_advice(self, rlinf_leak_check, monkeypatch):
        monkeypatch.delenv("RLINF_HEAD", raising=False)
        with pytest.raises(ConfigError, match="agentd --head"):
            Cluster(num_nodes=2)
        assert not Cluster.has_initialized()

    def test_groups_end_with_the_cluster(self, rlinf_leak_check):
        with Cluster(num_nodes=1) as cluster:
            group = lw.many(cluster, lw.Where, 2)
            pids = [pid for _, pid in group.where().wait()]
            waiting = group.block()
        assert not [pid for pid in pids if lw.running(pid)]
        with pytest.raises(RlinfActorsError):
            waiting.wait()
        with pytest.raises(RlinfActorsError):
            group.where().wait()
        group.shutdown()

    @pytest.mark.parametrize("at", ["init", "call"])
    def test_ctrl_c_in_the_block_of_a_group_ends_the_group(self, rlinf_cluster, tmp_path, at):
        pipe, pids = tmp_path / "pipe", []
        os.mkfifo(pipe)

        def interrupt():
            pids.append(int(pipe.read_text()))
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt), lw.Stuck.create_group(str(pipe), at).launch(rlinf_cluster) as group:
            group.stand_still().wait()
        interrupting.join()
        assert not lw.running(*pids)
        assert rlinf_cluster.has_initialized()


@pytest.fixture(scope="class")
def pythons(tmp_path_factory):
    """Interpreters by the labels of their node groups."""
    folder = tmp_path_factory.mktemp("pythons")
    for name in ("bare", "own"):
        venv.create(folder / name, symlinks=True, with_pip=False)
    for found in (folder / "own/lib").glob("python*/site-packages"):
        (found / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    places = {"missing": "/opt/nowhere/python", "false": "/bin/false", "ours": sys.executable}
    return {**places, **{name: str(folder / name / "bin/python") for name in ("bare", "own")}}


@pytest.fixture(scope="class")
def mixed(module_leak_check, pythons):
    """A cluster whose only node is in a node group for each of them."""
    groups = [
        {"label": label, "node_ranks": 0, "env_configs": [{"node_ranks": 0, "python_interpreter_path": path}]}
        for label, path in pythons.items()
    ]
    with Cluster(cluster_cfg={"num_nodes": 1, "node_groups": groups}) as cluster:
        yield cluster


class TestStarts:
    def launch(self, cluster, label, cls=lw.Greeter):
        with cls.create_group().launch(cluster, NodePlacementStrategy([0], label), name=label) as group:
            group.wait_ready()
            return group.about().wait()[0]

    def test_launch_fails_if_the_interpreter_is_missing(self, mixed):
        with pytest.raises(WorkerStartError, match="interpreter /opt/nowhere/python does not exist there") as caught:
            self.launch(mixed, "missing")
        assert caught.value.worker == "missing:0"

    def test_launch_fails_if_the_interpreter_lacks_packages(self, mixed):
        with pytest.raises(WorkerStartError, match=r"has no pyzmq.*-m pip install pyzmq"):
            self.launch(mixed, "bare")

    def test_launch_fails_if_the_interpreter_is_no_python(self, mixed):
        with pytest.raises(WorkerStartError, match="/bin/false"):
            self.launch(mixed, "false")

    def test_launch_works_with_another_environment_of_the_same_python(self, mixed, pythons):
        assert self.launch(mixed, "own")["executable"] == pythons["own"]

    def test_launch_fails_if_the_workers_cannot_import_the_class(self, mixed, monkeypatch):
        module = types.ModuleType("only_here")
        cls = type("Lonely", (Worker,), {"__module__": "only_here", "about": lambda self: None})
        module.Lonely = cls
        monkeypatch.setitem(sys.modules, "only_here", module)
        with pytest.raises(WorkerStartError, match=r"only_here:Lonely cannot be imported by .*PYTHONPATH"):
            self.launch(mixed, "ours", cls)

    def test_launch_fails_if_the_workers_lack_the_module_of_an_argument(self, mixed, monkeypatch):
        module = types.ModuleType("only_here")
        module.Thing = type("Thing", (), {"__module__": "only_here"})
        monkeypatch.setitem(sys.modules, "only_here", module)
        here = NodePlacementStrategy([0], "ours")
        group = lw.Greeter.create_group(module.Thing()).launch(mixed, here, name="lacks")
        with pytest.raises(WorkerStartError, match=r"only_here.*Install it there"):
            group.wait_ready()
        with (
            lw.Greeter.create_group().launch(mixed, here, name="fine") as fine,
            pytest.raises(ModuleNotFoundError, match="only_here"),
        ):
            fine.echo(module.Thing()).wait()

    def test_missing_preload_module_does_not_fail_the_launch(self, mixed):
        here = NodePlacementStrategy([0], "ours")
        with lw.Greeter.create_group().launch(mixed, here, name="less", preload=["no_such_module"]) as group:
            assert group.greet().wait() == ["hello you from 0"]

    def test_workers_can_be_spawned_instead_of_forked(self, mixed):
        two = NodePlacementStrategy([0, 0], "ours")
        with lw.Greeter.create_group().launch(mixed, two, name="spawned", start_method="spawn") as group:
            assert group.greet().wait() == ["hello you from 0", "hello you from 1"]
            assert all(about["main"] for about in group.about().wait())
        with pytest.raises(UsageError, match="start_method"):
            lw.Greeter.create_group().launch(mixed, two, name="cloned", start_method="clone")


class TestReachingTheHead:
    @pytest.fixture
    def head(self):
        """An address on which no process listens, and none can."""
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{held.getsockname()[1]}"

    def test_connect_fails_if_no_head_listens(self, rlinf_leak_check, head):
        with pytest.raises(ClusterTimeoutError, match=f"the head at tcp://{head} did not answer"):
            Cluster(num_nodes=1, head=head, timeout=0.3)
        assert not Cluster.has_initialized()

    async def test_async_connect_fails_if_no_head_listens(self, rlinf_leak_check, head):
        with pytest.raises(TimeoutError, match="did not answer"):
            await Cluster.connect(num_nodes=1, head=head, timeout=0.3)
        assert not Cluster.has_initialized()

    def test_error_names_the_node_that_did_not_register(self, local_cluster, monkeypatch):
        local = local_cluster(2)
        nodes = Runtime.nodes
        # the time is for the head's answer, too: none is wasted, and no machine is too slow for that
        monkeypatch.setattr(Runtime, "nodes", lambda self, wanted, timeout: nodes(self, wanted, timeout / 100))
        with pytest.raises(ClusterTimeoutError, match=r"\b2\b") as caught:
            local.cluster(num_nodes=4, timeout=30)
        assert caught.value.missing_ranks == (2, 3)
        assert not Cluster.has_initialized()
        monkeypatch.undo()
        assert local.cluster(num_nodes=2).num_nodes == 2

    async def test_waiting_for_nodes_can_be_cancelled(self, rlinf_leak_check):
        async with LocalCluster(1) as local:
            with pytest.raises((asyncio.TimeoutError, TimeoutError)):
                await asyncio.wait_for(_connect(local), 0.3)
            assert not Cluster.has_initialized()
            async with local.connect() as cluster:
                assert cluster.num_nodes == 1

    def test_death_of_the_private_daemon_fails_the_cluster(self, rlinf_leak_check):
        cluster = Cluster(num_nodes=1)
        group = lw.Greeter.create_group().launch(cluster)
        group.wait_ready()
        blocked = group.block()
        os.kill(cluster._daemon._process.pid, signal.SIGKILL)
        with pytest.raises(RlinfActorsError, match="the cluster is gone"):
            blocked.wait()
        with pytest.raises(RlinfActorsError, match="the cluster is gone"):
            lw.Greeter.create_group().launch(cluster, name="late")
        cluster.shutdown()

    def test_an_agentd_that_cannot_start_shows_its_reason(self, rlinf_leak_check, monkeypatch, tmp_path):
        (tmp_path / "agentd.toml").write_text("[nod]\n")
        monkeypatch.setenv("RLINF_ACTORS_CONFIG", str(tmp_path / "agentd.toml"))
        with pytest.raises(RlinfActorsError, match=r"did not start: .*nod"):
            Cluster(num_nodes=1)
        assert not Cluster.has_initialized()


async def _connect(local):
    await local.connect(num_nodes=5)
