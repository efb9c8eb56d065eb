"""Whatever ends around a robot worker: on_lease_lost runs, the arm's last command is stop, and nothing follows it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import robot_kit as rk

from rlinf_actors import Cluster, ComponentPlacement
from rlinf_actors.errors import UsageError, WorkerDiedError

pytestmark = pytest.mark.live


@pytest.fixture
def arm(tmp_path) -> Iterator[rk.Arm]:
    with rk.Arm(tmp_path) as made:
        yield made


@pytest.fixture
def cluster(arm) -> Iterator[Cluster]:
    with Cluster(cluster_cfg=rk.config(arm.address())["cluster"]) as made:
        yield made


def launch(cluster, arm, cls, *args, **options):
    strategy = ComponentPlacement(rk.config(arm.address()), cluster).get_strategy("env")
    return cls.create_group(*args).launch(cluster, strategy, name="env", **options)


STREAMS = [
    (rk.Streamer, "moves", {}),
    (rk.Streamer, "moves_asleep", {}),
    (rk.Streamer, "moves_blocked", {}),
    (rk.Streamer, "moves", {"max_concurrency": 4}),
    (rk.Streamer, "streams_beside", {}),
    (rk.Streamer, "moves", {"start_method": "spawn"}),
    (rk.Async, "moves", {}),
    (rk.Async, "streams_beside", {}),
    (rk.Locked, "moves", {}),
    (rk.Hanging, "moves", {}),
]


@pytest.mark.parametrize(("cls", "method", "options"), STREAMS)
def test_sigterm_to_a_worker(cluster, arm, cls, method, options):
    group = launch(cluster, arm, cls, **options)
    pid = group.pid().wait()[0]
    call = getattr(group, method)()
    arm.until_streaming()
    os.kill(pid, signal.SIGTERM)
    rk.stopped_last(arm.until_closed())
    if method != "streams_beside":
        with pytest.raises(WorkerDiedError, match="SIGTERM"):
            call.wait()


def test_the_template_is_killed(cluster, arm):
    group = launch(cluster, arm, rk.Streamer)
    parent = group.parent().wait()[0]
    call = group.moves()
    arm.until_streaming()
    os.kill(parent, signal.SIGKILL)
    rk.stopped_last(arm.until_closed())
    with pytest.raises(WorkerDiedError, match="template"):
        call.wait()
