"""Whatever ends around a robot worker, on_lease_lost runs and stop is the arm's last command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import live_workers as lw
import pace
import pytest
import robot_kit as rk

from rlinf_actors import Cluster, ComponentPlacement, NodePlacementStrategy, RestartPolicy, procfs
from rlinf_actors.cli import app
from rlinf_actors.errors import HardwareInUseError, NodeLostError, RlinfActorsError, UsageError, WorkerDiedError
from rlinf_actors.settings import HEAD, HEADS_DIR
from rlinf_actors.worker.leasepage import NEVER

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def kept_arm(tmp_path_factory) -> Iterator[rk.Arm]:
    with rk.Arm(tmp_path_factory.mktemp("arm")) as made:
        yield made


@pytest.fixture
def arm(kept_arm) -> Iterator[rk.Arm]:
    """The module's arm. The test's connections end with the test, and the next test finds an empty record."""
    yield kept_arm
    kept_arm.forget()


@pytest.fixture
def slow_leases(tmp_path, monkeypatch) -> None:
    """A lease that outlives a machine that stands still for some seconds: here other things end workers."""
    (tmp_path / "agentd.toml").write_text(f"[timers]\nrobot_lease_s = {6 * pace.slowness}\n")
    monkeypatch.setenv("RLINF_ACTORS_CONFIG", str(tmp_path / "agentd.toml"))


@pytest.fixture
def cluster(running, arm, slow_leases) -> Iterator[Cluster]:
    """The module's cluster; the test's groups end with the test."""
    if not running:
        running.append(Cluster(cluster_cfg=rk.config(arm.address())["cluster"]))
    [shared] = running
    yield shared
    for group in shared.runtime.groups.all():
        if group.owned and not group.gone.done():
            shared.runtime.io.submit(shared.runtime.groups.stop(group, 0.0)).result(pace.PATIENCE_S)


@pytest.fixture
def own_cluster(no_cluster, arm, slow_leases) -> Iterator[Cluster]:
    """For a test that ends the cluster's daemons."""
    with Cluster(cluster_cfg=rk.config(arm.address())["cluster"]) as made:
        yield made


def launch(cluster, arm, cls, *args, **options):
    strategy = ComponentPlacement(rk.config(arm.address()), cluster).get_strategy("env")
    return cls.create_group(*args).launch(cluster, strategy, name="env", **options)


STREAMS = [
    (rk.Streamer, "moves", {}),
    (rk.Streamer, "moves_asleep", {}),
    (rk.Streamer, "moves_blocked", {}),
    (rk.Streamer, "moves_and_breaks", {}),
    (rk.Streamer, "moves", {"max_concurrency": 4}),
    (rk.Streamer, "streams_beside", {}),
    (rk.Streamer, "moves", {"start_method": "spawn"}),
    (rk.Async, "moves", {}),
    (rk.Async, "streams_beside", {}),
    (rk.Locked, "moves", {}),
    (rk.Hanging, "moves", {}),
    (rk.WithHelper, "moves", {}),
]


@pytest.mark.parametrize(("cls", "method", "options"), STREAMS)
def test_sigterm_to_a_worker_stops_its_arm(cluster, arm, cls, method, options):
    group = launch(cluster, arm, cls, **options)
    pid = group.pid().wait()[0]
    call = getattr(group, method)()
    arm.until_streaming()
    os.kill(pid, signal.SIGTERM)
    rk.stopped_last(arm.until_closed())
    if method != "streams_beside":
        with pytest.raises(WorkerDiedError, match="SIGTERM"):
            call.wait()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_an_arm_is_stopped_from_outside_whatever_ends_its_worker(cluster, arm, number, start_method):
    group = launch(cluster, arm, rk.StoppedOutside, start_method=start_method)
    pid = group.pid().wait()[0]
    group.moves()
    arm.until_streaming()
    os.kill(pid, number)
    commands = arm.until(lambda commands: any(one.text == "stop" for one in commands))
    stopping = next(one.connection for one in commands if one.text == "stop")
    assert next(one.text for one in commands if one.connection == stopping) == "hello outside"


def test_nothing_stops_an_arm_that_close_has_brought_to_rest(cluster, arm):
    class Rested(rk.StoppedOutside):
        def _close(self) -> None:
            self.arm.move(0)
            self.arm.close()

    group = launch(cluster, arm, Rested)
    group.pid().wait()
    group.shutdown()
    assert [one.text.split()[0] for one in arm.until_closed()] == ["hello", "move", "closed"]


def test_killed_template_stops_the_arm(cluster, arm):
    group = launch(cluster, arm, rk.Streamer)
    template = lw.template_of(group.pid().wait()[0])
    call = group.moves()
    arm.until_streaming()
    os.kill(template, signal.SIGKILL)
    rk.stopped_last(arm.until_closed())
    with pytest.raises(WorkerDiedError, match="template"):
        call.wait()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_arm_is_stopped_from_outside_before_the_end_beside_a_killed_template_is_reported(cluster, arm, start_method):
    group = launch(cluster, arm, rk.SlowlyStoppedOutside, start_method=start_method)
    template = lw.template_of(group.pid().wait()[0])
    call = group.moves_blocked()
    arm.until_streaming()
    os.kill(template, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="template"):
        call.wait()
    assert "stop" in [one.text for one in arm.commands()]


@pytest.mark.parametrize("cls", [rk.Streamer, rk.StoppedOutside])
def test_killed_watchdog_ends_the_worker(cluster, arm, cls):
    group = launch(cluster, arm, cls)
    watchdog = group.parent().wait()[0]
    call = group.moves()
    arm.until_streaming()
    os.kill(watchdog, signal.SIGKILL)
    arm.until_closed()
    with pytest.raises(WorkerDiedError, match=r"its watchdog ended \(signal 9\)") as caught:
        call.wait()
    assert "left behind" not in str(caught.value)
    assert cls is rk.Streamer or "stop" in [one.text for one in arm.commands()]


def test_restarted_worker_keeps_its_robot(cluster, arm):
    policy = RestartPolicy.on_failure(max_restarts=1, within_s=300, backoff_s=0.2, after_lease_lost=True)
    group = launch(cluster, arm, rk.Streamer, restart=policy)
    pid = group.pid().wait()[0]
    call = group.moves()
    arm.until_streaming()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        call.wait()
    strategy = ComponentPlacement(rk.config(arm.address()), cluster).get_strategy("env")
    other = group.pid()  # waits for the next worker, which nobody has taken the arm from
    with pytest.raises(HardwareInUseError, match="held by group 'env'"):
        rk.Streamer.create_group().launch(cluster, strategy, name="other")
    pid = other.wait()[0]
    before = len(arm.commands())
    call = group.moves()
    arm.until(lambda commands: len(commands) > before + 10)
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(WorkerDiedError, match=r"SIGTERM.*restarted 1 time within 300 s, and is not again"):
        call.wait()
    assert [one.text for one in arm.until(lambda commands: commands[-1].text == "closed")][-2] == "stop"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_worker_with_a_robot_is_not_started_again_by_itself(cluster, arm, number):
    group = launch(cluster, arm, rk.Streamer, restart=RestartPolicy.on_failure(backoff_s=0))
    pid = group.pid().wait()[0]
    call = group.moves()
    arm.until_streaming()
    os.kill(pid, number)
    said = rf"{number.name}.*lost its lease of SimulatedArm .* not started again by itself.*\(after_lease_lost=True\)"
    with pytest.raises(WorkerDiedError, match=said):
        call.wait()
    with pytest.raises(WorkerDiedError, match=said):
        group.pid().wait()
    group.shutdown()
    assert launch(cluster, arm, rk.Streamer).pid().wait() != [pid], "its robot is free"


def test_the_robot_is_safe_before_the_class_is_constructed(cluster, arm):
    group = launch(cluster, arm, rk.Constructing)
    pid = int(arm.until_streaming()[0].text.split()[-1])
    os.kill(pid, signal.SIGTERM)
    rk.stopped_last(arm.until_closed())
    with pytest.raises(WorkerDiedError, match="SIGTERM"):
        group.wait_ready()


def test_error_of_on_lease_lost_is_printed_after_the_reason(cluster, arm):
    group = launch(cluster, arm, rk.Raising)
    call = group.moves()
    arm.until_streaming()
    os.kill(int(arm.commands()[0].text.split()[-1]), signal.SIGTERM)
    rk.stopped_last(arm.until_closed())
    with pytest.raises(
        WorkerDiedError, match=r"code 76; the lease of SimulatedArm .* was lost: it was sent SIGTERM"
    ) as died:
        call.wait()
    assert "RuntimeError: the arm does not answer" in died.value.stderr_tail


class TestOrderlyEnds:
    def test_on_lease_lost_does_not_run_after_a_close_that_returned(self, cluster, arm):
        group = launch(cluster, arm, rk.Closing)
        group.wait_ready()
        group.shutdown()
        assert [one.text for one in arm.until_closed()][1:] == ["move 0.000000", "closed"]

    @pytest.mark.parametrize("cls", [rk.BadlyClosing, rk.Streamer])
    def test_on_lease_lost_runs_at_a_shutdown_without_a_close_that_returned(self, cluster, arm, cls):
        group = launch(cluster, arm, cls)
        group.wait_ready()
        group.shutdown()
        assert [one.text for one in arm.until_closed()][-2:] == ["stop", "closed"]

    def test_driver_that_ends_without_a_shutdown_stops_the_arm(self, no_cluster, arm):
        with Cluster(cluster_cfg=rk.config(arm.address())["cluster"]) as cluster:
            group = launch(cluster, arm, rk.Streamer)
            group.streams_beside().wait()
            arm.until_streaming()
        rk.stopped_last(arm.until_closed())


class TestTheHook:
    def test_a_worker_without_robots_has_no_lease(self, cluster, tmp_path):
        ran = tmp_path / "ran"
        group = rk.Plain.create_group(str(ran)).launch(cluster, NodePlacementStrategy([0]))
        pid = group.pid().wait()[0]
        assert group.lease().wait() == [(True, NEVER)]
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(WorkerDiedError, match="SIGTERM"):
            group.pid().wait()
        assert not ran.exists()

    def test_keep_for_stop_refuses_a_process_that_does_not_exist(self, cluster, arm):
        group = launch(cluster, arm, rk.Streamer)
        with pytest.raises(UsageError, match="env:0 cannot keep process 0 for its stop: there is no such process"):
            group.keep_for_stop(0).wait()

    def test_async_on_lease_lost_is_refused(self, cluster, arm):
        with pytest.raises(UsageError, match=r"AsyncHook.on_lease_lost is an async def: .* Make it a plain def"):
            launch(cluster, arm, rk.AsyncHook)

    def test_class_without_on_lease_lost_gets_a_warning(self, cluster, arm, caplog):
        launch(cluster, arm, rk.NoHook).wait_ready()
        (warning,) = [record.getMessage() for record in caplog.records if "on_lease_lost" in record.getMessage()]
        assert "NoHook has neither stop_hardware(hardware_infos) nor on_lease_lost(), " in warning
        assert f"SimulatedArm {arm.address()} would go on" in warning


DRIVER = """
    import json, sys
    import robot_kit as rk
    from rlinf_actors import Cluster, ComponentPlacement

    config = json.loads(sys.argv[1])
    cluster = Cluster(cluster_cfg=config["cluster"])
    group = rk.Streamer.create_group().launch(
        cluster, ComponentPlacement(config, cluster).get_strategy("env"), name="env")
    group.moves().wait()
"""


def drive(tmp_path, config, **env) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(lw.ROOT), os.path.dirname(__file__)])
    command = [sys.executable, lw.script(tmp_path, lw.dedent(DRIVER)), json.dumps(config)]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **env},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def test_killed_driver_stops_the_arm(arm, tmp_path):
    with drive(tmp_path, rk.config(arm.address())) as driver:
        arm.until_streaming()
        driver.kill()
        rk.stopped_last(arm.until_closed())


def test_killed_private_agentd_stops_the_arm(own_cluster, arm):
    group = launch(own_cluster, arm, rk.Streamer)
    call = group.moves()
    arm.until_streaming()
    worker = procfs.stat(int(arm.commands()[0].text.split()[-1]))
    agentd = lw.agentd_of(worker.pid)
    os.kill(agentd, signal.SIGKILL)
    rk.stopped_last(arm.until_closed())
    with pytest.raises(RlinfActorsError):
        call.wait()


def test_stopped_agentd_stops_the_arm_while_the_worker_holds_the_gil(arm, own_cluster):
    """Its guard cannot run and its agentd cannot kill it: its template does, before the lease is over."""
    group = launch(own_cluster, arm, rk.Streamer)
    call = group.moves_and_holds_the_gil(20 * int(pace.slowness))
    arm.until_streaming()
    worker = procfs.stat(int(arm.commands()[0].text.split()[-1]))
    agentd = lw.agentd_of(worker.pid)
    os.kill(agentd, signal.SIGSTOP)
    stopped = time.monotonic()
    last = arm.until_closed()[-1]
    os.kill(agentd, signal.SIGCONT)
    assert last.text == "closed", "nothing follows its end"
    assert last.at - stopped < 6 * pace.slowness, "its lease, from the last beat before the stop"
    with pytest.raises(WorkerDiedError, match="guard could not run"):
        call.wait()


class TestSeveralNodes:
    """The arm is on node 1; the head on node 0; the driver beside them."""

    @pytest.fixture
    def local(self, no_cluster, local_cluster, monkeypatch, tmp_path):
        (tmp_path / "heads").mkdir()
        monkeypatch.setenv(HEADS_DIR, str(tmp_path / "heads"))  # an emergency stop finds no other test's
        made = local_cluster(2)
        for name, value in made.driver_env.items():
            monkeypatch.setenv(name, value)
        return made

    @pytest.fixture
    def config(self, arm):
        return rk.config(arm.address(), node_rank=1, num_nodes=2)

    @pytest.fixture
    def call(self, local, arm, config):
        cluster = local.cluster(cluster_cfg=config["cluster"])
        strategy = ComponentPlacement(config, cluster).get_strategy("env")
        group = rk.Streamer.create_group().launch(cluster, strategy, name="env")
        call = group.moves()
        arm.until_streaming()
        return call

    def test_killed_agentd_stops_the_arm(self, local, arm, call):
        os.kill(local.nodes[1].pid, signal.SIGKILL)
        rk.stopped_last(arm.until_closed())
        with pytest.raises((WorkerDiedError, NodeLostError), match=r"SimulatedArm|node1"):
            call.wait()

    def test_stopped_agentd_stops_the_arm(self, local, arm, call):
        os.kill(local.nodes[1].pid, signal.SIGSTOP)
        rk.stopped_last(arm.until_closed())
        with pytest.raises(NodeLostError, match=r"its agentd was silent for .* the lease of SimulatedArm .* is over"):
            call.wait()
        os.kill(local.nodes[1].pid, signal.SIGCONT)

    def test_stopped_head_stops_the_arm(self, local, arm, call):
        os.kill(local.nodes[0].pid, signal.SIGSTOP)
        rk.stopped_last(arm.until_closed())
        os.kill(local.nodes[0].pid, signal.SIGCONT)
        with pytest.raises((WorkerDiedError, NodeLostError), match=r"no word from the head for|its agentd was silent"):
            call.wait()

    def test_killed_driver_stops_the_arm(self, local, arm, config, tmp_path):
        with drive(tmp_path, config, **local.driver_env) as driver:
            arm.until_streaming()
            driver.kill()
            rk.stopped_last(arm.until_closed())

    @pytest.mark.parametrize("how", ["command", "button"])
    def test_emergency_stop_finds_the_head_despite_a_private_cluster(
        self, local, arm, call, tmp_path, monkeypatch, how
    ):
        """Nobody names a head; a script with a private cluster runs on the head's machine."""
        monkeypatch.delenv(HEAD)
        private = """
            import sys
            from rlinf_actors import Cluster
            with Cluster(num_nodes=1, head="private"):
                print(flush=True)
                sys.stdin.read()
        """
        env = {**lw.SCRIPT_ENV, HEADS_DIR: os.environ[HEADS_DIR]}
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        estop = [sys.executable, "-m", "rlinf_actors.cli.main", "estop"]
        with subprocess.Popen([sys.executable, lw.script(tmp_path, lw.dedent(private))], **options) as script:
            assert script.stdout.readline() == "\n"
            slowdown = pace.slowness_now()
            if how == "button":
                with subprocess.Popen([*estop, "--arm", "--json"], **options) as button:
                    while json.loads(button.stdout.readline())["armed"] < 2:
                        pass
                    began = time.monotonic()
                    button.stdin.write("\n")
                    button.stdin.flush()
                    said = button.stdout.read()
                assert button.returncode == 0
                assert said.count('"acknowledged": true') == 2
            else:
                began = time.monotonic()
                done = subprocess.run(estop, env=env, capture_output=True, text=True, check=True)
                assert done.stdout.count("STOPPED      ") == 2
                assert "stopping: env:0" in done.stdout
                assert ": 1 robot worker of 1 driver; no process of theirs is left\n" in done.stdout
            commands = arm.until_closed()
            slowdown = max(slowdown, pace.slowness_now())
            script.communicate()
        rk.stopped_last(commands)
        (stopped,) = (one.at for one in commands if one.text == "stop")
        assert (stopped - began) / slowdown < 0.5, f"{stopped - began:.3f} s, on a machine {slowdown:.1f} times slower"
        with pytest.raises(WorkerDiedError, match="emergency stop by"):
            call.wait()

    def test_emergency_stop_stops_the_arm(self, local, arm, call, config, capsys):
        assert app.run(["estop", "--reason", "a hand in the cell", "--json"]) == 0
        pressed = json.loads(capsys.readouterr().out)
        (hit,) = pressed["hits"]
        (cluster,) = pressed["clusters"]
        assert (cluster["drivers"], cluster["robot_workers"], cluster["unconfirmed"]) == (1, 1, [])
        assert arm.commands()[-1].text == "closed", "when the command has ended"
        assert (hit["worker"], hit["robots"], hit["reached"]) == ("env:0", [f"SimulatedArm {arm.address()}"], True)
        rk.stopped_last(arm.until_closed())
        with pytest.raises(WorkerDiedError, match=r"emergency stop by .*: a hand in the cell"):
            call.wait()
        assert app.run(["status"]) == 0
        assert "stopped   emergency stop by" in capsys.readouterr().out
        cluster = Cluster.current()
        again = rk.Streamer.create_group()
        strategy = ComponentPlacement(config, cluster).get_strategy("env")
        with pytest.raises(UsageError, match=r"robots are stopped: emergency .* `rlinf-actors estop --release`"):
            again.launch(cluster, strategy, name="again")
        assert app.run(["estop", "--release"]) == 0
        assert "no emergency stop is in force" in capsys.readouterr().err
        group = rk.Closing.create_group().launch(cluster, strategy, name="again")
        group.wait_ready()
        group.shutdown()

    def test_stop_is_confirmed_only_by_the_robots_node(self, local, arm, call, capsys):
        os.kill(local.nodes[1].pid, signal.SIGSTOP)
        assert app.run(["estop"]) == 69
        commands, said = arm.commands(), capsys.readouterr()
        assert "its lease ends in " in said.out
        assert "STOPPED" not in said.out
        assert "NOT CONFIRMED: env:0 of job" in said.err
        assert "THE EMERGENCY STOP IS NOT CONFIRMED EVERYWHERE. ROBOTS MAY STILL MOVE" in said.err
        assert commands[-1].text == "closed", "the command has waited for the lease"
        rk.stopped_last(commands)
        os.kill(local.nodes[1].pid, signal.SIGCONT)
        assert app.run(["estop"]) == 0, "its agentd has said now that the worker is gone"
        with pytest.raises(NodeLostError):
            call.wait()

    def test_no_wait_tells_what_is_still_stopping(self, local, arm, call, capsys):
        assert app.run(["estop", "--no-wait"]) == 69
        said = capsys.readouterr()
        assert "stopping: env:0 of job" in said.out
        assert "NOT CONFIRMED: env:0 of job" in said.err
        assert app.run(["estop", "--job", Cluster.current().namespace]) == 0
        rk.stopped_last(arm.until_closed())
        assert app.run(["estop", "--no-wait"]) == 0
        with pytest.raises(WorkerDiedError):
            call.wait()
