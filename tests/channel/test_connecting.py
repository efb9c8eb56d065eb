"""Requests of a handle whose channel is not found yet, and of keys whose replica is not known yet."""

from __future__ import annotations

import asyncio
import gc
import pickle

import pytest
from channel_kit import World, settle

from rlinf_actors import CallTimeoutError, Channel, ChannelClosedError, ClusterTimeoutError, UsageError
from rlinf_actors.channel import connecting
from rlinf_actors.channel.client import RemoteChannel
from rlinf_actors.errors import GroupNotFoundError
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames


class Here:
    """A process that has been given a handle. `found` says when the head answers, and what."""

    def __init__(self, monkeypatch, namespace="ns"):
        self.world = World()
        self.user, self.other = self.world.user("a"), self.world.user("b")
        self.user.group.detail = '{"maxsize": 7}'
        self.user.namespace = "ns"
        self.user.groups = self
        self.searches = 0
        self.found = asyncio.get_running_loop().create_future()
        here = connecting.JobMember(self.user, None, 0, "a:0 on n1")
        monkeypatch.setattr(connecting, "member", lambda: here)
        self.channel = pickle.loads(pickle.dumps(Channel("q", namespace, None)))  # noqa: S301 - our own bytes

    async def find(self, namespace, name, *, ended=False, wait_s=0.0):
        self.searches += 1
        assert (namespace, name) == ("ns", "channel@q")
        if isinstance(self.found, Exception):
            raise self.found
        return await asyncio.shield(self.found)

    def find_it(self):
        self.found.set_result(self.user.group)


@pytest.fixture
async def here(monkeypatch):
    return Here(monkeypatch)


async def test_requests_are_kept_in_order_until_the_channel_is_found(here):
    puts = [here.channel.put(n, async_op=True) for n in range(3)]
    size = here.channel.qsize(async_op=True)
    first = here.channel.get(async_op=True)
    take = asyncio.ensure_future(here.channel.take().__aenter__())
    shown = here.channel.describe(async_op=True)
    await settle()
    assert not any(work.done() for work in (*puts, size, first, shown, take))
    here.find_it()
    assert await size == 3
    assert await first == 0
    assert await take == 1
    assert "[1, 2]" in await shown  # the task of the take began later
    assert here.searches == 1
    assert type(here.channel._backend) is RemoteChannel


async def test_later_requests_do_not_overtake_kept_ones(here):
    kept = here.channel.put(0, async_op=True)
    here.find_it()
    later = [here.channel.put(n, async_op=True) for n in range(1, 50)]
    await asyncio.gather(kept, *later)
    assert [await here.channel.get(async_op=True) for _ in range(50)] == list(range(50))


async def test_gets_that_are_cancelled_or_dropped_meanwhile_take_nothing(here):
    task = asyncio.ensure_future(here.channel.get(async_op=True).async_wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    dropped = here.channel.get(async_op=True)
    await asyncio.sleep(0)
    del dropped
    gc.collect()
    here.find_it()
    await here.channel.put("x", async_op=True)
    assert await here.channel.get(async_op=True) == "x"
    assert len([frame for frame in here.world.heard if type(frame) is frames.ChannelGet]) == 1


async def test_a_put_that_is_dropped_meanwhile_is_put(here):
    here.channel.put("x", async_op=True)
    gc.collect()
    here.find_it()
    assert await here.channel.get(async_op=True) == "x"


async def test_a_timeout_before_the_channel_is_found_puts_and_takes_nothing(here):
    late = [here.channel.put("late", async_op=True, timeout=0.01), here.channel.get(async_op=True, timeout=0.01)]
    for work in late:
        with pytest.raises(CallTimeoutError, match=r"within 0\.01 s: the channel was not found yet"):
            await work
    here.find_it()
    assert await here.channel.empty(async_op=True)


async def test_a_failed_search_fails_kept_requests_and_the_next_request_searches_again(here):
    works = [here.channel.put(1, async_op=True), here.channel.get(async_op=True), here.channel.qsize(async_op=True)]
    works += [here.channel.describe(async_op=True), here.channel.close(async_op=True)]
    await settle()
    here.found.set_exception(ClusterTimeoutError("the head does not answer"))
    for work in works:
        with pytest.raises(ClusterTimeoutError, match="does not answer"):
            await work
    here.found = asyncio.get_running_loop().create_future()
    here.find_it()
    await here.channel.put(2, async_op=True)
    assert await here.channel.get(async_op=True) == 2
    assert here.searches == 2


async def test_all_kept_requests_learn_that_the_channel_had_ended(here):
    here.found = GroupNotFoundError("none")
    put, loop = here.channel.put(1, async_op=True), aiter(here.channel)
    with pytest.raises(Exception, match="ended before this process first used it, and the head does not know how"):
        await put
    with pytest.raises(Exception, match="ended before this process first used it"):
        await anext(loop)


async def test_kept_requests_end_with_the_cluster(here):
    works = [here.channel.put(1, async_op=True), here.channel.describe(async_op=True)]
    await settle()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # as IoThread does when it is stopped
    for work in works:
        with pytest.raises(UsageError, match="was shut down"):
            await work


async def test_a_close_comes_behind_the_puts_that_are_kept(here):
    put, close = here.channel.put("x", async_op=True), here.channel.close(async_op=True)
    here.find_it()
    await put
    await close
    assert await here.channel.get(async_op=True) == "x"
    with pytest.raises(ChannelClosedError):
        await here.channel.get(async_op=True)


async def test_a_handle_of_another_job_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="belongs to job 'theirs'"):
        Here(monkeypatch, "theirs").channel.get(async_op=True)


def test_a_handle_brings_its_maxsize():
    channel = pickle.loads(pickle.dumps(Channel("q", "ns", None, 5)))  # noqa: S301 - our own bytes
    assert channel.maxsize == 5


class TestReplicas:
    """Two replicas; every key of these tests lives on node 0's."""

    @pytest.fixture
    async def world(self):
        world = World()
        world.one = world.user("a", linked=False)
        world.one.group = RemoteGroup(
            world.network, world.one.identity, "here", "ns", "channel@q", ["node", "far"], soon=world.one.io.call
        )
        world.one.channel = RemoteChannel(world.one, world.one.group, "q", 0, "one")
        return world

    async def test_requests_of_a_new_key_wait_in_order_and_do_not_block(self, world):
        user = world.one
        puts = [user.put(n) for n in range(3)]
        get, look = user.get(), user.channel.look("k")
        await settle()
        world.link(user)
        await asyncio.gather(*puts)
        assert await get == 0
        assert await look == [2, False]
        asked = [frame for frame in world.heard if type(frame) is frames.ChannelWhere]
        assert len(asked) == 1
        await user.put(3)
        assert [await user.get() for _ in range(3)] == [1, 2, 3]

    async def test_requests_of_a_new_key_end_with_the_replica_that_places_keys(self, world):
        user = world.one
        works = [user.put(1), user.get(), user.channel.look("k")]
        world.link(user)
        world.host_dies()
        for work in works:
            with pytest.raises(Exception, match="process that held it died"):
                await work
        assert not user.channel._placements
