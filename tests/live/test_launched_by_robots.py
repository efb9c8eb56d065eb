"""A group that a robot's worker launches inherits its lease: what ends the launcher's stops what the group moves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pace
import pytest
import robot_kit as rk

from rlinf_actors import Cluster, ComponentPlacement
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


@pytest.fixture
def arm(tmp_path) -> Iterator[rk.Arm]:
    with rk.Arm(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(2) as made:
        yield made


@pytest.fixture
def cluster(local, arm) -> Iterator[Cluster]:
    config = rk.config(arm.address(), num_nodes=2)["cluster"]
    with local.cluster(cluster_cfg=config) as made:
        yield made


def holders(cluster: Cluster) -> list[str]:
    """The workers that hold the arm."""
    status = cluster.runtime.io.submit(cluster.runtime.status(None)).result(pace.PATIENCE_S)
    (lease,) = status.leases
    return lease.workers


def launched(cluster, arm, launcher=rk.Launching, node=1, **options):
    """The group of a robot's worker, which has launched one on a node; the arm moves."""
    strategy = ComponentPlacement(rk.config(arm.address(), num_nodes=2), cluster).get_strategy("env")
    group = launcher.create_group().launch(cluster, strategy, name="env")
    inherits = group.begin(node, **options).wait()[0]
    arm.until_streaming()
    return group, inherits


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_the_launched_group_moves_is_stopped_with_the_launcher(cluster, arm, node, number):
    group, inherits = launched(cluster, arm, node=node)
    assert inherits
    assert holders(cluster) == ["env:0", "controller:0"]
    os.kill(group.pid().wait()[0], number)
    rk.stopped_last(arm.until_closed())


def test_launcher_that_holds_the_interpreters_lock_loses_its_lease_and_the_group_with_it(cluster, arm):
    group, _ = launched(cluster, arm)
    group.hang()
    rk.stopped_last(arm.until_closed())


def test_stopped_agentd_of_the_launcher_stops_the_group_on_another_node(local, cluster, arm):
    launched(cluster, arm)
    agentd = local.nodes[0].pid
    os.kill(agentd, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        last = arm.until_closed()
    finally:
        os.kill(agentd, signal.SIGCONT)
    rk.stopped_last(last)
    assert next(one.at for one in last if one.text == "stop") - stopped < 2.0 * pace.slowness, "the lease of a robot"


def test_group_that_moves_nothing_inherits_nothing(cluster, arm):
    _, inherits = launched(cluster, arm, robot=False)
    assert not inherits
    assert holders(cluster) == ["env:0"]


def test_at_an_orderly_end_the_launchers_close_comes_first_and_no_hook_runs(cluster, arm):
    group, _ = launched(cluster, arm, rk.ClosingLaunching, cls=rk.ClosingController)
    group.shutdown()
    commands = arm.until_closed()
    names = {one.connection: one.text.split()[1] for one in commands if one.text.startswith("hello")}
    ends = [
        (names[one.connection], one.text)
        for one in commands
        if one.text.split()[-1] in ("stop", "0.000000", "7.000000")
    ]
    assert ends == [("launcher", "move 7.000000"), ("controller:0", "move 0.000000")]
