"""Takes of channels between real processes, which are killed and stopped during takes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import channel_workers as cw
import live_workers as lw
import pace
import pytest

from rlinf_actors import Channel, ItemNotProcessedError, WorkerDiedError

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("module_leak_check")]


def die_with_the_head(cluster, channel, name, key=Channel.DEFAULT_KEY):
    group = cw.launch(cluster, name=name)
    with pytest.raises(WorkerDiedError):
        group.take_and_die(channel, key=key).wait(pace.PATIENCE_S)


@pytest.mark.parametrize("distributed", [False, True])
def test_item_is_undeliverable_after_three_deaths_during_takes(cluster, distributed):
    channel = Channel.create("deadly", distributed=distributed)
    channel.put("bad", key="k")  # alone: each take waits for the item, whoever hears first of the consumer's death
    for n in range(3):
        die_with_the_head(cluster, channel, f"victims{n}", "k")
    with pytest.raises(
        ItemNotProcessedError,
        match=r"'deadly', key 'k', was delivered 3 times .* consumer was victims2:0 on .*: its process ended",
    ) as caught:
        channel.take("k").__enter__()
    assert (caught.value.key, caught.value.deliveries) == ("k", 3)
    channel.put("good", key="k")
    take = channel.take("k")
    with take as item:
        assert (item, take.deliveries) == ("good", 1)
    assert "and 1 undeliverable" in str(channel)
    [left] = channel.undeliverable("k", drain=True)
    assert (left.item, left.deliveries) == ("bad", 3)
    assert left.consumer.startswith("victims2:0 on ")
    assert channel.undeliverable("k") == []
    channel.close()
    channel._backend._group.gone.wait(pace.PATIENCE_S)


@pytest.mark.usefixtures("no_cluster")
def test_takes_work_for_a_key_on_another_node(local_cluster):
    cluster = local_cluster(2).cluster()
    channel = Channel.create("everywhere", distributed=True, max_deliveries=1)
    group = lw.on_every_node(cluster, cw.User)
    group.execute_on(1).put(channel, ["bad"], key="far").wait()
    with pytest.raises(WorkerDiedError):
        group.execute_on(0).take_and_die(channel, key="far").wait(pace.PATIENCE_S)
    with pytest.raises(ItemNotProcessedError, match="worker_group_User:0 on "):
        channel.take("far", timeout=pace.PATIENCE_S).__enter__()
    channel.put("good", key="far")
    with channel.take("far") as item:
        assert item == "good"
    assert list(channel._backend._homes.values()) == [1]
    assert [left.item for left in channel.undeliverable("far")] == ["bad"]
    assert channel.undeliverable() == []


def test_item_that_a_dead_consumer_processed_goes_to_the_next(cluster):
    channel = Channel.create("items")
    channel.put("x")
    die_with_the_head(cluster, channel, "victims")
    take = channel.take(timeout=pace.PATIENCE_S)
    with take as item:
        assert (item, take.deliveries) == ("x", 2)


def test_stopped_consumer_keeps_its_item(cluster):
    channel, told = Channel.create("items"), Channel.create("told")
    group = cw.launch(cluster)
    [pid] = group.pid().wait()
    channel.put("x")
    processing = group.take_until(channel, told)
    assert told.get(timeout=pace.PATIENCE_S) == "x"
    os.kill(pid, signal.SIGSTOP)
    told.put("go", key="done")
    assert channel.empty()
    assert not processing.done()
    os.kill(pid, signal.SIGCONT)
    assert processing.wait(pace.PATIENCE_S) == [1]
    channel.close()
    channel._backend._group.gone.wait(pace.PATIENCE_S)


def test_consumers_process_a_closed_channel_to_its_end(cluster):
    """Other consumers take the last failed items, for which they wait after the close."""
    channel = Channel.create("work", max_deliveries=2)
    for item in [*range(20), -1, -2]:
        channel.put(item)
    processing = [cw.launch(cluster, name=f"c{n}").process(channel) for n in range(3)]
    channel.close()
    ended = [work.wait(pace.PATIENCE_S)[0] for work in processing]
    assert sorted(item for done, _ in ended for item in done) == list(range(20))
    assert sorted(text for _, told in ended for text in told) == [
        "ValueError: -1 is negative",
        "ValueError: -2 is negative",
    ]
    assert sorted(left.item for left in channel.undeliverable(drain=True)) == [-2, -1]
    channel._backend._group.gone.wait(pace.PATIENCE_S)


@pytest.mark.usefixtures("no_cluster")
def test_process_that_exits_in_a_take_returns_the_item(local_cluster):
    local = local_cluster(1)
    cluster = local.cluster()
    channel = Channel.create("shared")
    channel.put("x")
    code = f"""
        from rlinf_actors import Channel, ChannelBrokenError, Cluster
        cluster = Cluster(head={local.head!r}, namespace={cluster.namespace!r})
        channel = Channel.connect("shared")
        try:
            with channel.take() as item:
                cluster.shutdown()
        except ChannelBrokenError as error:
            print("told", item)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**lw.SCRIPT_ENV, **local.driver_env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "told x\n", done.stderr
    take = channel.take(timeout=pace.PATIENCE_S)
    with take as item:
        assert (item, take.deliveries) == ("x", 2)


def test_event_loop_that_ends_in_a_take_returns_the_item(cluster):
    channel = Channel.create("looped")
    channel.put("x")

    async def ends():
        entered, kept = asyncio.Event(), []

        async def consume():
            async with channel.take():
                entered.set()
                await asyncio.Event().wait()

        kept.append(asyncio.ensure_future(consume()))
        await entered.wait()

    asyncio.run(ends())
    take = channel.take(timeout=pace.PATIENCE_S)
    with take as item:
        assert (item, take.deliveries) == ("x", 2)
