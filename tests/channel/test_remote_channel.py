"""A channel between processes, without processes: what is sent, what waits, and what comes back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys

import numpy as np
import pytest
from channel_kit import World, settle

from rlinf_actors import Channel, ChannelBrokenError, ChannelClosedError, counters
from rlinf_actors.channel import put_window
from rlinf_actors.channel.client import remote_channel
from rlinf_actors.errors import ConnectionLostError
from rlinf_actors.tracing import recorder
from rlinf_actors.wire import frames


def close(user):
    """The request of a close alone: whether the channel is drained."""
    (asked,) = user.channel._ask_all(frames.ChannelClose)
    return asked


def heard(world, kind):
    return [frame for frame in world.heard if type(frame) is kind]


async def test_gets_that_are_cancelled_before_the_host_is_there_lose_nothing():
    world = World()
    user, other = world.user("a", linked=False), world.user("b")
    for _ in range(20):
        waiting = asyncio.ensure_future(user.get().async_wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    late = [user.get() for _ in range(5)]
    world.link(user)
    for n in range(6):
        await other.put(n)
    assert [await work for work in late] == list(range(5))
    assert await user.get() == 5


async def test_a_get_whose_item_is_here_takes_it_though_its_task_is_cancelled_later():
    world = World()
    user = world.user("a")
    await user.put("x")
    work = user.get()
    await settle()
    waiting = asyncio.ensure_future(work.async_wait())
    await asyncio.sleep(0)
    assert not waiting.cancel()
    assert await waiting == "x"
    assert len(world.queue._delivered) == 1
    await settle()
    assert len(world.queue._delivered) == 0


@pytest.mark.parametrize("arrived", [False, True])
async def test_a_dropped_gets_item_is_the_head_again(arrived):
    world = World()
    user = world.user("a")
    for n in range(2):
        await user.put(n)
    dropped = user.get()
    if arrived:
        await settle()
    del dropped
    gc.collect()
    await settle()
    taking = [user.get(), user.get()]
    assert [await work for work in taking] == [0, 1]
    assert not taking[0].redelivered


async def test_small_items_and_small_parts_of_items_are_counted_as_inline():
    world = World()
    user = world.user("a")
    before = counters.sent_by_path().get("inline", [0, 0])
    await user.put(b"x" * 5_000)
    await user.put([np.ones(1000), np.ones(100_000)])  # the second array counts where its path is chosen
    number, size = counters.sent_by_path()["inline"]
    assert number == before[0] + 2
    assert 13_000 < size - before[1] < 14_000


async def test_a_dead_consumers_item_goes_to_the_next():
    world = World()
    user, dying = world.user("a"), world.user("b")
    await user.put("x")
    held = dying.get()
    await settle()
    assert held.done()
    waiting = user.get()
    world.die(dying)
    assert await waiting == "x"
    assert waiting.redelivered


async def test_a_lost_connection_loses_no_item_and_ends_waiting_requests():
    world = World()
    user, other = world.user("a"), world.user("b")
    await other.put("x")
    unread, waiting = user.get(), user.get()
    await settle()
    assert unread.done()
    world.lose(user)
    await settle()
    with pytest.raises(ConnectionLostError, match=r"is there again.* Channel 'q' and its items still exist"):
        await waiting
    again = user.get()
    assert await again == "x", "nobody had taken it"
    assert again.redelivered
    await other.put("y")
    assert await user.get() == "y"


async def test_acknowledgements_of_a_busy_consumer_go_in_lumps():
    world = World()
    user, other = world.user("a"), world.user("b")
    works = [user.get() for _ in range(50)]
    for n in range(49):
        await other.put(n)
    assert [await work for work in works[:49]] == list(range(49))
    await settle()
    acks = heard(world, frames.ChannelAck)
    assert len(acks) < 5
    assert sum(len(ack.ids) for ack in acks) == 49
    assert len(world.queue._delivered) == 0
    assert not works[49].done()


async def test_requests_of_one_turn_travel_in_few_messages_both_ways():
    world = World()
    user, other = world.user("a"), world.user("b")
    await user.put("first")
    assert await other.get() == "first"
    await settle()
    world.heard.clear()
    before = user.group.peers[0].received, other.group.peers[0].received
    puts = [user.put(n) for n in range(1000)]
    gets = [other.get() for _ in range(1000)]
    assert [await get for get in gets] == list(range(1000))
    await asyncio.gather(*puts)
    await settle()
    assert len(world.heard) <= 6  # puts, gets, acknowledgements: the first alone, and all others
    assert user.group.peers[0].received - before[0] <= 2
    assert other.group.peers[0].received - before[1] <= 3
    assert world.queue.in_use() == []
    assert not other.channel._sender(0).arrived


async def test_a_thread_that_waits_may_take_in_each_answer_of_the_host():
    world = World()
    user = world.user("a")
    await user.put("first")
    assert await user.get() == "first"
    await settle()
    peer, taken = user.group.peers[0], []

    def arrived(_link, header, parts):
        taken.append(thread.submit(peer._received_anywhere, b"", header, parts).result(10))
        assert taken[-1], frames.decode(header)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        peer._joined.on_message = arrived
        await user.put(1)
        assert await user.get() == 1
        works = [user.put(n, weight=1) for n in range(6)]
        dropped = user.get()
        works += [user.get() for _ in range(3)]
        await settle()
        del dropped
        await settle()
        assert [await work for work in works[6:]] == [1, 2, 3]
        assert (await user.channel.look("k"))[0] == 3
        assert await user.batch(2) == [0, 4]
        async with user.take() as item:
            assert item == 5
        with pytest.raises(asyncio.QueueEmpty):
            await user.get(nowait=True)
        assert await close(user) is True
    assert len(taken) >= 8
    assert world.queue.in_use() == []


async def test_requests_among_many_take_few_python_calls_on_their_thread():
    """They set the rate of a process that has many under way: the I/O thread takes in the answers beside."""
    world = World()
    user = world.user("a")
    puts, gets, calls = [user.put(-1)], [user.get()], 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    def counted(work):
        nonlocal calls
        calls = 0
        gc.collect()  # else destructors of other tests may count
        sys.setprofile(count)
        try:
            return [work(n) for n in range(100)]
        finally:
            sys.setprofile(None)
            calls -= 102  # of the test itself

    puts += counted(lambda n: user.channel.put("k", n, 0, False, None))
    assert calls < 16 * 100, calls
    gets += counted(lambda n: user.channel.get("k", False, None))
    assert calls < 11 * 100, calls
    await asyncio.gather(*puts)
    await settle()
    assert counted(lambda n: gets.pop(0).wait()) == list(range(-1, 99))
    assert calls < 9 * 100, calls


async def test_only_requests_that_are_alone_have_their_waiting_thread_read():
    """The answers to many come together: the loop takes them in while the thread that waits makes more requests."""
    world = World()
    user = world.user("a")
    works = []
    for _ in range(2):
        works += [user.put("x"), user.get()]
        assert [work._by_loop for work in works[-2:]] == [False, True]
        await asyncio.gather(*works)
        await settle()
    assert user.get()._by_loop is False


async def test_requests_of_one_turn_keep_their_order_across_kinds_and_keys():
    world = World()
    user = world.user("a")
    await user.put("first")
    assert await user.get() == "first"
    works = []
    for n in range(30):
        works += [user.put(n, key="kl"[n % 2], weight=n % 3), user.put(None, key="k"), user.put(b"b" * 20_000, key="k")]
    sizes = [user.channel.look("k"), user.channel.look("l")]
    assert [(await size)[0] for size in sizes] == [75, 15]
    found = [await user.get() for _ in range(75)]
    assert [item for item in found if type(item) is int] == list(range(0, 30, 2))
    assert [type(item) for item in found[:4]] == [int, type(None), bytes, type(None)]
    assert await user.batch(sum(n % 3 for n in range(1, 30, 2)), key="l") == list(range(1, 30, 2))


async def test_acknowledgements_are_sent_before_the_next_query():
    world = World(max_bytes=1)
    user = world.user("a")
    await user.put("x")
    works = [user.get(), user.get()]
    await settle()
    assert await works[0] == "x"
    await user.put("y", nowait=True)  # there is room, since the acknowledgement was not left behind
    assert await works[1] == "y"
    works.append(user.get())
    assert await close(user) is True


async def test_a_closed_and_empty_channel_is_drained_once():
    world = World()
    user = world.user("a")
    await user.put("x")
    closing = close(user)
    assert await closing is False
    with pytest.raises(ChannelClosedError):
        await user.put("y")
    assert await user.get() == "x"
    await settle()
    assert world.drained == 1
    world.host_dies(exit_code=0)
    with pytest.raises(ChannelClosedError, match="'q' was closed"):
        await user.get()


OWNER_KILLED = {
    "kind": "stopped",
    "reason": "its owner ended: worker maker:0 on node n1 was ended by signal 9 (SIGKILL)",
}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"kind": "signalled", "signal": 9}, "process that held it died.*SIGKILL"),
        ({"kind": "exited", "exit_code": 143}, "process that held it died"),
        ({"kind": "node_lost", "reason": "node n2: silent"}, "process that held it died.*n2"),
        ({"kind": "stopped"}, "'q' is broken.*was stopped"),
        (OWNER_KILLED, "'q' is broken.*maker:0 on node n1.*SIGKILL"),
    ],
    ids=["host killed", "host terminated", "node lost", "stopped", "creator killed"],
)
async def test_a_channel_that_was_not_closed_breaks_every_operation(how, text):
    world = World(maxsize=1)
    user = world.user("a")
    await user.put(0)
    waiting = [user.get("other"), user.batch(5, "other"), user.put(1)]
    iterated = []

    async def iterate():
        async for item in Channel("q", "ns", user.channel):
            iterated.append(item)

    await user.put("handed out", Channel.DEFAULT_KEY)
    iterating = asyncio.ensure_future(iterate())
    await settle()
    world.host_dies(**how)
    for broken in (*waiting, iterating, user.get(), user.get(nowait=True), user.put(2), user.put(2, nowait=True)):
        with pytest.raises(ChannelBrokenError, match=text):
            await broken
    assert iterated == ["handed out"]


async def test_an_iteration_goes_on_after_a_lost_connection():
    world = World()
    user, other = world.user("a"), world.user("b")
    iterated = aiter(Channel("q", "ns", user.channel))
    first = asyncio.ensure_future(anext(iterated))
    await settle()
    world.lose(user)
    await settle()
    await other.put("x", Channel.DEFAULT_KEY)
    assert await first == "x"
    await iterated.aclose()


async def test_an_iteration_ends_when_the_channel_was_closed():
    world = World()
    user = world.user("a")
    await user.put("x", Channel.DEFAULT_KEY)
    await close(user)
    assert [item async for item in Channel("q", "ns", user.channel)] == ["x"]


class TestOutgoing:
    @pytest.fixture(autouse=True)
    def small_window(self, monkeypatch):
        monkeypatch.setattr(put_window, "WINDOW_BYTES", 1000)

    async def test_puts_beyond_the_window_wait_in_order_and_do_not_block_another_key(self):
        world = World(maxsize=1)
        user = world.user("a")
        works = [user.put(bytes([n]) * 400) for n in range(10)]
        other = user.put(b"z" * 400, key="other")
        await other
        await settle()  # the host has heard of the put that the first one made room for
        assert len(heard(world, frames.ChannelPut)) == 4  # one is in, two are parked, and the other key's
        assert [work.done() for work in works] == [True] + [False] * 9
        assert [(await user.get())[0] for _ in range(10)] == list(range(10))
        assert all(work.done() for work in works)
        assert user.channel.put_window.nbytes == 0

    async def test_put_nowait_does_not_overtake_waiting_puts(self):
        world = World(maxsize=1)
        user = world.user("a")
        works = [user.put(b"x" * 400) for _ in range(4)]
        with pytest.raises(asyncio.QueueFull, match="earlier puts of this process"):
            await user.put("small", nowait=True)
        for _ in range(4):
            await user.get()
        await user.put("small", nowait=True)
        await asyncio.gather(*works)

    async def test_put_nowait_is_sent_when_only_bytes_of_other_keys_are_under_way(self):
        world = World()
        user = world.user("a")
        works = [user.put(b"x" * 400) for _ in range(2)]
        await user.put(b"x" * 400, nowait=True)
        assert all(work.done() for work in works)

    async def test_a_timeout_removes_a_waiting_put(self):
        world = World(maxsize=1)
        user = world.user("a")
        works = [user.put(b"x" * 800) for _ in range(2)]
        late = user.put("late", timeout=0)
        with pytest.raises(TimeoutError, match="within 0 s: earlier puts of this process still wait"):
            await late
        assert len(await user.get()) == len(await user.get()) == 800
        await asyncio.gather(*works)
        with pytest.raises(asyncio.QueueEmpty):
            await user.get(nowait=True)

    async def test_a_put_that_is_given_up_makes_room(self):
        world = World()
        user = world.user("a", linked=False)  # the host answers nothing
        works = [user.put(b"x" * 800) for _ in range(2)]
        for work in works[:1] * 2:
            work.forget()
        assert user.channel.put_window.nbytes == works[1].nbytes  # the second one is under way now
        works[1].forget()
        assert user.channel.put_window.nbytes == 0
        assert not user.channel.put_window._keys

    async def test_all_waiting_puts_fail_when_the_host_dies(self):
        world = World(maxsize=1)
        user = world.user("a")
        works = [user.put(b"x" * 400) for _ in range(3000)]
        await works[0]
        world.host_dies()
        for work in works[1:]:
            with pytest.raises(ChannelBrokenError, match="process that held it died"):
                await work
        assert user.channel.put_window.nbytes == 0

    async def test_handles_of_one_process_share_the_put_window(self):
        world = World()
        user = world.user("a")
        assert remote_channel(user, user.group, "q", 0, "me") is user.channel
        assert remote_channel(world.user("b"), world.users[1].group, "q", 0, "me") is not user.channel


async def test_requests_of_a_traced_process_are_done_as_others_are():
    recorder.start(1 << 12, {})
    try:
        world = World()
        user = world.user("a")
        works = [user.put(n) for n in range(5)] + [user.put(b"b" * 20_000)]
        assert [await user.get() for _ in range(5)] == list(range(5))
        assert len(await user.get()) == 20_000
        await asyncio.gather(*works)
        await user.put("one more")
        works = [user.put(n) for n in range(5)]
        assert [await user.get() for _ in range(6)] == ["one more", *range(5)]
        await asyncio.gather(*works)
    finally:
        recorder.stop()
