"""Receives for which a thread waits: order, time limits, interruptions, and senders that are gone."""

from __future__ import annotations

import asyncio

import pytest
from message_kit import World, settle

from rlinf_actors.errors import CallTimeoutError, PeerDiedError
from rlinf_actors.messaging.blocking_receive import BlockingReceive
from rlinf_actors.wire import payload


@pytest.fixture
async def pair(monkeypatch):
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "first")
    await find_sender(b)
    assert await receive(b) == "first"
    monkeypatch.setattr(b.messenger, "receive", None)  # from now on there is none
    return a, b


async def find_sender(member):
    """Look its group up. A receive remembers its sender only if no look-up of the group is under way at its end."""
    found = asyncio.get_running_loop().create_future()
    member.messenger.directory.group("a", found.set_result)
    await found


async def receive(member, timeout=None):
    return await asyncio.to_thread(member.messenger.blocking.receive, "a", 0, timeout)


async def test_a_known_sender_is_not_looked_up_again(pair):
    a, b = pair
    for value in (1, {"step": 2}, b"3", None):
        await a.send("b:0", value)
        assert await receive(b) == value


async def test_a_sender_that_was_started_again_during_a_receive_is_watched(monkeypatch):
    world = World()
    (a,), (b,), (again,) = world.launch("a"), world.launch("b"), world.launch("again")
    await a.send("b:0", "first")
    await again.send("b:0", "look it up")
    await b.recv("again:0")
    await find_sender(b)
    wait = b.messenger.wait

    def restarted(work, timeout):
        value = wait(work, timeout)
        b.known["a"].peers[0] = b.known["again"].peers[0]
        return value

    monkeypatch.setattr(b.messenger, "wait", restarted)
    b.messenger._watched.clear()
    assert await receive(b) == "first"
    assert {peer.worker_id for peer in b.messenger._watched} == {a.id, again.id}


async def test_a_receive_that_waits_gets_the_message_that_comes(pair):
    a, b = pair
    receiving = asyncio.ensure_future(receive(b))
    await settle()
    await a.send("b:0", 5)
    assert await receiving == 5


async def test_a_receive_whose_time_is_up_takes_no_later_message(pair):
    a, b = pair
    with pytest.raises(CallTimeoutError, match=r"recv\(\) from a:0: no message came within 0.01 s"):
        await receive(b, 0.01)
    await a.send("b:0", 6)
    assert await receive(b) == 6


async def test_an_interrupted_receive_returns_its_message(pair, monkeypatch):
    a, b = pair
    await a.send("b:0", 7)
    await settle()

    def interrupted(self, timeout=None):
        assert self.done()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BlockingReceive, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            b.messenger.blocking.receive("a", 0, None)
    await a.send("b:0", 8)
    await settle()
    assert [await receive(b), await receive(b)] == [7, 8]


async def test_an_interrupted_receive_takes_no_later_message(pair, monkeypatch):
    a, b = pair

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BlockingReceive, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            b.messenger.blocking.receive("a", 0, None)
    await a.send("b:0", 9)
    assert await receive(b) == 9


async def test_a_receive_fails_when_its_sender_is_gone_and_gets_what_came_before(pair, monkeypatch):
    a, b = pair
    await a.send("b:0", 10)
    await settle()
    post, posted = b.messenger._post_receive, asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def posts(*args):
        post(*args)
        loop.call_soon_threadsafe(posted.release)

    monkeypatch.setattr(b.messenger, "_post_receive", posts)
    receiving = [asyncio.ensure_future(receive(b)) for _ in range(2)]
    for _ in receiving:
        await posted.acquire()
    a.world.die(a)
    outcomes = await asyncio.gather(*receiving, return_exceptions=True)
    assert 10 in outcomes
    assert any(isinstance(outcome, PeerDiedError) for outcome in outcomes)


async def test_an_object_that_cannot_be_unpickled_is_the_error_of_one_receive(pair, monkeypatch):
    a, b = pair
    await a.send("b:0", (1,))
    await a.send("b:0", (2,))
    await settle()
    with monkeypatch.context() as patched:
        patched.setattr(payload, "_loads", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await receive(b)
    assert await receive(b) == (2,)
