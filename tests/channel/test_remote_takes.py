"""Takes of a channel between processes, without processes, and of a local one: what the block's end does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import pytest
from channel_kit import World, settle

from rlinf_actors import (
    CallTimeoutError,
    Channel,
    ChannelBrokenError,
    ChannelClosedError,
    ConnectionLostError,
    ItemNotProcessedError,
    UsageError,
)
from rlinf_actors.channel import queue_server
from rlinf_actors.channel.key_encoding import key_bytes
from rlinf_actors.channel.queue_commands import ERROR_CHARS


class Local:
    """A local channel, with the names of World's users."""

    def __init__(self, max_deliveries=3):
        self.channel = Channel.create("q", local=True, max_deliveries=max_deliveries)

    def put(self, item):
        return self.channel.put(item, key="k", async_op=True)

    def get(self, nowait=False):
        return (self.channel.get_nowait if nowait else self.channel.get)("k", async_op=True)

    def take(self, timeout=None):
        return self.channel.take("k", timeout)

    def undeliverable(self, drain=False):
        return self.channel.undeliverable("k", drain, async_op=True)


class Remote:
    def __init__(self, max_deliveries=3):
        self.world = World(max_deliveries=max_deliveries)
        self.user = self.world.user("a")
        self.put, self.get, self.take = self.user.put, self.user.get, self.user.take

    def undeliverable(self, drain=False):
        return self.user.channel.undeliverable("k", drain)


@pytest.fixture(params=[Local, Remote])
def kind(request):
    return request.param


async def test_an_item_is_released_when_the_block_ends(kind):
    one = kind()
    await one.put("x")
    take = one.take()
    with pytest.raises(UsageError, match="is known in the block"):
        _ = take.deliveries
    async with take as item:
        assert (item, take.deliveries) == ("x", 1)
    with pytest.raises(asyncio.QueueEmpty):
        await one.get(nowait=True)
    with pytest.raises(UsageError, match="was used before"):
        await take.__aenter__()


async def test_the_release_is_confirmed_before_the_next_statement():
    world = World()
    user = world.user("a")
    await user.put("x")
    async with user.take():
        assert len(world.queue._delivered) == 1
    assert len(world.queue._delivered) == 0


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
async def test_any_exception_in_the_block_makes_the_item_the_head_again(kind, error):
    one = kind()
    for item in "xy":
        await one.put(item)
    with pytest.raises(type(error)):
        async with one.take():
            raise error
    take = one.take()
    async with take as item:
        assert (item, take.deliveries) == ("x", 2)
    work = one.get()
    assert await work == "y"
    assert not work.redelivered


async def test_an_item_of_a_failed_take_is_marked_redelivered_for_a_get(kind):
    one = kind()
    await one.put("x")
    with pytest.raises(ValueError, match="no"):
        async with one.take():
            raise ValueError("no")
    work = one.get()
    assert await work == "x"
    assert work.redelivered


async def test_cancelling_a_take_that_waits_takes_nothing(kind):
    one = kind()
    waiting = asyncio.ensure_future(one.take().__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await one.put("x")
    take = one.take()
    async with take as item:
        assert (item, take.deliveries) == ("x", 1)


async def test_cancelling_the_task_in_its_block_gives_back_and_does_not_wait(kind):
    one = kind()
    await one.put("x")
    entered = asyncio.Event()

    async def consume():
        async with one.take():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(consume())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await one.get() == "x"


async def test_a_take_whose_block_is_never_left_gives_back_when_it_is_dropped(kind):
    one = kind(1)
    await one.put("x")
    await one.take().__aenter__()
    gc.collect()
    await settle()
    with pytest.raises(ItemNotProcessedError, match="never left: the Take was dropped"):
        await one.take().__aenter__()


async def test_too_many_failures_raise_once_and_are_on_the_list(kind):
    one = kind()
    await one.put({"n": 1})
    await one.put("good")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with one.take():
                1 / 0  # noqa: B018
    with pytest.raises(
        ItemNotProcessedError,
        match=r"'q', key 'k', was delivered 3 times .* ZeroDivisionError: division by zero.*undeliverable\('k'\)",
    ) as caught:
        async with one.take():
            pytest.fail("it is not delivered any more")
    assert (caught.value.key, caught.value.deliveries) == ("k", 3)
    async with one.take() as item:
        assert item == "good"
    [left] = await one.undeliverable()
    assert (left.item, left.key, left.deliveries) == ({"n": 1}, "k", 3)
    assert left.consumer
    assert left.reason == "ZeroDivisionError: division by zero"
    assert await one.undeliverable() == [left]
    assert await one.undeliverable(drain=True) == [left]
    await settle()
    assert await one.undeliverable() == await one.undeliverable(drain=True) == []


class Unreadable:
    def __reduce__(self):
        return _unreadable, ()


def _unreadable():
    raise ImportError("no such module here")


async def test_an_item_that_cannot_be_read_counts_its_deliveries_and_stays_on_the_list():
    one = Remote(2)
    await one.put(Unreadable())
    for _ in range(2):
        with pytest.raises(ImportError, match="no such module here"):
            await one.take().__aenter__()
    with pytest.raises(ItemNotProcessedError, match="it could not be read: ImportError: no such module here"):
        await one.take().__aenter__()
    [left] = await one.undeliverable()
    assert isinstance(left.item, ImportError)
    for _ in range(2):
        with pytest.raises(ImportError, match="no such module here"):
            await one.undeliverable(drain=True)
        await settle()
    assert len(await one.undeliverable()) == 1


async def test_a_dead_consumers_item_comes_again_and_three_deaths_raise():
    world = World()
    user = world.user("a")
    await user.put("x")
    for n in range(3):
        dying = world.user(f"dying{n}")
        take = dying.take()
        assert await take.__aenter__() == "x"
        assert take.deliveries == n + 1
        world.die(dying)
        await settle()
    with pytest.raises(ItemNotProcessedError, match=queue_server.ENDED):
        await user.take().__aenter__()


async def test_a_lost_connection_gives_back_and_the_release_says_so():
    world = World()
    user, other = world.user("a"), world.user("b")
    await other.put("x")

    async def process():
        async with user.take():
            world.lose(user)
            await settle()

    with pytest.raises(ConnectionLostError, match=r"the release of an item .* the item may be processed again"):
        await process()
    take = other.take()
    async with take as item:
        assert (item, take.deliveries) == ("x", 2)


async def test_a_release_that_the_host_does_not_know_is_an_error():
    world = World()
    user = world.user("a")
    await user.put("x")
    with pytest.raises(ConnectionLostError, match=r"lost the connection to this one.* may be processed again"):
        async with user.take():
            world.watched.pop("a")()  # the head has given up on this process, which lives
    async with user.take() as item:
        assert item == "x"


async def test_the_end_of_the_block_raises_for_a_broken_channel():
    world = World()
    user = world.user("a")
    await user.put("x")
    with pytest.raises(ChannelBrokenError, match="process that held it died"):
        async with user.take():
            world.host_dies()


async def test_the_end_of_a_drained_channels_host_confirms_the_release():
    world = World()
    user = world.user("a")
    await user.put("x")
    user.channel.close()
    async with user.take():
        await settle()
        assert not world.drained
        world.network.cut(user.group.peers[0].link_identity)  # its answer does not arrive
        asyncio.get_running_loop().call_soon(lambda: world.host_dies(kind="exited", exit_code=0))


async def test_a_take_that_times_out_takes_nothing(kind):
    one = kind()
    with pytest.raises(CallTimeoutError, match=r"within 0\.01 s: the channel had no item for it"):
        async with one.take(timeout=0.01):
            pytest.fail("there is nothing")
    await one.put("x")
    assert await one.get() == "x"


async def test_takes_of_a_closed_channel_wait_for_items_that_are_out():
    world = World()
    user, other = world.user("a"), world.user("b")
    await user.put("x")
    waiting = asyncio.Event()

    async def last():
        waiting.set()
        async with other.take() as item:
            return item

    taken = user.take()
    assert await taken.__aenter__() == "x"
    closing = user.channel.close()
    rest = asyncio.ensure_future(last())
    await waiting.wait()
    await settle()
    assert closing.done()
    assert not rest.done()
    await taken.__aexit__(ValueError, ValueError("no"), None)
    assert await rest == "x"
    with pytest.raises(ChannelClosedError):
        await user.take().__aenter__()
    assert world.drained


def test_a_blocking_take_of_a_local_channel():
    channel = Channel.create("q", local=True)
    channel.put("x")
    with pytest.raises(KeyboardInterrupt), channel.take() as item:
        raise KeyboardInterrupt
    with channel.take() as item:
        assert item == "x"
    assert channel.empty()


def test_descriptions_count_undeliverable_items():
    channel = Channel.create("q", local=True, max_deliveries=1)
    channel.put("bad")
    with pytest.raises(ValueError, match="no"), channel.take():
        raise ValueError("no")
    with pytest.raises(ItemNotProcessedError):
        channel.take().__enter__()
    assert str(channel) == "Channel 'q': 0 items\n  'default_queue': [], and 1 undeliverable"


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


async def test_a_block_may_raise_an_error_whose_text_utf_8_cannot_carry(kind):
    one = kind()
    await one.put("x")
    with pytest.raises(ValueError, match="caf"):
        async with one.take():
            raise ValueError("caf\udce9")  # as the name of a file may be
    take = one.take()
    async with take as item:
        assert (item, take.deliveries) == ("x", 2)


async def test_of_a_long_error_only_the_beginning_is_sent():
    world = World(max_deliveries=1)
    user = world.user("a")
    await user.put("x")
    with pytest.raises(ValueError, match="long"):
        async with user.take():
            raise ValueError("long" * 1000_000)
    await settle()
    assert len(world.heard[-1].error) == ERROR_CHARS


class RaisesWhenRead:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _raise, (self.error,)


def _raise(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("caf\udce9"), Unspeakable()])
async def test_an_item_whose_reading_fails_without_a_text_is_the_head_again(error):
    world = World()
    user = world.user("a")
    await user.put(RaisesWhenRead(error))
    with pytest.raises(type(error)):
        await user.take().__aenter__()
    await settle()
    assert (world.queue.size(key_bytes("k")), len(world.queue._delivered)) == (1, 0)


def test_ctrl_c_in_a_take_that_waits_ends_it_though_the_take_is_kept():
    channel = Channel.create("q", local=True)
    take = channel.take()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may come before the take begins
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            take.__enter__()
    finally:
        signal.signal(signal.SIGALRM, before)
    channel.put("x")
    assert channel.get_nowait() == "x"


def test_a_fork_in_the_block_does_not_end_its_parents_take():
    channel = Channel.create("q", local=True)
    channel.put("x")
    take = channel.take()
    with take:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                take.__exit__(None, None, None)
            except UsageError:
                take.__exit__(ValueError, ValueError("of the child"), None)
                code = len(channel._made._queue._delivered) - 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert channel.empty()
