"""Channels between a driver and workers, with real processes that are killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import channel_workers as cw
import live_workers as lw
import pace
import pytest

from rlinf_actors import (
    CallTimeoutError,
    Channel,
    ChannelBrokenError,
    ChannelClosedError,
    ChannelWorker,
    GroupNotFoundError,
    NodePlacementStrategy,
    SerializationError,
    UsageError,
    Worker,
    WorkerDiedError,
)

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("module_leak_check")]


def test_items_keep_their_order_under_load(cluster):
    channel = Channel.create("numbers")
    for work in [channel.put(n, async_op=True) for n in range(1000)]:
        work.wait()
    assert channel.qsize() == 1000
    gets = [channel.get(async_op=True) for _ in range(1000)]
    assert [work.wait() for work in gets] == list(range(1000))
    assert channel.empty()


def test_driver_and_workers_exchange_items(cluster):
    channel = Channel.create("both", maxsize=2)
    group = cw.launch(cluster, 2)
    first, second = group.execute_on(0), group.execute_on(1)
    taking = second.get(channel, 6)
    first.put(channel, ["a", "b", "c"]).wait()
    for item in ("d", {"e": [1, 2]}, None):
        channel.put(item)
    assert taking.wait() == [["a", "b", "c", "d", {"e": [1, 2]}, None]]
    connected = first.connect("both")
    channel.put("by name")
    assert connected.wait() == ["by name"]


def test_nowait_operations_raise_instead_of_waiting(cluster):
    channel = Channel.create("small", maxsize=1)
    group = cw.launch(cluster)
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()
    assert group.put_nowait(channel, 1).wait() == ["in"]
    assert group.put_nowait(channel, 2).wait() == ["QueueFull"]
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait(3)
    assert channel.full()
    channel.put_nowait("other", key="other")
    assert channel.get_nowait() == 1
    assert str(channel) == "Channel 'small': 1 item\n  'other': ['other']"


def test_async_and_sync_gets_of_one_worker_do_not_mix(cluster):
    channel = Channel.create("mixed")
    result = cw.launch(cluster).mixed(channel)
    for n in range(3):
        channel.put(n, key="quick")
    assert channel.get("asked") == "go"
    channel.put("late", key="slow")
    assert result.wait() == [[0, 1, 2, "late"]]


def test_sync_and_async_gets_of_one_key_are_served_in_order(cluster):
    channel = Channel.create("turns")
    result = cw.launch(cluster).turns(channel)
    assert channel.get("ready") == "asked"
    for n in range(4):
        channel.put(n)
    assert result.wait() == [[0, 1, 2, 3]]


def test_a_full_key_does_not_block_another(cluster):
    channel = Channel.create("keys", maxsize=1)
    channel.put("a1", key="a")
    waiting = channel.put("a2", key="a", async_op=True)
    channel.put("b1", key="b")
    assert not waiting.done()
    assert channel.get("b") == "b1"
    assert channel.get("a") == "a1"
    waiting.wait()
    channel.put((1, "x"), key=(1, "x"))
    assert channel.get((1, "x")) == (1, "x")


def test_batches_are_taken_by_weight(cluster):
    channel = Channel.create("batches")
    for n, weight in enumerate((2, 2, 3)):
        channel.put(n, weight)
    assert channel.get_batch(5) == [0, 1]
    assert channel.get_batch(2) == []
    waiting = channel.get_batch(6, async_op=True)
    channel.put(3, 3)
    assert waiting.wait() == [2, 3]


def test_operation_that_times_out_takes_and_puts_nothing(cluster):
    channel = Channel.create("late", maxsize=1)
    with pytest.raises(CallTimeoutError, match=r"get\(\) from channel 'late' was not done within 0\.01 s: "):
        channel.get(timeout=0.01)
    channel.put(1)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s: "):
        channel.put(2, timeout=0.01)
    with pytest.raises(CallTimeoutError):
        channel.get_batch(5, key="none", async_op=True, timeout=0.01).wait()
    assert channel.get() == 1
    channel.put(3)
    assert channel.get() == 3
    assert channel.empty()


def test_arrays_arrive_whole_and_writable(cluster):
    np = pytest.importorskip("numpy")
    channel = Channel.create("arrays")
    channel.put({"big": np.arange(1 << 18), "small": np.ones(3), "fortran": np.asfortranarray(np.eye(3))})
    channel.put(np.zeros(0))
    got = channel.get()
    got["big"][0] = got["small"][0] = 7
    assert got["big"].sum() == sum(range(1 << 18)) + 7
    assert got["fortran"].flags.f_contiguous
    assert channel.get().shape == (0,)
    channel.put(np.ones(1 << 20, np.uint8))
    assert "bytes>" in str(channel)


def test_close_ends_puts_at_once_and_gets_when_empty(cluster):
    channel = Channel.create("closing")
    group = cw.launch(cluster)
    blocked = group.error_of_get(channel)
    channel.put("last", key="rest")
    channel.close()
    channel.close()
    assert blocked.wait() == ["ChannelClosedError"]
    with pytest.raises(ChannelClosedError):
        channel.put(1)
    assert "(closed)" in str(channel)
    assert channel.get("rest") == "last"
    with pytest.raises(ChannelClosedError):
        channel.get("rest")


@pytest.mark.parametrize("distributed", [False, True])
def test_a_closed_channel_ends_its_host_and_frees_its_name(cluster, distributed):
    channel = Channel.create("short", distributed=distributed)
    for n in range(2):
        channel.put(n)
    channel.close()
    with pytest.warns(RuntimeWarning, match="exists"):
        assert Channel.create("short").get() == 0  # the host lives until waiting requests have ended
    assert channel.get() == 1
    channel._backend._group.gone.wait(pace.PATIENCE_S)  # the head says that its processes have ended
    for ask in (channel.get_nowait, channel.qsize, lambda: channel.put(1)):
        with pytest.raises(ChannelClosedError):
            ask()
    assert str(channel) == "Channel 'short' (ended)"
    channel.close()
    again = Channel.create("short", maxsize=3)
    again.put("new")
    assert (again.maxsize, again.get()) == (3, "new")
    again.close()
    Channel.create("short").put("close() has waited for the end of what it closed")


@pytest.mark.usefixtures("no_cluster")
async def test_channel_works_in_asyncio(rlinf_cluster_async):
    channel = Channel.create("async")
    group = await lw.many(rlinf_cluster_async, cw.Awaiting, 1)
    draining = group.drain(channel)
    for n in range(20):
        await channel.put(n, async_op=True)
    channel.close()
    (items,) = await draining
    assert items == list(range(20))


@pytest.mark.usefixtures("no_cluster")
async def test_cancelled_gets_lose_nothing(rlinf_cluster_async):
    channel = Channel.create("cancelled")
    group = await lw.many(rlinf_cluster_async, cw.Awaiting, 1)
    taking = group.get_cancelled(channel, 100)
    for n in range(100):
        await channel.put(n, async_op=True)
    assert await taking == [list(range(100))]
    dropped = channel.get(async_op=True)
    del dropped
    channel.put("still there")
    assert channel.get() == "still there"


def test_then_runs_on_a_channels_results(cluster):
    channel, other = Channel.create("chain"), Channel.create("end")
    first = channel.get(async_op=True)
    chained = first.then(other.put, "after", async_op=True)
    channel.put(1)
    chained.wait()
    assert (first.wait(), other.get()) == (1, "after")


def test_second_create_connects_to_the_channel_and_warns(cluster):
    channel = Channel.create("twice", maxsize=3)
    channel.put("there")
    with pytest.warns(RuntimeWarning, match=r"channel 'twice' exists \(maxsize 3\)"):
        again = Channel.create("twice", maxsize=5)
    assert again.maxsize == 3
    assert again.get() == "there"


def test_channel_created_in_a_worker_ends_with_the_worker(cluster):
    group = cw.launch(cluster)
    (channel,) = group.make("theirs", maxsize=2).wait()
    assert channel.maxsize == 2
    assert channel.get() == "made here"
    (by_rank,) = group.make(name="older", group_affinity="worker_group_User", group_rank_affinity=0).wait()
    assert by_rank.get() == "made here"
    waiting = channel.get(async_op=True)
    cw.kill(group)
    with pytest.raises(ChannelBrokenError):
        waiting.wait()


def test_detached_channel_outlives_the_worker_that_created_it(cluster):
    group = cw.launch(cluster)
    (channel,) = group.make("ours", detached=True).wait()
    cw.kill(group)
    with pytest.raises(WorkerDiedError):
        group.pid().wait()
    channel.put("more")
    assert [channel.get(), channel.get()] == ["made here", "more"]
    assert cluster.runtime.groups.get(cluster.namespace, "channel@ours") is channel._backend._group


def test_channel_of_workers_that_older_code_launched_itself_has_replicas(cluster):
    name, three = "assembled", NodePlacementStrategy([0] * 3)
    hosts = ChannelWorker.create_group(maxsize=2).launch(
        cluster=cluster, name=name, placement_strategy=three, max_concurrency=2**31 - 1
    )
    with pytest.raises(ValueError, match="assembled"):
        ChannelWorker.create_group().launch(cluster, name=name, placement_strategy=three)
    with pytest.raises(UsageError, match="'a/b' cannot be a channel's name"):
        ChannelWorker.create_group().launch(cluster, name="a/b")
    actors = {host.rank: host.worker for host in hosts.worker_info_list}
    channel = Channel()
    channel._initialize(
        channel_name=name,
        channel_worker_group=hosts,
        channel_worker_actor=actors[0],
        current_worker=Worker.current_worker,
        maxsize=2,
        channel_actors=actors,
    )
    assert channel._distributed
    assert list(channel._channel_actors_by_rank) == [0, 1, 2]
    group = cw.launch(cluster)
    group.put(channel, ["theirs"], key="k").wait()
    connected = Channel.connect(name, Worker.current_worker)
    assert (connected.maxsize, connected.get("k")) == (2, "theirs")


def test_calls_of_one_worker_share_a_local_channel_that_came_as_an_argument(cluster):
    channel = Channel.create("theirs", local=True)
    group = cw.launch(cluster, 2)
    group.execute_on(1).put(channel, ["one", "two"]).wait()
    assert group.execute_on(1).get(channel, 2).wait() == [["one", "two"]]
    assert channel.empty()


def test_wrong_uses_of_a_channel_are_named_errors(cluster):
    with pytest.raises(UsageError, match=r"\(name, group_affinity, group_rank_affinity, maxsize\)"):
        Channel.create("old", "rollout_group")
    with pytest.raises(GroupNotFoundError, match="there is no channel 'nowhere'"):
        Channel.connect("nowhere")
    channel = Channel.create("fine")
    with pytest.raises(SerializationError):
        channel.put(lambda: (yield), key="x") if False else channel.put(sys._getframe())
    with pytest.raises(UsageError, match="cannot be a channel's key"):
        channel.put(1, key=object())
    with pytest.raises(UsageError, match="weight"):
        channel.put(1, -1)


@pytest.mark.usefixtures("no_cluster")
def test_another_driver_can_connect_to_a_channel(local_cluster):
    local = local_cluster(1)
    cluster = local.cluster()
    channel = Channel.create("shared")
    code = f"""
        from rlinf_actors import Channel, Cluster
        cluster = Cluster(head={local.head!r}, namespace={cluster.namespace!r})
        channel = Channel.connect("shared")
        channel.put(channel.get() + 1)
        held = channel.get("held", async_op=True)
        held._on_done(lambda: channel._backend._io.loop.stop())
        print("ready", flush=True)
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    """
    channel.put(1)
    channel.put("back", key="held")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**lw.SCRIPT_ENV, **local.driver_env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ready\n", done.stderr
    assert channel.get() == 2
    assert channel.get("held", timeout=pace.PATIENCE_S) == "back"


@pytest.mark.usefixtures("no_cluster")
def test_key_of_a_distributed_channel_is_on_the_node_of_its_first_use(local_cluster):
    cluster = local_cluster(2).cluster()
    channel = Channel.create("everywhere", distributed=True)
    group = lw.on_every_node(cluster, cw.User)
    group.execute_on(1).put(channel, ["far"], key="theirs").wait()
    channel.put("near", key="mine")
    assert channel.get("theirs") == "far"
    assert list(channel._backend._homes.values()) == [0, 1]
    group.execute_on(1).put(channel, ["again"], key="theirs").wait()
    assert "'theirs': ['again']" in str(channel)
    os.kill(cw.host_pid(channel, 1), signal.SIGKILL)
    with pytest.raises(ChannelBrokenError):
        [channel.get("theirs") for _ in range(2)]
    assert channel.get("mine") == "near"


@pytest.mark.usefixtures("no_cluster")
def test_a_closed_distributed_channel_is_found_until_its_last_item_is_taken(local_cluster):
    cluster = local_cluster(2).cluster()
    channel = Channel.create("everywhere", distributed=True)
    group = lw.on_every_node(cluster, cw.User)
    group.execute_on(1).put(channel, ["far"], key="theirs").wait()
    channel.close()
    assert group.execute_on(0).get(channel, key="theirs").wait() == [["far"]]  # node 0's replica is empty and asked
    channel._backend._group.gone.wait(pace.PATIENCE_S)
    assert str(channel) == "Channel 'everywhere' (ended)"


def test_channel_handle_can_be_pickled(cluster):
    channel = Channel.create("pickled")
    channel.put(1)
    assert pickle.loads(pickle.dumps(channel)).get() == 1  # noqa: S301 - our own
