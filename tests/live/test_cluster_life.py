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
        cluster.shutdown()

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


class TestStarts:
    def launch(self, interpreter, cls=lw.Greeter, **options):
        config = {
            "num_nodes": 1,
            "node_groups": [
                {
                    "label": "here",
                    "node_ranks": 0,
                    "env_configs": [{"node_ranks": 0, "python_interpreter_path": str(interpreter)}],
                }
            ],
        }
        with Cluster(cluster_cfg=config) as cluster:
            group = cls.create_group().launch(cluster, NodePlacementStrategy([0], "here"), **options)
            group.wait_ready()
            return group.about().wait()[0]

    def test_launch_fails_if_the_interpreter_is_missing(self, rlinf_leak_check):
        with pytest.raises(WorkerStartError, match="interpreter /opt/nowhere/python does not exist there") as caught:
            self.launch("/opt/nowhere/python")
        assert caught.value.worker == "worker_group_Greeter:0"

    def test_launch_fails_if_the_interpreter_lacks_packages(self, rlinf_leak_check, tmp_path):
        venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
        with pytest.raises(WorkerStartError, match=r"has no pyzmq.*-m pip install pyzmq"):
            self.launch(tmp_path / "bare/bin/python")

    def test_launch_fails_if_the_interpreter_is_no_python(self, rlinf_leak_check):
        with pytest.raises(WorkerStartError, match="/bin/false"):
            self.launch("/bin/false")

    def test_launch_works_with_another_environment_of_the_same_python(self, rlinf_leak_check, tmp_path):
        venv.create(tmp_path / "own", symlinks=True, with_pip=False, system_site_packages=False)
        for found in (tmp_path / "own/lib").glob("python*/site-packages"):
            (found / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        about = self.launch(tmp_path / "own/bin/python")
        assert about["executable"] == str(tmp_path / "own/bin/python")

    def test_launch_fails_if_the_workers_cannot_import_the_class(self, rlinf_leak_check, monkeypatch):
        module = types.ModuleType("only_here")
        cls = type("Lonely", (Worker,), {"__module__": "only_here", "about": lambda self: None})
        module.Lonely = cls
        monkeypatch.setitem(sys.modules, "only_here", module)
        with pytest.raises(WorkerStartError, match=r"only_here:Lonely cannot be imported by .*PYTHONPATH"):
            self.launch(sys.executable, cls)

    def test_launch_fails_if_the_workers_lack_the_module_of_an_argument(self, rlinf_leak_check, monkeypatch):
        module = types.ModuleType("only_here")
        module.Thing = type("Thing", (), {"__module__": "only_here"})
        monkeypatch.setitem(sys.modules, "only_here", module)
        with Cluster(num_nodes=1) as cluster:
            group = lw.Greeter.create_group(module.Thing()).launch(cluster)
            with pytest.raises(WorkerStartError, match=r"only_here.*Install it there"):
                group.wait_ready()
            fine = lw.Greeter.create_group().launch(cluster, name="fine")
            with pytest.raises(ModuleNotFoundError, match="only_here"):
                fine.echo(module.Thing()).wait()

    def test_missing_preload_module_does_not_fail_the_launch(self, rlinf_leak_check):
        with Cluster(num_nodes=1) as cluster:
            group = lw.Greeter.create_group().launch(cluster, preload=["no_such_module"])
            assert group.greet().wait() == ["hello you from 0"]

    def test_workers_can_be_spawned_instead_of_forked(self, rlinf_leak_check):
        with Cluster(num_nodes=1) as cluster:
            group = lw.many(cluster, lw.Greeter, 2, start_method="spawn")
            assert group.greet().wait() == ["hello you from 0", "hello you from 1"]
            assert all(about["main"] for about in group.about().wait())
            with pytest.raises(UsageError, match="start_method"):
                lw.Greeter.create_group().launch(cluster, start_method="clone")


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
