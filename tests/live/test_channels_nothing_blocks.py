"""No operation of a channel blocks an event loop, although the head is stopped: blockbuster watches the loops."""

from __future__ import annotations

import os
import signal

import channel_workers as cw
import pace
import pytest

from rlinf_actors import Channel, UsageError

pytestmark = pytest.mark.live

ENDED = {
    "take": "there",
    "put": "None",
    "put_nowait": "None",
    "get": "put",
    "get_nowait": "nowait",
    "get_batch": "[]",
    "qsize": "0",
    "empty": "True",
    "full": "False",
    "undeliverable": "[]",
    "drain": "[]",
    "loop": "looped",
    "maxsize": "5",
    "close": "None",
}


@pytest.fixture
def local(local_cluster):
    return local_cluster(1, options=pace.timers(lease_s=30.0))


@pytest.fixture
def cluster(local):
    return local.cluster()


@pytest.fixture
def channel(cluster):
    """A handle that came from the worker that made the channel, with two items."""
    (channel,) = cw.launch(cluster, name="makers").make_with("theirs", ["there", "looped"], maxsize=5).wait()
    return channel


def test_channel_operations_do_not_block_an_async_worker(local, cluster, channel):
    group = cw.launch(cluster, 1, cw.Awaiting, name="asyncs")
    (ended,) = group.nothing_blocks(channel, local.nodes[0].pid).wait(pace.PATIENCE_S)
    made = [ended.pop(maker) for maker in ("create_channel", "create_channel beside", "connect_channel")]
    assert made == ["<Channel 'of_a_worker'>", "<Channel 'older'>", "<Channel 'theirs'>"]
    assert ended.pop("describe").startswith("Channel 'theirs': ")
    assert ended.pop("repr") == "<Channel 'theirs'>"
    assert ended == ENDED


async def test_channel_operations_do_not_block_a_drivers_loop(local, cluster, channel):
    makers = {
        "create": lambda: Channel.create("of_a_driver", async_op=True),
        "connect": lambda: Channel.connect("theirs", async_op=True),
    }
    ended = await cw.nothing_blocks(channel, local.nodes[0].pid, makers)
    assert [ended.pop(maker) for maker in makers] == ["<Channel 'of_a_driver'>", "<Channel 'theirs'>"]
    assert ended.pop("describe").startswith("Channel 'theirs': ")
    assert ended.pop("repr") == "<Channel 'theirs'>"
    assert ended == ENDED


def test_operations_that_wait_for_a_stopped_head_end_with_the_cluster(local, cluster, channel):
    os.kill(local.nodes[0].pid, signal.SIGSTOP)
    try:
        works = [
            channel.put(1, async_op=True),
            channel.get(async_op=True),
            channel.describe(async_op=True),
            channel.close(async_op=True),
            Channel.create("never", async_op=True),
            Channel.connect("theirs", async_op=True),
        ]
        cluster.shutdown()
        for work in works:
            with pytest.raises(UsageError):
                work.wait(pace.PATIENCE_S)
    finally:
        os.kill(local.nodes[0].pid, signal.SIGCONT)
