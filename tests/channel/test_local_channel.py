"""local=True: threads and tasks of one process, without a cluster."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import threading
import weakref

import pytest

from rlinf_actors import CallTimeoutError, Channel, ChannelClosedError, UsageError, WeightedItem
from rlinf_actors.channel import local as local_module
from rlinf_actors.channel.key_encoding import key_bytes, key_of
from rlinf_actors.channel.local import LocalChannel


def local(maxsize=0):
    return Channel.create("here", maxsize, local=True)


def test_items_are_the_same_objects_in_order():
    channel = local()
    item = object()
    channel.put(item)
    channel.put(2, weight=1.5)
    assert channel.qsize() == 2
    assert str(channel).endswith("2 (weight 1.5)]")
    assert channel.get() is item
    assert channel.get() == 2
    assert channel.empty()
    assert repr(channel) == "<Channel 'here', local>"


def test_nowait_timeout_and_close():
    channel = local(1)
    with pytest.raises(asyncio.QueueEmpty):
        channel.get_nowait()
    channel.put_nowait(1)
    assert channel.full()
    with pytest.raises(asyncio.QueueFull):
        channel.put_nowait(2)
    with pytest.raises(CallTimeoutError, match=r"put\(\) into .* within 0\.01 s: the channel had no room for it"):
        channel.put(2, timeout=0.01)
    with pytest.raises(CallTimeoutError, match=r"get\(\) from .* within 0\.01 s: the channel had no item for it"):
        channel.get("other", timeout=0.01)
    with pytest.raises(CallTimeoutError, match=r"within 0\.01 s: the channel had too few items for it"):
        channel.get_batch(5, "other", timeout=0.01)
    channel.close()
    assert channel.get() == 1
    with pytest.raises(ChannelClosedError):
        channel.get()
    with pytest.raises(ChannelClosedError):
        channel.put(1)


def test_threads_that_block_lose_and_double_nothing():
    channel, got = local(2), []

    def put(first):
        for n in range(first, first + 200):
            channel.put(n)

    def get():
        for _ in range(200):
            got.append(channel.get())

    threads = [threading.Thread(target=put, args=(n * 200,)) for n in range(3)]
    threads += [threading.Thread(target=get) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(600))


async def test_a_cancelled_task_takes_no_item():
    channel = local()
    waiting = asyncio.ensure_future(channel.get(async_op=True).async_wait())
    await asyncio.sleep(0)
    channel.put("x")
    waiting.cancel()
    await asyncio.wait([waiting])
    channel.put("y")
    dropped = channel.get(async_op=True)
    assert dropped.done()
    del dropped
    channel.close()
    assert [item async for item in channel] == ["x", "y"]


def test_a_local_channel_batches_by_weight():
    channel = local()
    for n in range(3):
        channel.put(n, weight=1)
    assert channel.get_batch(2) == [0, 1]
    assert channel.get_batch(0.5) == []
    waiting = channel.get_batch(2, async_op=True)
    assert not waiting.done()
    channel.put(3, weight=1)
    assert waiting.wait() == [2, 3]


def test_then_follows_and_passes_errors_on():
    channel = local()
    chained = channel.get(async_op=True).then(lambda word: channel.put(word, async_op=True), "after")
    channel.put("first")
    chained.wait()
    assert channel.get() == "after"
    failed = channel.get(async_op=True).then(print)
    channel.close()
    with pytest.raises(ChannelClosedError):
        failed.wait()


def sent(channel):
    return pickle.loads(pickle.dumps(channel))  # noqa: S301 - our own bytes


@pytest.fixture
def other_process(monkeypatch):
    """From now on the handles of this process come from another one."""
    monkeypatch.setattr(local_module, "_registered", weakref.WeakValueDictionary())


def test_handles_of_a_local_channel_share_it_within_its_process():
    channel = local(2)
    copy = sent(channel)
    assert copy.is_local
    copy.put(1)
    assert channel.get() == 1
    assert sent(copy).maxsize == 2
    assert channel.empty()


def test_a_local_channel_has_items_of_its_own_in_another_process(request, caplog):
    channel = local()
    channel.put("here")
    handle = pickle.dumps(channel)
    request.getfixturevalue("other_process")
    with caplog.at_level("INFO", "rlinf_actors"):
        first = pickle.loads(handle)  # noqa: S301
    assert "channel 'here' was made with local=True in another process" in caplog.text
    assert first.empty()
    first.put("there")
    del first
    gc.collect()
    assert pickle.loads(handle).get() == "there"  # noqa: S301 - a later call of a worker gets what an earlier one put
    assert channel.get() == "here"


@pytest.mark.usefixtures("other_process")
def test_a_local_channel_that_is_empty_and_unused_is_freed():
    channel = sent(local())
    gone = weakref.ref(channel._made)
    channel.put(1)
    channel.get()
    waiting = channel.get(async_op=True)
    del channel, waiting
    gc.collect()
    assert gone() is None


def test_older_code_makes_a_channel_of_a_local_channel():
    channel = Channel()
    with pytest.raises(UsageError, match=r"make one by Channel.create\(\)"):
        channel.put(1)
    channel._initialize("old", None, None, None, local_channel=LocalChannel(maxsize=1), maxsize=1)
    channel.put(1)
    assert (channel.full(), channel.is_local, channel.maxsize, channel._distributed) == (True, True, 1, False)
    with pytest.raises(UsageError, match="'x' has no process that holds it"):
        Channel()._initialize("x", None)


def test_weighted_items_compare_by_weight():
    items = [WeightedItem(2, "b"), WeightedItem(1, {"not": "comparable"}), WeightedItem(1, {})]
    assert [item.weight for item in sorted(items)] == [1, 1, 2]
    assert WeightedItem(weight=1, item="a") == WeightedItem(weight=1, item="b")


def test_invalid_arguments_are_refused():
    for maxsize in ("group", 1.5, True, None):
        with pytest.raises(UsageError, match="must be an int"):
            Channel.create("x", maxsize, local=True)
    for name in ("", "a/b", None):
        with pytest.raises(UsageError, match="cannot be a channel's name"):
            Channel.create(name, local=True)
    channel = local()
    for take in (channel.get, channel.get_batch):
        with pytest.raises(ValueError, match="the timeout is nan"):
            take(timeout=math.nan)
    with pytest.raises(UsageError, match="the target weight is NaN"):
        channel.get_batch(math.nan)


@pytest.mark.parametrize("key", ["a", 1, -1, 2.5, None, b"x", ("a", 1, (None, b"y")), ()])
def test_keys_survive_encoding(key):
    assert key_of(key_bytes(key)) == key


def test_equal_keys_are_equal_bytes():
    assert key_bytes(1) == key_bytes(1.0) == key_bytes(True)
    assert key_bytes(("a" * 2, 1)) == key_bytes(("aa", True))
    assert len({key_bytes(key) for key in ("1", 1, b"1", None, (1,), ((1,),), 1.5)}) == 7


@pytest.mark.parametrize("key", [[1], {}, object(), 1 << 70, ("a", [1])])
def test_other_keys_are_refused(key):
    with pytest.raises(UsageError, match="cannot be a channel's key"):
        key_bytes(key)


def test_a_loop_takes_items_until_the_channel_is_closed():
    channel = Channel.create("looped", local=True)
    for n in range(3):
        channel.put(n)
    channel.close()
    assert list(channel) == [0, 1, 2]


def test_timed_waits_share_one_thread():
    channel = local(1)
    before = set(threading.enumerate())
    gets = [channel.get("empty", timeout=0.2, async_op=True) for _ in range(50)]
    channel.put(1)
    puts = [channel.put(2, timeout=0.2, async_op=True) for _ in range(50)]
    assert len(set(threading.enumerate()) - before) <= 1
    for work in gets + puts:
        with pytest.raises(CallTimeoutError):
            work.wait(20)
    assert channel.get(timeout=20) == 1
