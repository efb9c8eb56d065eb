"""Starts of private clusters: at once, interrupted, given up, again after a death, and asked for twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import live_workers as lw
import pace
import pytest

from rlinf_actors import Cluster, ConfigError, RlinfActorsError, UsageError, Worker
from rlinf_actors.cluster import local_daemon
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


class Sized(Worker):
    """Asks for its cluster by size."""

    def sizes(self, right: int, wrong: int) -> tuple[bool, int, str]:
        automatic = Cluster()
        again = Cluster(num_nodes=right, namespace=automatic.namespace)
        try:
            Cluster(num_nodes=wrong)
        except ConfigError as error:
            return again is automatic, again.num_nodes, error.path
        return again is automatic, again.num_nodes, ""


class TestAtOnce:
    async def test_two_tasks_get_one_cluster(self, rlinf_leak_check):
        first, second = await asyncio.gather(Cluster.connect(num_nodes=1), Cluster.connect())
        assert first is second
        await first.shutdown_async()

    async def test_task_and_blocking_call_in_its_loop_get_one_cluster(self, rlinf_leak_check):
        connecting = asyncio.ensure_future(Cluster.connect()._connect())
        await asyncio.sleep(0)
        blocked = Cluster(num_nodes=1)
        assert await connecting is blocked
        await blocked.shutdown_async()

    def test_threads_and_loops_get_one_cluster(self, rlinf_leak_check):
        found = []

        async def connect():
            return await Cluster.connect()

        threads = [threading.Thread(target=lambda: found.append(Cluster())) for _ in range(2)]
        threads += [threading.Thread(target=lambda: found.append(asyncio.run(connect()))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(map(id, found))) == 1
        found[0].shutdown()

    async def test_second_caller_starts_a_cluster_after_the_first_failed(self, rlinf_leak_check, monkeypatch):
        real, failed = local_daemon.start_agentd, []

        def spawn(arguments, run_dir, tell, env):
            if not failed:
                failed.append(run_dir)
                raise OSError("no process left")
            return real(arguments, run_dir, tell, env)

        monkeypatch.setattr(local_daemon, "start_agentd", spawn)
        first, second = await asyncio.gather(Cluster.connect(), Cluster.connect(), return_exceptions=True)
        assert isinstance(first, OSError)
        assert second is Cluster()
        await second.shutdown_async()


class TestGivenUp:
    async def test_a_cancelled_connect_leaves_nothing(self, rlinf_leak_check, monkeypatch):
        spawned, real = threading.Event(), local_daemon.start_agentd

        def spawn(arguments, run_dir, tell, env):
            spawned.set()
            return real(arguments, run_dir, tell, env)

        monkeypatch.setattr(local_daemon, "start_agentd", spawn)
        connecting = asyncio.ensure_future(Cluster.connect()._connect())
        await asyncio.to_thread(spawned.wait, pace.PATIENCE_S)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
        assert not Cluster.has_initialized()

    async def test_connect_cancelled_before_its_runtime_exists_leaves_nothing(self, rlinf_leak_check):
        connecting = asyncio.ensure_future(Cluster.connect()._connect())
        await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
        assert not Cluster.has_initialized()

    @pytest.mark.parametrize("boot", ["sleeping", "agentd"])
    def test_ctrl_c_during_a_start_ends_the_daemon(self, rlinf_leak_check, tmp_path, boot):
        """The daemon gets SIGTERM at once; it is not waited out and killed."""
        source = f"""
            import os, signal, subprocess, sys
            from rlinf_actors import Cluster
            from rlinf_actors.cluster import local_daemon as bootstrap
            if {boot == "sleeping"}:
                bootstrap._BOOT = "import os, signal; os.kill(os.getppid(), signal.SIGINT); signal.pause()"
            else:
                bootstrap._BOOT = "import os, signal; os.kill(os.getppid(), signal.SIGINT); " + bootstrap._BOOT
            seen, wait = [], subprocess.Popen.wait
            def waited(self, timeout=None):
                seen.append(wait(self, timeout))
                return seen[-1]
            subprocess.Popen.wait = waited
            try:
                Cluster(num_nodes=1)
            except KeyboardInterrupt:
                print(seen, os.listdir(os.environ["RLINF_ACTORS_RUN_DIR"]), Cluster.has_initialized())
        """
        (tmp_path / "run").mkdir()
        done = lw.run_script(tmp_path, lw.dedent(source), RLINF_ACTORS_RUN_DIR=str(tmp_path / "run"))
        assert done.stdout.strip() in (f"[{-signal.SIGTERM}] [] False", "[0] [] False"), done.stderr


class TestDeath:
    def test_new_cluster_can_start_after_a_dead_one_is_shut_down(self, rlinf_leak_check):
        cluster = Cluster()
        group = lw.Greeter.create_group().launch(cluster)
        group.wait_ready()
        blocked = group.block()
        os.kill(cluster._daemon._process.pid, signal.SIGKILL)
        with pytest.raises(RlinfActorsError, match=r"call shutdown\(\) on this Cluster and make a new one"):
            blocked.wait()
        with pytest.raises(UsageError, match=r"is gone: its daemon.*ended with -9; call shutdown\(\)"):
            Cluster()
        cluster.shutdown()
        with Cluster() as fresh:
            assert fresh is not cluster
            assert lw.Greeter.create_group().launch(fresh).greet().wait() == ["hello you from 0"]

    def test_death_of_the_daemon_during_its_start_is_an_error(self, rlinf_leak_check, monkeypatch):
        monkeypatch.setattr(local_daemon, "start_agentd", _says_ready_and_ends)
        with pytest.raises(RlinfActorsError, match=r"ended while the Cluster started: its daemon.*ended with 3"):
            Cluster()
        assert not Cluster.has_initialized()


def _says_ready_and_ends(arguments, run_dir, tell, env):
    source = 'import os, sys; os.write(int(sys.argv[1]), b\'{"head": "ipc:///run/nowhere"}\\n\'); sys.exit(3)'
    return subprocess.Popen([sys.executable, "-c", source, str(tell)], pass_fds=(tell,))


class TestAskedTwice:
    def test_arguments_of_the_same_effect_give_the_same_cluster(self, rlinf_leak_check, tmp_path):
        with Cluster(distributed_log_dir=tmp_path) as cluster:
            assert Cluster(num_nodes=1) is cluster
            assert Cluster(distributed_log_dir=str(tmp_path)) is cluster
            assert Cluster(head=cluster._endpoint, namespace=cluster.namespace) is cluster
            with pytest.raises(ConfigError, match="num_nodes=2 was asked for"):
                Cluster(num_nodes=2)
            with pytest.raises(ConfigError, match="namespace='other' was asked for"):
                Cluster(namespace="other")

    def test_worker_can_give_the_size_of_its_cluster(self, rlinf_leak_check):
        with LocalCluster(2) as local:
            cluster = local.cluster()
            assert lw.many(cluster, Sized, 1).sizes(2, 3).wait() == [(True, 2, "num_nodes")]


class TestAttached:
    def test_attached_handle_has_all_facts_of_the_group(self, rlinf_leak_check, tmp_path):
        with LocalCluster(2, {"accelerators": 2, "model": "A800"}) as local:
            cluster = local.cluster()
            group = lw.Greeter.create_group().launch(cluster, name="whole")
            group.wait_ready()
            source = f"""
                import sys
                sys.path.insert(0, {str(Path(__file__).parent)!r})
                import live_workers as lw
                from rlinf_actors import Cluster, WorkerGroup
                with Cluster(num_nodes=2, head={local.head!r}, namespace={cluster.namespace!r}) as cluster:
                    group = WorkerGroup.from_group_name(lw.Greeter, "whole")
                    print([(p.rank, p.cluster_node_rank, p.visible_accelerators) for p in group.placements])
                    print([(str(e.info.accelerator_type), e.info.accelerator_model) for e in group.worker_info_list])
                    try:
                        group.execute_on(3).bad(3).wait()
                    except ValueError as error:
                        print(error)
            """
            done = lw.run_script(tmp_path, lw.dedent(source), **local.driver_env)
            placements, infos, *error = done.stdout.splitlines()
            assert placements == "[(0, 0, ['0']), (1, 0, ['1']), (2, 1, ['0']), (3, 1, ['1'])]", done.stderr
            assert infos == str([("NV_GPU", "A800")] * 4)
            assert f"whole:3 on {cluster.node_name(1)} raised ValueError" in error[0]
            assert [entry.info.accelerator_model for entry in group.worker_info_list] == ["A800"] * 4
