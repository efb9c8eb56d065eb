"""Busy or stopped is not dead: for almost three leases nothing answers, and everything goes on afterwards.

``--default-timers`` tries it with the default leases: 30 s each, three of them. ``--gil-seconds N``: for so long.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import live_workers as lw
import pace
import pytest
from nightly import Figures
from standstill_workers import Busy, Looped

from rlinf_actors import NodePlacementStrategy
from rlinf_actors.testing import LocalCluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def hold_s(request: pytest.FixtureRequest) -> int:
    """Almost three leases."""
    if request.config.getoption("gil_seconds"):
        return int(request.config.getoption("gil_seconds"))
    return 30 if request.config.getoption("default_timers") else math.ceil(8 * pace.slowness)


@pytest.fixture(scope="module")
def local(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    options = pace.timers(beat_s=0.2, lease_s=3.0, robot_lease_s=1.0, head_grace_s=60.0)
    env = {"PYTHONPATH": str(lw.ROOT / "tests/live")}
    with LocalCluster(2, env=env, options=None if request.config.getoption("default_timers") else options) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(local):
    with local.cluster() as made:
        yield made


@contextmanager
def groups(cluster, nodes):
    """Counting workers, one on each of these nodes, and one on node 1 that goes on meanwhile."""
    with (
        Busy.create_group().launch(cluster, NodePlacementStrategy(nodes), name="busy") as busy,
        Looped.create_group().launch(cluster, NodePlacementStrategy([1]), name="looped") as looped,
    ):
        looped.rest(0).wait(pace.PATIENCE_S)
        busy.count().wait(pace.PATIENCE_S)
        yield busy, looped


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def node_states(cluster):
    status = cluster.runtime.io.submit(cluster.runtime.status(None)).result(60)
    return [node.state for node in status.nodes]


def test_busy_or_stopped_workers_are_not_declared_dead(cluster, hold_s, figures: Figures):
    with groups(cluster, [0, 1, 1]) as (busy, looped):
        pids = busy.pid().wait(pace.PATIENCE_S)
        with stopped(pids[2]):
            held = busy.execute_on(0, 1).hold_the_gil(hold_s)
            blocked = looped.block_the_loop(hold_s)
            counted = busy.count()
            assert blocked.wait(120) == ["slept"]
            assert held.wait(120) == [0, 0]
        assert counted.wait(60) == [2, 2, 2]
        assert busy.pid().wait(pace.PATIENCE_S) == pids
        assert looped.rest(0).wait(pace.PATIENCE_S) == ["rested"]
    figures.done(hold_s, hold_s, "s with the GIL held, a loop blocked and a worker stopped")


@pytest.mark.parametrize("what", ["the head", "an agentd for less than its lease"])
def test_stopped_daemon_ends_no_worker_and_calls_go_on(local, cluster, hold_s, what, figures: Figures):
    node, seconds = (0, hold_s) if what == "the head" else (1, hold_s / 8)
    with groups(cluster, [0, 1]) as (busy, looped):
        pids = busy.pid().wait(pace.PATIENCE_S)
        with stopped(local.nodes[node].pid):
            assert looped.rest(seconds).wait(120) == ["rested"]
            assert busy.count().wait(pace.PATIENCE_S) == [2, 2]
        assert busy.count().wait(pace.PATIENCE_S) == [3, 3]
        assert busy.pid().wait(pace.PATIENCE_S) == pids
        with Busy.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="later") as later:
            assert later.count().wait(60) == [1, 1]
        assert "lost" not in node_states(cluster)
    figures.done(math.ceil(seconds), math.ceil(seconds), f"s with {what} stopped")


DRIVER = """
    import json, os, sys
    from rlinf_actors import Cluster, NodePlacementStrategy
    from standstill_workers import Busy

    with Cluster(num_nodes=2, head={head!r}) as cluster:
        group = Busy.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="its")
        print(json.dumps(group.pid().wait(15)), flush=True)
        for line in sys.stdin:
            print(json.dumps([group.pid().wait(15), group.count().wait(15)]), flush=True)
"""


def test_a_stopped_driver_keeps_its_groups(local, cluster, hold_s, tmp_path, figures: Figures):
    script = tmp_path / "driver.py"
    script.write_text(lw.dedent(DRIVER.format(head=local.head)))
    env = {**lw.SCRIPT_ENV, **local.driver_env, "PYTHONPATH": f"{lw.ROOT}:{lw.ROOT / 'tests/live'}"}
    with (
        groups(cluster, [0]) as (_, looped),
        subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        ) as driver,
    ):
        assert driver.stdin is not None
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        with stopped(driver.pid):
            assert looped.rest(hold_s).wait(120) == ["rested"]
        print("go on", file=driver.stdin, flush=True)
        assert json.loads(driver.stdout.readline()) == [pids, [1, 1]]
        driver.stdin.close()
        assert driver.wait(pace.PATIENCE_S) == 0
    figures.done(hold_s, hold_s, "s with a driver stopped")
