"""Streaming calls at the caller: merging, credit, ends and errors."""

from __future__ import annotations

import asyncio
import collections
import gc
import threading

import group_kit
import pytest

from rlinf_actors.errors import SerializationError, UsageError, WorkerDiedError
from rlinf_actors.group.stream import WINDOW
from rlinf_actors.wire import frames
from rlinf_actors.worker.worker import Worker


async def test_ranks_are_merged_and_each_keeps_its_order(world):
    stream = world.group.watch()
    ids = [(await rank.call()).id for rank in world.ranks]
    for n in range(4):
        for rank, call in zip(world.ranks, ids, strict=True):
            rank.item(call, n)
    for rank, call in zip(world.ranks, ids, strict=True):
        rank.ok(call)
    got = [pair async for pair in stream]
    assert len(got) == 12
    for rank in range(3):
        assert [value for who, value in got if who == rank] == [0, 1, 2, 3]


async def test_credit_is_given_only_for_taken_items(world):
    stream = world.group.execute_on(0).watch()
    opened = await world.ranks[0].call()
    assert opened.window == WINDOW
    for n in range(WINDOW):
        world.ranks[0].item(opened.id, n)
    items = stream.__aiter__()
    for _ in range(WINDOW // 2 - 1):
        await items.__anext__()
    world.group.execute_on(0).stop()
    assert isinstance(await world.ranks[0].call(1), frames.Call)
    await items.__anext__()
    assert await world.ranks[0].call(2) == frames.Credit(opened.id, WINDOW // 2)
    await items.aclose()
    assert await world.ranks[0].call(3) == frames.Cancel(opened.id)


async def test_unreadable_item_ends_the_stream_and_names_its_rank(world):
    stream = world.group.execute_on(1).watch()
    opened = await world.ranks[1].call()
    world.ranks[1].say(frames.Item(opened.id), [b"P" + b"cno_such_module\nX\n."])
    with pytest.raises(SerializationError, match=r"an item of watch\(\) from arms:1 on n1 .*no_such_module") as caught:
        async for _ in stream:
            pass
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert await world.ranks[1].call(1) == frames.Cancel(opened.id)


async def test_leaving_the_loop_ends_the_generators(world):
    ids = []
    stream = world.group.watch()
    for rank in world.ranks:
        ids.append((await rank.call()).id)
        rank.item(ids[-1], 1)
    async for _ in stream:
        break
    del stream
    gc.collect()
    for rank, call in zip(world.ranks, ids, strict=True):
        assert await rank.call(1) == frames.Cancel(call)


async def test_dropped_stream_without_a_reader_ends(world):
    stream = world.group.execute_on(0).watch()
    opened = await world.ranks[0].call()
    del stream
    gc.collect()
    assert await world.ranks[0].call(1) == frames.Cancel(opened.id)


async def test_stream_collected_while_an_item_arrives_ends(world):
    """The garbage collector may run anywhere, even while the thread holds the stream's lock."""

    class Collects(collections.deque):
        def append(self, item):
            gc.collect()
            super().append(item)

    stream = world.group.execute_on(0).watch()
    opened = await world.ranks[0].call()
    stream._feed._items = Collects()
    stream.itself = stream
    gc.disable()  # the collector must run only in append()
    try:
        del stream
        world.ranks[0].item(opened.id, 1)
        assert await world.ranks[0].call(1) == frames.Cancel(opened.id)
    finally:
        gc.enable()


async def test_error_of_a_rank_ends_the_iteration_and_the_other_ranks(world):
    stream = world.group.watch()
    ids = [(await rank.call()).id for rank in world.ranks]
    world.ranks[1].item(ids[1], "first")
    world.ranks[1].raises(ids[1], ValueError("dry"))
    items = stream.__aiter__()
    assert await items.__anext__() == (1, "first")
    with pytest.raises(ValueError, match="arms:1 on n1 raised ValueError: dry"):
        await items.__anext__()
    for rank in (0, 2):
        assert await world.ranks[rank].call(1) == frames.Cancel(ids[rank])


async def test_death_of_a_rank_ends_the_stream(world):
    stream = world.group.watch()
    for rank in world.ranks:
        await rank.call()
    asyncio.get_running_loop().call_soon(world.dies, 2)
    with pytest.raises(WorkerDiedError):
        await stream.__aiter__().__anext__()


async def test_close_wakes_the_waiting_reader(world):
    stream = world.group.execute_on(0).watch()
    await world.ranks[0].call()
    asyncio.get_running_loop().call_soon(stream.close)
    assert [pair async for pair in stream] == []
    await stream.aclose()


async def test_cancelling_the_reader_ends_the_generators(world):
    async def read():
        async for _ in world.group.execute_on(0).watch():
            pass

    task = asyncio.create_task(read())
    opened = await world.ranks[0].call()
    task.cancel()
    await asyncio.wait([task])
    assert await world.ranks[0].call(1) == frames.Cancel(opened.id)


async def test_plain_iteration_blocks_only_its_thread(world):
    stream = world.group.execute_on(0, 1).watch()
    reading = asyncio.create_task(asyncio.to_thread(list, stream))
    for rank in world.ranks[:2]:
        call = (await rank.call()).id
        for n in range(3):
            rank.item(call, n)
        rank.ok(call)
    assert sorted(await reading) == [(rank, n) for rank in range(2) for n in range(3)]


async def test_worker_that_iterates_its_own_stream_gets_an_error(world):
    """Blocking the thread that serves the stream would never end."""
    world.runtime.serving_thread, world.runtime.worker_id = threading.get_ident(), "id-1"
    stream = world.group.watch()
    with pytest.raises(UsageError, match=r"arms:1 waits for its own watch\(\), which would never end"):
        list(stream)
    stream.close()


async def test_stream_of_a_concurrent_method_may_be_iterated_in_its_worker():
    class Watched(Worker):
        @Worker.concurrent()
        def watch(self):
            yield 1

        @Worker.concurrent()
        def health(self): ...

    world = group_kit.World(1, Watched)
    world.runtime.worker_id = "id-0"
    watching, asking = world.group.watch(), world.group.health()

    def iterate():
        world.runtime.serving_thread = threading.get_ident()
        return list(watching), asking.wait()

    reading = asyncio.create_task(asyncio.to_thread(iterate))
    stream = await world.ranks[0].call()
    world.ranks[0].item(stream.id, "x")
    world.ranks[0].ok(stream.id)
    world.ranks[0].ok((await world.ranks[0].call(1)).id, "well")
    assert await reading == ([(0, "x")], ["well"])
