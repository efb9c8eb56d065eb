"""Groups that grow and shrink while they run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import live_workers as lw
import pytest
import resize_workers as rw

from rlinf_actors import (
    Channel,
    GroupClosedError,
    NodePlacementStrategy,
    PeerDiedError,
    PlacementError,
    RestartPolicy,
    UsageError,
    WorkerError,
    WorkerGroup,
    procfs,
)

pytestmark = pytest.mark.live

HERE = NodePlacementStrategy([0])
TWO = NodePlacementStrategy([0, 0])


def until(condition, seconds=30.0):
    """Wait until *condition* returns True."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def workers_of(group):
    """Return the pids of the children of the process that started the group's first worker."""
    template = procfs.stat(group.pid().wait()[0]).parent
    return {int(pid) for pid in Path(f"/proc/{template}/task/{template}/children").read_text().split()}


@pytest.fixture
def group(cluster, tmp_path):
    return lw.many(cluster, rw.Elastic, 2, str(tmp_path), name="elastic")


def test_a_group_grows_and_shrinks_and_everyone_follows(cluster, group, tmp_path):
    other = lw.many(cluster, rw.Elastic, 1, name="other")
    named = WorkerGroup.from_group_name(rw.Elastic, "elastic")
    assert other.count(group).wait() == [[0, 1]]
    assert group.add_ranks(TWO) == [2, 3]
    assert (group.world_size, named.world_size, len(group.placements)) == (4, 4, 4)
    assert group.sizes().wait() == [(rank, 4, "4") for rank in range(4)]
    assert group.seen().wait() == [[4], [4], [], []], "the hook runs in the ranks that were there"
    until(lambda: other.count(group).wait() == [[0, 1, 2, 3]])
    assert [info.rank for info in group.worker_info_list] == [0, 1, 2, 3]
    group.execute_on(3).say("other", 0, "hello").wait()
    assert other.hear("elastic", 3).wait() == ["hello"]
    pids = group.pid().wait()
    group.remove_ranks(2, 3)
    assert not any(map(lw.running, pids[2:]))
    assert all(map(lw.running, pids[:2]))
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == ["closed-2", "closed-3"]
    assert group.sizes().wait() == [(0, 2, "2"), (1, 2, "2")]
    assert named.world_size == 2
    until(lambda: other.count(group).wait() == [[0, 1]])
    with pytest.raises(PlacementError, match="ranks 0-1"):
        group.execute_on(2)
    with pytest.raises(PeerDiedError, match="was removed from its group"):
        other.hear("elastic", 3).wait()  # waits until the head has told that worker of the end
    with pytest.raises(PeerDiedError, match="was removed from its group"):
        other.say("elastic", 3, "too late").wait()
    assert group.add_ranks(HERE) == [2]
    until(lambda: other.count(group).wait() == [[0, 1, 2]])
    assert group.execute_on(2).pid().wait()[0] != pids[2]


def test_calls_under_way_end_at_the_ranks_that_they_began_with(group, tmp_path):
    path = str(tmp_path / "go")
    group.add_ranks(HERE)
    slow = group.slow(path)
    for rank in range(3):
        until(lambda rank=rank: os.path.exists(f"{path}.{rank}"))
    work = group.remove_ranks(2, async_op=True)
    until(lambda: group.world_size == 2)
    later = group.sizes()
    Path(path).touch()
    assert slow.wait() == [0, 1, 2]
    work.wait()
    assert later.wait() == [(0, 2, "2"), (1, 2, "2")]
    stuck = group.add_ranks(HERE) and group.execute_on(2).slow(path + "-never")
    until(lambda: os.path.exists(f"{path}-never.2"))
    group.remove_ranks(2, grace=0.2)
    with pytest.raises(GroupClosedError, match="was removed from its group"):
        stuck.wait(20)


def test_a_failed_addition_leaves_the_group_as_it_was(cluster, tmp_path):
    group = lw.many(cluster, rw.Elastic, 2, str(tmp_path), 3, name="picky")
    named = WorkerGroup.from_group_name(rw.Elastic, "picky")
    before = workers_of(group)
    with pytest.raises(WorkerError, match="rank 3 does not want to be"):
        group.add_ranks(TWO)
    with pytest.raises(PlacementError, match="node 7"):
        group.add_ranks(NodePlacementStrategy([7]))
    assert (group.world_size, named.world_size) == (2, 2)
    assert group.sizes().wait() == [(0, 2, "2"), (1, 2, "2")]
    until(lambda: workers_of(group) == before)
    assert group.add_ranks(HERE) == [2]
    assert len(named.sizes().wait()) == 3


def test_only_the_owner_removes_and_only_the_highest_ranks(group):
    for ranks in ((0,), (0, 1), (2,), ()):
        with pytest.raises(PlacementError, match=r"only its highest can be removed: remove_ranks\(1\)"):
            group.remove_ranks(*ranks)
    named = WorkerGroup.from_group_name(rw.Elastic, "elastic")
    assert named.control.group is group.control.group, "one RemoteGroup in this process"
    with pytest.raises(UsageError, match="takes a PlacementStrategy"):
        group.add_ranks(3)


def until_all_know(others, group, ranks):
    """The head has told each of the other group's workers."""

    def all_know():
        with contextlib.suppress(GroupClosedError):  # a call to a rank that is being removed
            return others.count(group).wait() == [ranks] * len(others.worker_info_list)

    until(all_know)


def test_channels_and_routes_follow(cluster, group):
    channel, routed = Channel.create("items"), Channel.create("routed")
    other = lw.many(cluster, rw.Elastic, 3, name="three")
    channel.put("precious")
    group.add_ranks(HERE)
    assert group.execute_on(2).hold(channel).wait() == ["precious"]
    until_all_know(other, group, [0, 1, 2])
    other.give("elastic", routed, 6).wait()
    assert group.take("three", routed, 6).wait() == [[0, 1], [2, 3], [4, 5]]
    group.remove_ranks(2)
    assert channel.get(timeout=20) == "precious", "an item that a removed rank had taken went back"
    until_all_know(other, group, [0, 1])
    other.give("elastic", routed, 6).wait()
    assert group.take("three", routed, 6).wait() == [[0, 1, 2], [3, 4, 5]]


def test_an_added_rank_is_restarted_and_a_removed_one_is_not(cluster):
    group = lw.many(cluster, rw.Elastic, 1, name="again", restart=RestartPolicy.on_failure(backoff_s=0))
    group.add_ranks(HERE)
    first = group.execute_on(1).pid().wait()[0]
    os.kill(first, signal.SIGKILL)
    until(lambda: group.control.states()[1].restarts == 1 and group.control.group.serves(1))
    assert group.sizes().wait() == [(0, 2, "2"), (1, 2, "2")]
    kept = group.execute_on(1)
    group.remove_ranks(1)
    with pytest.raises(PlacementError, match="has ranks 0-0: rank 1, which this call was to go to, was removed"):
        kept.sizes()
    assert group.sizes().wait() == [(0, 1, "1")]
    assert list(group.control.states()) == [0]


async def test_in_an_event_loop_nothing_blocks(cluster):
    group = await lw.many(cluster, rw.Elastic, 1, name="async")
    first = group.add_ranks(HERE)
    with pytest.raises(UsageError, match="is being resized already"):
        group.add_ranks(HERE)
    assert await first == [1]
    assert len(await group.sizes()) == 2
    await group.remove_ranks(1)
    assert await group.sizes() == [(0, 1, "1")]
    await group.shutdown()


DRIVER = """
import sys
sys.path.insert(0, {tests!r})
from resize_workers import Stuck
from rlinf_actors import Cluster, NodePlacementStrategy
with Cluster(num_nodes=1) as cluster:
    here = NodePlacementStrategy([0])
    group = Stuck.create_group({place!r}).launch(cluster, here)
    group.add_ranks(here)
"""


def test_a_driver_that_dies_while_it_adds_ranks_leaves_nothing(tmp_path):
    path = lw.script(tmp_path, DRIVER.format(tests=str(lw.ROOT / "tests/live"), place=str(tmp_path)))
    with subprocess.Popen([sys.executable, path], env=lw.SCRIPT_ENV, stderr=subprocess.DEVNULL) as driver:
        pids = []
        for rank in range(2):
            until(lambda rank=rank: (tmp_path / f"pid-{rank}").exists(), 60)
            pids.append(int((tmp_path / f"pid-{rank}").read_text()))
        driver.kill()
    until(lambda: not any(map(lw.running, pids)))
