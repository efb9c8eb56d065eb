"""A driver that replaces itself by os.exec ends as a program, although its process lives: its robots and groups end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import live_workers as lw
import pace
import pytest
import robot_kit as rk

from rlinf_actors import procfs
from rlinf_actors.settings import HEAD
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

DRIVER = """
    import json, os, sys
    import live_workers as lw
    import robot_kit as rk
    from rlinf_actors import Cluster, ComponentPlacement, NodePlacementStrategy

    config, what, then = json.loads(sys.argv[1]), *sys.argv[2:]
    cluster = Cluster(cluster_cfg=config["cluster"])
    if what == "robot":
        strategy = ComponentPlacement(config, cluster).get_strategy("env")
        group = rk.Streamer.create_group().launch(cluster, strategy, name="env")
        group.streams_beside().wait()
        print(*group.pid().wait(), flush=True)
    else:
        group = lw.Where.create_group().launch(cluster, NodePlacementStrategy([0]), name=what)
        print(group.where().wait()[0][1], flush=True)
    sys.stdin.readline()
    if then == "a new Cluster":
        os.execv(sys.executable, [sys.executable, sys.argv[0], sys.argv[1], "new", "nothing"])
    new = "import sys, time; print(time.monotonic(), flush=True); sys.stdin.readline()"
    os.execv(sys.executable, [sys.executable, "-S", "-c", new])
"""


class Driver:
    def __init__(self, tmp_path, env: dict[str, str], config, what: str, then: str = "nothing") -> None:
        path = os.pathsep.join([str(lw.ROOT), os.path.dirname(__file__)])
        command = [sys.executable, lw.script(tmp_path, lw.dedent(DRIVER)), json.dumps(config), what, then]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.worker = int(self.said())
        except BaseException:
            self.close()
            raise

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def replace(self) -> str:
        """Let the driver run another program, and return what that says first."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()

    def close(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    options = pace.timers(beat_s=0.2, lease_s=3)
    with LocalCluster(1, env={"PYTHONPATH": os.path.dirname(__file__)}, options={**options}) as made:
        yield made


@pytest.fixture(params=["private", "keyed", "unix socket"])
def env(request, tmp_path) -> dict[str, str]:
    """With which a driver finds its head."""
    if request.param == "private":
        return {}
    local = request.getfixturevalue("local")
    return local.driver_env if request.param == "keyed" else {HEAD: f"ipc://{local.nodes[0].run_dir}/head"}


@pytest.fixture
def arm(tmp_path) -> Iterator[rk.Arm]:
    with rk.Arm(tmp_path) as made:
        yield made


def test_robots_of_a_replaced_driver_stop_in_their_lease(arm, env, tmp_path):
    with contextlib.closing(Driver(tmp_path, env, rk.config(arm.address()), "robot")) as driver:
        arm.until_streaming()
        replaced = float(driver.replace())  # when the new program began, in seconds of CLOCK_MONOTONIC
        commands = arm.until_closed()
        rk.stopped_last(commands)
        moves = [command.at for command in commands if command.text.startswith("move")]
        assert max(moves) - replaced < 2.0 * pace.slowness * pace.slowness_now()
        assert driver.process.poll() is None


@pytest.mark.parametrize("then", ["nothing", "a new Cluster"])
def test_group_of_a_replaced_driver_ends(env, tmp_path, then):
    config = {"cluster": {"num_nodes": 1}}
    with contextlib.closing(Driver(tmp_path, env, config, "old", then)) as driver:
        worker = procfs.pidfd_of(driver.worker)
        new = driver.replace()
        lw.wait_for_end(worker)
        assert driver.process.poll() is None
        assert then == "nothing" or lw.running(int(new))


def test_private_cluster_of_a_replaced_driver_ends(tmp_path):
    with contextlib.closing(Driver(tmp_path, {}, {"cluster": {"num_nodes": 1}}, "old")) as driver:
        agentds = [procfs.pidfd_of(pid) for pid in procfs.children(driver.process.pid)]
        assert agentds
        driver.replace()
        for agentd in agentds:
            lw.wait_for_end(agentd)
