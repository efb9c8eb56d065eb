"""Groups that outlive their driver, and launches that return a running group."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import detached_workers as dw
import live_workers as lw
import pace
import pytest

from rlinf_actors import (
    Cluster,
    GroupClosedError,
    GroupNotFoundError,
    NameInUseError,
    NodePlacementStrategy,
    RestartPolicy,
    SerializationError,
    UsageError,
    WorkerError,
    WorkerGroup,
)
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def local():
    with LocalCluster(2, env={"PYTHONPATH": str(Path(__file__).parent)}, options=pace.timers(beat_s=0.1)) as made:
        yield made


@contextmanager
def driver(local, name, gate="", place=0):
    """detached_workers.main as a process; it ends with the block, in good order or however the block ended it."""
    process = subprocess.Popen(
        [sys.executable, dw.__file__, local.head, name, gate, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**lw.SCRIPT_ENV, **local.driver_env},
    )
    with process:
        assert process.stdout.readline() == "launching\n"
        yield process
        process.stdin.close()
        process.wait(pace.PATIENCE_S)


def made(local, name, end=lambda process: None, place=0):
    """The pid of the worker of a group that a driver launched, detached, and left behind."""
    with driver(local, name, place=place) as process:
        pid = int(process.stdout.readline())
        end(process)
    return pid


def names(local):
    with local.cluster(namespace="looking") as cluster:
        status = cluster.runtime.io.submit(cluster.runtime.status(None)).result()
    return {group.name: (group.owner, group.detached) for group in status.groups}


@pytest.mark.parametrize("end", [lambda process: None, lambda process: process.kill()], ids=["ends", "is killed"])
def test_later_driver_finds_the_detached_group_of_an_earlier_one(local, end):
    pid = made(local, "left", end)
    assert names(local)["left"] == ("", True)
    with local.cluster(namespace="standing"):
        group = WorkerGroup.from_group_name(dw.Keeper, "left")
        assert group.pid().wait() == [pid]
        assert group.keep("second").wait() == [["first", "second"]]
        group.shutdown()
        with pytest.raises(GroupNotFoundError):
            WorkerGroup.from_group_name(dw.Keeper, "left")
    assert not lw.running(pid)


def test_detached_group_outlives_its_cluster_in_the_same_process(local):
    with local.cluster(namespace="standing") as cluster:
        group = dw.Keeper.create_group().launch(cluster, NodePlacementStrategy([0, 1]), name="same", detached=True)
        pids = group.pid().wait()
    with local.cluster(namespace="standing"):
        again = WorkerGroup.from_group_name(dw.Keeper, "same")
        assert again.pid().wait() == pids
        again.shutdown()


def test_launch_works_in_a_running_loop(local):
    async def use() -> list[int]:
        async with local.connect(namespace="standing") as cluster:
            group = dw.Keeper.create_group().launch(cluster, NodePlacementStrategy([1]), name="loop", detached=True)
            await group
            return await group.pid()

    pids = asyncio.run(use())
    with local.cluster(namespace="standing"):
        again = WorkerGroup.from_group_name(dw.Keeper, "loop")
        assert again.pid().wait() == pids
        again.shutdown()


def test_detached_group_ends_with_a_driver_that_ends_before_it_is_up(local, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # the constructor runs once the gate is open
    with driver(local, "half", str(gate)) as process, open(gate, "w"), local.cluster(namespace="standing") as cluster:
        process.kill()
        ended = next(iter(cluster.events(follow=True, kinds=["worker_stopped"], group="half")))
    assert "its owner ended" in ended.text


def test_failed_constructor_ends_a_detached_group(local):
    with local.cluster(namespace="standing") as cluster:
        launcher = dw.Keeper.create_group("/nowhere/at/all")
        with pytest.raises(WorkerError, match="nowhere"):
            launcher.launch(cluster, NodePlacementStrategy([0]), name="broken", detached=True)
        fine = dw.Keeper.create_group().launch(cluster, NodePlacementStrategy([0]), name="broken")
        fine.pid().wait()


def test_detach_is_refused_where_it_is_not_possible(local):
    with local.cluster(namespace="standing") as cluster:
        launcher = dw.Keeper.create_group()
        with pytest.raises(UsageError, match="cannot be detached and have a restart policy"):
            launcher.launch(cluster, detached=True, restart=RestartPolicy.on_failure())
    with local.cluster() as cluster, pytest.raises(UsageError, match=r"name it, by Cluster.namespace='...'. or"):
        launcher.launch(cluster, detached=True)
    with Cluster(num_nodes=1, head="private") as cluster, pytest.raises(UsageError, match="private to the driver"):
        launcher.launch(cluster, detached=True)


@pytest.mark.parametrize("cls", [dw.Maker, dw.AsyncMaker])
def test_group_detached_in_a_worker_ends_with_the_driver(local, cls):
    with local.cluster() as cluster:
        maker = cls.create_group().launch(cluster, NodePlacementStrategy([1]), name="maker")
        [[pid]] = maker.makes("made", detached=True).wait()
        [[other]] = maker.makes("attached").wait()
        attached = os.pidfd_open(other)
        maker.shutdown()
        lw.wait_for_end(attached, pace.PATIENCE_S)
        assert WorkerGroup.from_group_name(dw.Keeper, "made").pid().wait() == [pid]
        left = os.pidfd_open(pid)
    lw.wait_for_end(left, pace.PATIENCE_S)


@pytest.mark.parametrize(
    ("place", "rank", "how"),
    [(0, 0, signal.SIGKILL), (1, 0, signal.SIGTERM), (1, 1, signal.SIGKILL), (1, 1, signal.SIGUSR1)],
    ids=["the head is killed", "the head is stopped", "its agentd is killed", "its agentd hands over"],
)
def test_detached_group_survives_restarts_of_daemons(local, place, rank, how):
    pid = made(local, "kept", place=place)
    local.nodes[rank].process.send_signal(how)
    local.nodes[rank].process.wait(pace.PATIENCE_S)
    local.restart_agent(rank)
    assert names(local)["kept"] == ("", True)
    with local.cluster(namespace="standing"):
        group = WorkerGroup.from_group_name(dw.Keeper, "kept")
        assert group.keep("later").wait() == [["first", "later"]]
        assert group.pid().wait() == [pid]
        group.shutdown()


class TestGetIfExists:
    def test_get_if_exists_returns_the_running_group(self, local):
        with local.cluster() as cluster:
            first = lw.many(cluster, dw.Keeper, 2, name="shared", get_if_exists=True)
            second = lw.many(cluster, dw.Keeper, 1, name="shared", get_if_exists=True)
            assert second.world_size == 2
            assert second.pid().wait() == first.pid().wait()
            with pytest.raises(NameInUseError, match=r"is of class .*Keeper, and not of .*Other"):
                lw.many(cluster, dw.Other, 1, name="shared", get_if_exists=True)
            first.shutdown()
            third = lw.many(cluster, dw.Keeper, 1, name="shared", get_if_exists=True)
            assert third.world_size == 1
            third.pid().wait()

    def test_get_if_exists_returns_another_drivers_group(self, local):
        pid = made(local, "theirs")
        with local.cluster(namespace="standing") as cluster:
            group = lw.many(cluster, dw.Keeper, 3, name="theirs", get_if_exists=True)
            assert (group.world_size, len(group.placements)) == (1, 1)
            assert group.pid().wait() == [pid]
            with pytest.raises(NameInUseError, match=r"is of class .*Keeper, and not of .*Other"):
                lw.many(cluster, dw.Other, 1, name="theirs", get_if_exists=True)
            group.shutdown()

    def test_get_if_exists_launches_again_after_the_group_has_ended(self, local):
        with local.cluster() as cluster:
            ended = lw.many(cluster, dw.Keeper, 1, name="again")
            ended.wait_ready()
            sent = pickle.dumps(ended)
            ended.shutdown()
            del ended
            gc.collect()
            stale = pickle.loads(sent)  # noqa: S301 - our own
            group = lw.many(cluster, dw.Keeper, 1, name="again", get_if_exists=True)
            assert group.keep("new").wait() == [["new"]]
            with pytest.raises(GroupClosedError):
                stale.pid().wait()
            assert lw.many(cluster, dw.Keeper, 1, name="again", get_if_exists=True).keep(2).wait() == [["new", 2]]

    def test_two_launches_at_once_get_the_same_group(self, local):
        pids = []

        def launch() -> None:
            group = lw.many(cluster, dw.Keeper, 1, name="raced", get_if_exists=True)
            pids.append(group.pid().wait())

        with local.cluster() as cluster:
            threads = [threading.Thread(target=launch) for _ in range(4)]
            for thread in threads:
                thread.start()
            maker = lw.many(cluster, dw.Maker, 4, name="makers")
            pids += maker.makes("raced", get_if_exists=True).wait()
            for thread in threads:
                thread.join()
            assert len(pids) == 8
            assert len({tuple(pid) for pid in pids}) == 1

    def test_launch_works_in_a_running_loop(self, local):
        async def use(cluster):
            maker = dw.AsyncMaker.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="makers")
            there = maker.makes("async", get_if_exists=True)
            here = dw.Keeper.create_group().launch(
                cluster, NodePlacementStrategy([0]), name="async", get_if_exists=True
            )
            early = here.pid()
            await here
            assert [await early, await here.pid(), *await there] == [await early] * 5

        with local.cluster() as cluster:
            asyncio.run(use(cluster))

    def test_handle_is_sent_after_the_head_has_answered_its_launch(self, local):
        made(local, "sent")

        async def use(cluster):
            with lw.stopped(local.nodes[0].pid):  # the head, and the agentd of node 0
                group = dw.Keeper.create_group().launch(
                    cluster, NodePlacementStrategy([0]), name="sent", get_if_exists=True
                )
                with pytest.raises(SerializationError, match="await the group first"):
                    group.keep(group)
            await group
            await group.keep(group)
            await group.shutdown()

        with local.cluster(namespace="standing") as cluster:
            asyncio.run(use(cluster))

    def test_get_if_exists_refuses_a_group_of_another_size(self, local):
        pid = made(local, "wider")

        async def use(cluster):
            with lw.stopped(local.nodes[0].pid):  # the head, which cannot answer before the call
                group = dw.Keeper.create_group().launch(
                    cluster, NodePlacementStrategy([0, 1]), name="wider", get_if_exists=True
                )
                early = group.pid()
            await group
            with pytest.raises(UsageError, match="has 1 rank, not 2 as this launch asked for: await the group"):
                await early
            assert await group.pid() == [pid]
            await group.shutdown()

        with local.cluster(namespace="standing") as cluster:
            asyncio.run(use(cluster))
