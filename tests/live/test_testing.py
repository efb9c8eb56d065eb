"""LocalCluster and the pytest plugin, as users have them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import live_workers as lw
import pace
import pytest

from rlinf_actors import ClusterTimeoutError, ConfigError, NodeLostError, RlinfActorsError, variables
from rlinf_actors.net.head_records import find_records
from rlinf_actors.settings import KEY_DIR, Settings
from rlinf_actors.testing import LocalCluster, leaks
from rlinf_actors.testing.local_cluster import per_node

pytestmark = pytest.mark.live

PLUGIN = ["-p", "pytest_asyncio.plugin", "-p", "rlinf_actors.testing.pytest_plugin", "-p", "no:cacheprovider", "-q"]


def test_local_cluster_ignores_the_users_keys(local_cluster, tmp_path, monkeypatch):
    """They may be of a real cluster, or unusable."""
    folder = tmp_path / "rlinf-actors" / "keys"
    folder.mkdir(mode=0o755, parents=True)
    for role in ("head", "agent", "driver", "local"):
        (folder / f"{role}.key").write_text("no key\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert local_cluster(2).cluster().num_nodes == 2
    assert {path.read_text() for path in folder.iterdir()} == {"no key\n"}


def test_cluster_sees_the_described_hardware(local_cluster):
    local = local_cluster(
        2,
        [
            {"accelerators": 2, "model": "A800", "memory_bytes": 80 << 30, "cpus": 64},
            {"robots": [{"type": "Franka", "robot_ip": "10.0.0.1"}], "env": {"SIDE": "left"}, "labels": {"room": "a"}},
        ],
    )
    cluster = local.cluster()
    assert cluster.num_nodes == 2
    assert cluster.accelerator_ranks == [[0, 1], []]
    first, second = cluster.get_node_info(0), cluster.get_node_info(1)
    assert (first.accelerator_model, first.num_cpus, first.node_ip) == ("A800", 64, "127.0.0.1")
    assert first.hardware_resources[0].infos[1].memory_bytes == 80 << 30
    assert second.get_hw_resource_count("Franka") == 1
    assert second.env_vars["SIDE"] == "left"
    assert second.node_ip == "127.0.0.2"


def test_workers_run_on_described_accelerators(local_cluster):
    local = local_cluster(2, {"accelerators": 2, "model": "A800"})
    group = lw.Greeter.create_group().launch(local.cluster())
    environs = group.environ().wait()
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environs] == ["0", "1", "0", "1"]
    assert [env["CLUSTER_NODE_RANK"] for env in environs] == ["0", "0", "1", "1"]
    assert {env["ACCELERATOR_MODEL"] for env in environs} == {"A800"}
    assert {env["MASTER_ADDR"] for env in environs} == {"127.0.0.1"}
    assert {(env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) for env in environs} == {("0", "1")}
    seen = lw.Greeter.create_group().launch(local.cluster(), name="all", isolate_gpu=False).environ().wait()
    assert [env["LOCAL_RANK"] for env in seen] == ["0", "1", "0", "1"]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in seen} == {"0,1"}


async def test_local_cluster_works_in_asyncio(rlinf_leak_check):
    async with LocalCluster(2) as local, local.connect() as cluster:
        group = await lw.on_every_node(cluster, lw.Where)
        assert [node for node, _ in await group.where()] == [0, 1]


def test_kill_of_a_node_whose_agentd_has_ended_is_an_error(local_cluster):
    local = local_cluster(2, options=pace.timers(beat_s=0.2, lease_s=3))
    local.kill_agent(1)
    with pytest.raises(RlinfActorsError, match=r"(?s)restart_agent\(1\).*node node-1 is registered"):
        local.cluster()
    assert local.cluster(num_nodes=1).num_nodes == 1


def test_killed_node_leaves_no_process(local_cluster):
    local = local_cluster(2, options=pace.timers(beat_s=0.2, lease_s=3))
    group = lw.on_every_node(local.cluster(), lw.Where)
    (_, here), (_, there) = group.where().wait()
    child = group.execute_on(1).leave_child().wait()[0]
    waiting = group.execute_on(1).block()
    local.kill_node(1)
    assert not local.nodes[1].alive
    for pid in (there, child):
        assert not lw.running(pid)
    with pytest.raises(NodeLostError, match="node1"):
        waiting.wait()
    assert group.execute_on(0).where().wait() == [(0, here)]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_agentd_can_be_restarted(local_cluster, rank):
    local = local_cluster(2)
    cluster = local.cluster()
    address, before = local.head, local.nodes[rank].pid
    with pytest.raises(RlinfActorsError, match="runs"):
        local.restart_agent(rank)
    local.kill_agent(rank)
    assert not local.nodes[rank].alive
    local.restart_agent(rank)
    assert (local.head, local.nodes[rank].alive) == (address, True)
    assert local.nodes[rank].pid != before
    if rank:
        assert [node for node, _ in lw.on_every_node(cluster, lw.Where).where().wait()] == [0, 1]


def test_heads_port_stays_reserved_while_the_head_is_away(local_cluster):
    local = local_cluster(1)
    host, port = local.head.split(":")
    local.kill_agent(0)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((host, int(port)))
    local.restart_agent(0)


def test_bad_descriptions_are_named():
    with pytest.raises(ConfigError, match="unknown key 'gpus'; did you mean 'cpus'"):
        per_node({"gpus": 3}, 1)
    with pytest.raises(ConfigError, match=r"hardware\[1\].type: is 'TPU'"):
        per_node([None, {"accelerators": 1, "type": "TPU"}], 2)
    with pytest.raises(ConfigError, match="describes 1 node; the cluster has 2"):
        per_node([None], 2)
    with pytest.raises(ConfigError, match="at least one node"):
        LocalCluster(0)


def test_a_node_that_cannot_start_says_why(rlinf_leak_check):
    with pytest.raises(RlinfActorsError, match=r"timers\.beats: unknown key 'beats'; did you mean 'beat_s'\?"):
        LocalCluster(1, options={"timers": {"beats": 1}}).start()


def test_start_that_takes_too_long_leaves_nothing(rlinf_leak_check):
    with pytest.raises(ClusterTimeoutError) as caught:
        LocalCluster(1, timeout=0.0).start()
    assert caught.value.missing_ranks == (0,)


def test_local_cluster_ends_with_its_process(rlinf_leak_check):
    """kill -9 of the owner: the leak check waits for the rest to go."""
    code = textwrap.dedent(
        """
        import sys, os
        from rlinf_actors.testing import LocalCluster
        local = LocalCluster(2).start()
        print(local.nodes[1].pid, flush=True)
        sys.stdin.read()
        """
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        agent = os.pidfd_open(int(owner.stdout.readline()))
        owner.send_signal(signal.SIGKILL)
    lw.wait_for_end(agent)


@pytest.fixture
def lab(tmp_path) -> Iterator[str]:
    """The address of a user's own head, which the client file names, and whose record is where this user's are."""
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "head", "--listen", "127.0.0.1:0"]
    env = {**lw.SCRIPT_ENV, KEY_DIR: str(tmp_path / "lab-keys")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as head:
        assert head.stdout is not None
        yield head.stdout.readline().strip()
        head.terminate()


def stops(**env: str) -> list[str]:
    """Press the emergency stop; return the heads that it reached."""
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "estop", "--json"]
    done = subprocess.run(command, env={**lw.SCRIPT_ENV, **env}, capture_output=True, text=True, check=True)
    return [cluster["head"] for cluster in json.loads(done.stdout)["clusters"]]


class TestEmergencyStop:
    """A stop in a test reaches the heads of the test alone, and a stop of the user all of them."""

    def test_stop_in_the_environment_of_a_local_cluster_reaches_this_one_alone(self, local_cluster, lab):
        local = local_cluster(2)
        assert stops(**local.driver_env) == [local.head]

    def test_user_finds_the_clusters_of_tests(self, rlinf_cluster, local_cluster):
        """Looked for only: a stop there would be one of the heads of whoever runs these tests."""
        local_cluster(1)
        endpoints = [path for one in find_records(Settings.load({})).records for path in one.endpoints]
        assert sum(path.startswith(f"ipc://{os.environ[variables.RUN_DIR]}/") for path in endpoints) == 2

    def test_stop_in_a_test_with_a_fixture_reaches_no_head_of_the_user(self, lab, tmp_path):
        (tmp_path / "client.toml").write_text(f'head = "{lab}"\n')
        done = TestPlugin().run(
            tmp_path,
            """
            import json, os, subprocess, sys
            import pytest

            def stopped():
                command = [sys.executable, "-m", "rlinf_actors.cli.main", "estop", "--json"]
                done = subprocess.run(command, capture_output=True, text=True)
                return [(one["kind"], one["pid"]) for one in json.loads(done.stdout)["clusters"]]

            def test_private(rlinf_cluster):
                assert stopped() == [("private", os.getpid())]

            @pytest.mark.asyncio
            async def test_private_async(rlinf_cluster_async):
                assert stopped() == [("private", os.getpid())]

            def test_several_nodes(local_cluster):
                local = local_cluster(1)
                assert stopped() == [("private", local.nodes[0].pid)]
            """,
            RLINF_ACTORS_CLIENT_CONFIG=str(tmp_path / "client.toml"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert stops() == [lab]


class TestPlugin:
    """Each case is a small test file of a user's, run by a pytest of its own."""

    def run(self, tmp_path, source, *arguments, **more):
        path = tmp_path / "test_mine.py"
        path.write_text(textwrap.dedent(source))
        command = [sys.executable, "-m", "pytest", *PLUGIN, *arguments, str(path), "--rootdir", str(tmp_path)]
        ours = {name: value for name, value in lw.SCRIPT_ENV.items() if name != "FORCE_COLOR"}
        # installed or not, the plugin is loaded once; what is printed is the same whatever this pytest was given
        env = {**ours, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PY_COLORS": "0", "PYTEST_ADDOPTS": "", **more}
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)

    def test_a_failed_test_shows_the_logs_of_its_nodes(self, tmp_path):
        done = self.run(
            tmp_path,
            """
            import pytest
            from rlinf_actors.testing import LocalCluster

            @pytest.fixture(scope="module")
            def shared():
                with LocalCluster(1) as local:
                    yield local

            def test_before(shared):
                with LocalCluster(1) as local:
                    pass

            def test_failed(shared):
                with LocalCluster(2) as local:
                    shared.kill_node(0)
                    assert False, local.nodes[1].run_dir

            def test_unreadable(shared, monkeypatch):
                monkeypatch.setattr("pathlib.Path.read_text", None)
                assert False

            def test_after():
                pass
            """,
        )
        assert done.returncode == 1
        assert "2 failed, 2 passed" in done.stdout, done.stdout
        assert sorted(re.findall("log of node (.) in", done.stdout)) == ["0", "0", "0", "1"]
        assert done.stdout.count("it cannot be read: TypeError") == 1
        assert "node node-1 is registered" in done.stdout

    def test_fixtures_work_in_plain_and_async_tests(self, tmp_path):
        done = self.run(
            tmp_path,
            """
            import pytest
            from rlinf_actors import Cluster, Worker

            class Adder(Worker):
                def add(self, x):
                    return x + self._rank

            def test_plain(rlinf_cluster):
                assert Adder.create_group().launch(rlinf_cluster).add(1).wait() == [1]

            @pytest.mark.asyncio
            async def test_async(rlinf_cluster_async):
                group = await Adder.create_group().launch(rlinf_cluster_async)
                assert await group.add(2) == [2]

            @pytest.mark.asyncio
            async def test_async_with_the_plain_one(rlinf_cluster):
                assert await Adder.create_group().launch(rlinf_cluster).add(3) == [3]

            def test_nodes(local_cluster):
                local = local_cluster(2, {"accelerators": 1})
                assert Adder.create_group().launch(local.cluster()).add(1).wait() == [1, 2]

            def test_nothing_remains():
                assert not Cluster.has_initialized()
            """,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    LEAKS = {
        "process": ("subprocess.Popen(['setsid', 'sleep', '1000'])", "process"),
        "thread": (
            "threading.Thread(target=threading.Event().wait, name='mine', daemon=True).start()", "thread 'mine'"
        ),
        "fd": ("os.open('/dev/null', os.O_RDONLY)", "file descriptor"),
        "shm": ("open(leaks.SHM + '/leaked', 'w').close()", "shared memory: leaked"),
        "file": ("open(os.environ['RLINF_ACTORS_RUN_DIR'] + '/left', 'w').close()", "files in run directories: left"),
    }  # fmt: skip

    def test_leaks_fail_their_tests_and_no_other(self, tmp_path):
        source = f"""
            import os, subprocess, threading
            import rlinf_actors.testing.leaks as leaks
            leaks.GRACE_S = 0.2
            leaks.SHM = {str(tmp_path)!r}  # other programs of this machine see what is in the real one
        """
        test = """
            def test_{}(rlinf_leak_check):
                keep = {}

            def test_after_{}(rlinf_leak_check):
                pass
        """
        source += "".join(test.format(name, leak, name) for name, (leak, _) in self.LEAKS.items())
        done = self.run(tmp_path, source)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "10 passed, 5 errors" in done.stdout
        for name, (_, said) in self.LEAKS.items():
            _, _, report = done.stdout.partition(f" ERROR at teardown of test_{name} ")
            assert re.match(f"(?s)[^\n]*\nthe test left behind:\n  [^\n]*{said}", report), done.stdout

    def test_semaphore_of_another_program_is_no_leak(self):
        code = "import multiprocessing as m; it = m.get_context('spawn').Lock(); print(flush=True); input()"
        command = ["setsid", "--fork", sys.executable, "-c", code]  # nobody's child
        before = leaks._shm()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            other.wait()  # setsid itself, the program's parent
            new = leaks._shm() - before
            assert new
            assert [name for name in new if not leaks._used_by_others(name)] == []
            other.communicate(b"\n")  # until it has ended

    def test_memory_that_another_program_has_opened_is_no_leak(self, tmp_path, monkeypatch):
        monkeypatch.setattr(leaks, "SHM", str(tmp_path))
        code = f"it = open({str(tmp_path / 'made')!r}, 'w'); print(flush=True); input(); it.close()"
        command = ["setsid", "--fork", sys.executable, "-c", code]  # nobody's child
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            other.wait()  # setsid itself, the program's parent
            assert leaks._shm() == {"made"}
            assert leaks._used_by_others("made")
            other.communicate(b"\n")  # until it has ended
        assert not leaks._used_by_others("made")

    def test_plugin_imports_few_modules(self):
        code = (
            "import sys, pytest; before = set(sys.modules); import rlinf_actors.testing.pytest_plugin; "
            "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
            "print({'zmq', 'torch', 'msgspec', 'numpy', 'cloudpickle', 'uvloop'} & new)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "set()"
