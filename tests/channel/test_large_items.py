"""Large items in shared memory: one copy from producer to consumer, and items that outlive their producer."""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
from channel_kit import World, settle

from rlinf_actors.errors import ConnectionLostError
from rlinf_actors.net import shared_memory
from rlinf_actors.net.further_arenas import owned
from rlinf_actors.net.shared_memory import Arena, kept

np = pytest.importorskip("numpy")

MIB = 1 << 20


@pytest.fixture
def arena():
    """The memory of all processes of the world, since all of them are this one."""
    made = Arena(64 * MIB)
    made.children = []

    def another(limit):
        made.children.append(Arena(limit))
        return made.children[-1]

    made.another = another
    yield made
    for one in [made, *made.children]:
        one.close()


@pytest.fixture
def world(arena):
    async def make():
        world = World(memory=arena, keep=functools.partial(owned, copy=arena.copy))
        one, two = world.user("a"), world.user("b")
        for n in range(3):  # the first items, with which the connections open what they need
            await one.put(np.full(MIB, n, np.uint8))
            await two.get()
            gc.collect()
            await settle()
        return world, one, two

    return make


async def test_a_large_item_is_copied_once(world, monkeypatch):
    _, one, two = await world()
    copies = []
    copy = shared_memory.copy
    monkeypatch.setattr(shared_memory, "copy", lambda *args: copies.append(args[2]) or copy(*args))
    for n in range(10):
        await one.put(np.full(MIB, n, np.uint8))
        item = await two.get()
        assert item.sum() == n * MIB
        del item
    assert copies == [MIB] * 10


async def test_blocks_of_a_steady_stream_are_used_again(world, arena):
    _, one, two = await world()
    given = arena.children[0]
    works = []
    for n in range(200):
        works.append(one.put(np.full(MIB, n % 256, np.uint8)))
        if n >= 8:
            assert (await two.get())[-1] == (n - 8) % 256
            await settle()
    assert given.stores > 190
    assert given._touched <= 12 * MIB
    for _ in range(8):
        await two.get()
    gc.collect()
    await settle()
    assert given.used == arena.used == 0


async def test_an_item_outlives_its_producer_and_its_first_consumer(world, arena):
    scene, one, two = await world()
    await one.put(np.full(MIB, 7, np.uint8))
    [item] = scene.queue.waiting(scene.queue.in_use()[0])
    assert kept(item.value[1]) is not None
    scene.die(one)
    unread = two.get()
    await settle()
    scene.die(two)
    del unread
    three = scene.user("c")
    work = three.get()
    assert (await work).sum() == 7 * MIB
    assert work.redelivered


async def test_items_of_a_lost_connection_stay_as_they_were(world, arena):
    scene, one, two = await world()
    puts = [one.put(np.full(MIB, n, np.uint8)) for n in range(8)]
    await settle()
    scene.lose(one)
    await settle()
    for put in puts:
        with contextlib.suppress(ConnectionLostError):  # it may or may not have succeeded
            await put
    del puts
    gc.collect()
    for n in range(8):
        await one.put(np.full(MIB, 100 + n, np.uint8))
    found = [(await two.get()) for _ in range(scene.queue.size(scene.queue.in_use()[0]))]
    assert [int(item[0]) for item in found] == [*range(8), *range(100, 108)]
    assert all((item == item[0]).all() for item in found)
    assert len(arena.children) == 2


async def test_a_consumers_writes_do_not_reach_the_next_one(world):
    scene, one, two = await world()
    await one.put(np.full(MIB, 1, np.uint8))
    work = two.get()
    await settle()
    item = work._decode(work._value)[0]  # arrived, not acknowledged
    item[:] = 9
    scene.die(two)
    three = scene.user("c")
    assert (await three.get()).sum() == MIB
