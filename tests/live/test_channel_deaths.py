"""Processes that are killed while they use a channel: waiting calls go on or fail, and no other item is lost."""

from __future__ import annotations

import os
import pickle
import signal

import channel_workers as cw
import pace
import pytest

from rlinf_actors import Channel, ChannelBrokenError, ChannelClosedError, WorkerDiedError

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("module_leak_check")]

MIB = 1 << 20


def test_item_of_a_dead_consumer_goes_to_the_next_marked_as_redelivered(cluster):
    channel = Channel.create("items")
    group = cw.launch(cluster, 1)
    channel.put("first")
    channel.put("second")
    assert group.hold(channel).wait() == [True]
    waiting = [channel.get(async_op=True), channel.get(async_op=True)]
    assert waiting[0].wait() == "second"
    assert not waiting[0].redelivered
    cw.kill(group)
    assert waiting[1].wait(pace.PATIENCE_S) == "first"
    assert waiting[1].redelivered


def test_items_of_a_dead_producer_stay_in_the_channel(cluster):
    channel = Channel.create("left")
    group = cw.launch(cluster)
    group.put_async(channel, list(range(100))).wait()
    cw.kill(group)
    with pytest.raises(WorkerDiedError):
        group.pid().wait()
    channel.put("mine")
    assert [channel.get() for _ in range(101)] == [*range(100), "mine"]


def test_waiting_get_of_a_dead_consumer_takes_no_item(cluster):
    channel = Channel.create("gone")
    group = cw.launch(cluster)
    [pid] = group.pid().wait()
    blocked = group.get_behind_a_put(channel)
    assert channel.get("ready") == "asked"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        blocked.wait()
    channel.put("for me")
    assert channel.get(timeout=pace.PATIENCE_S) == "for me"


def test_death_of_the_host_fails_the_calls_of_all_users(cluster):
    channel = Channel.create("doomed", maxsize=1)
    group = cw.launch(cluster)
    channel.put(0, key="full")
    asked = Channel.create("asked")
    blocked = group.error_of_get(channel, asked)
    assert asked.get() == "waiting"
    works = [channel.get(async_op=True), channel.get_batch(3, async_op=True), channel.put(1, key="full", async_op=True)]
    os.kill(cw.host_pid(channel), signal.SIGKILL)
    for work in works:
        with pytest.raises(ChannelBrokenError, match="process that held it died"):
            work.wait()
    assert blocked.wait() == ["ChannelBrokenError"]
    for ask in (channel.get_nowait, channel.qsize, lambda: channel.put(1)):
        with pytest.raises(ChannelBrokenError):
            ask()
    (late,) = cw.launch(cluster, name="late").error_of_get(channel).wait()
    assert late == "ChannelBrokenError"


def test_consumer_killed_between_request_and_item_loses_no_item(cluster):
    channel = Channel.create("between")
    group = cw.launch(cluster)
    [pid] = group.pid().wait()
    lost = group.get_behind_a_put(channel)
    assert channel.get("ready") == "asked"
    os.kill(pid, signal.SIGSTOP)  # this consumer sends a request and never sees the answer
    channel.put("first")
    channel.put("second")
    assert channel.qsize() == 1
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        lost.wait()
    gets = [channel.get(async_op=True), channel.get(async_op=True)]
    got = [(work.wait(), work.redelivered) for work in gets]
    assert sorted(got) == [("first", True), ("second", False)]


def test_item_of_a_dead_consumer_is_the_first_of_the_queue_again(cluster):
    channel = Channel.create("head")
    group = cw.launch(cluster)
    for n in range(3):
        channel.put(n, weight=1)
    assert group.hold(channel).wait() == [True]
    batch = channel.get_batch(3, async_op=True)
    cw.kill(group)
    assert batch.wait() == [0, 1, 2]
    assert batch.redelivered


def test_waiting_put_of_a_killed_producer_is_completed(cluster):
    channel = Channel.create("full", maxsize=1)
    group = cw.launch(cluster)
    [pid] = group.pid().wait()
    channel.put("mine")
    blocked = group.put_and_wait(channel, "theirs")
    assert channel.get("ready") == "asked"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        blocked.wait()
    also = channel.put("also mine", async_op=True)
    assert [channel.get() for _ in range(3)] == ["mine", "theirs", "also mine"]
    also.wait()


@pytest.mark.parametrize("shared", ["0", ""], ids=["sockets", "shared memory"])
def test_item_of_a_producer_killed_while_sending_arrives_whole_or_not_at_all(cluster, shared):
    channel = Channel.create("large")
    producer = cw.launch(cluster, env_vars={"RLINF_ACTORS_SHARED_MEMORY": shared} if shared else {})
    [pid] = producer.pid().wait()
    producer.put(channel, ["before"]).wait()
    host = cw.host_pid(channel)
    blocked = producer.put_array(channel, 256 * MIB)
    assert channel.get("ready") == "soon"
    os.kill(host, signal.SIGSTOP)  # what the kernel's buffers do not hold stays in the producer
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        blocked.wait()
    os.kill(host, signal.SIGCONT)
    channel.put("mine")
    assert channel.get() == "before"
    got = channel.get()
    if type(got) is not str:  # it had arrived as a whole
        assert got.sum() == got.nbytes == 256 * MIB
        got = channel.get()
    assert got == "mine"
    assert channel.empty()


def test_death_of_the_host_fails_every_kind_of_operation(cluster):
    channel, asked = Channel.create("doomed", maxsize=1), Channel.create("asked")
    channel.put(0, key="full")
    group = cw.launch(cluster, 1, cw.Awaiting)
    ends = group.ends(channel, asked)
    assert asked.get() == "waiting"
    os.kill(cw.host_pid(channel), signal.SIGKILL)
    assert ends.wait() == [["ChannelBrokenError"] * 4]


def test_loop_over_a_channel_raises_when_its_creator_is_killed(cluster):
    asked = Channel.create("asked")
    makers, users = cw.launch(cluster, name="makers"), cw.launch(cluster, name="users")
    (channel,) = makers.make("theirs").wait()  # holds one item
    loop = users.take_all(channel, asked)
    assert asked.get(timeout=pace.PATIENCE_S) == "made here"
    channel.put("left", key="nobody's")
    cw.kill(makers)
    (taken, error) = loop.wait(pace.PATIENCE_S)[0]
    assert taken == ["made here"]
    assert error.startswith("ChannelBrokenError: channel 'theirs' is broken, and its items are gone")
    assert "its owner ended: worker makers:0" in error
    with pytest.raises(ChannelBrokenError):
        channel.close()


@pytest.mark.parametrize(("end", "kind"), [("closed", ChannelClosedError), ("killed", ChannelBrokenError)])
def test_handle_used_after_the_channels_end_says_how_it_ended(cluster, end, kind):
    channel = Channel.create("over")
    pickled = pickle.dumps(channel)
    if end == "closed":
        channel.close()
    else:
        os.kill(cw.host_pid(channel), signal.SIGKILL)
    channel._backend._group.gone.wait(pace.PATIENCE_S)
    with pytest.raises(kind, match="ended before this process first used it"):
        pickle.loads(pickled).get()  # noqa: S301 - our own bytes
