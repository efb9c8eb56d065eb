"""Sends and receives of workers in one loop: what becomes of them when a worker is gone, in every order of events."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from message_kit import World, settle

from rlinf_actors.errors import CallTimeoutError, GroupNotFoundError, PeerDiedError, PlacementError, WorkerDiedError
from rlinf_actors.messaging.directory import REMEMBERED
from rlinf_actors.messaging.outbox import OutgoingMessage
from rlinf_actors.messaging.tensor_transfer import DetachedTensors
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.wire import frames
from rlinf_actors.worker import unread_streams


@pytest.fixture
async def world():
    return World()


async def test_messages_travel_both_ways(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", {"x": 1})
    assert await b.recv("a:0") == {"x": 1}
    waiting = a.recv("b:0")
    await b.send("a:0", "back", piggyback=7)
    assert await waiting == ("back", 7)


async def test_a_receive_fails_although_another_thread_sends_to_a_new_worker_meanwhile(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    for n in range(2):
        await a.send("b:0", n)
    receivers = a.messenger._receivers

    class SentMeanwhile(tuple):
        def __getitem__(self, index):
            receivers["new", 0] = None
            return super().__getitem__(index)

    receivers["b", 0] = SentMeanwhile(receivers["b", 0])
    senders = a.messenger.blocking._senders

    class ReceivedMeanwhile(tuple):
        def __getitem__(self, index):
            senders["new", 0] = (None, None, "", ("", ""))
            return super().__getitem__(index)

    senders["b", 0] = ReceivedMeanwhile((None, None, "", ("", "")))
    waiting = a.recv("b:0")
    await settle()
    world.die(b)
    with pytest.raises(PeerDiedError):
        await waiting


# --- completion of a send ---


@pytest.fixture
async def withheld(world, monkeypatch):
    """Workers a and b, which share no memory: b's acknowledgements of messages, each kept back until it is called."""
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "meet")
    assert await b.recv("a:0") == "meet"
    monkeypatch.setattr(a.known["b"].peers[0].lending, "store", lambda parts: (parts, False))
    kept, reply = [], b.messenger._reply

    def answer(link, frame):
        if isinstance(frame, frames.Held):
            kept.append(lambda: reply(link, frame))
        else:
            reply(link, frame)

    monkeypatch.setattr(b.messenger, "_reply", answer)
    return a, b, kept


async def test_a_send_of_large_memory_completes_only_when_the_receiver_holds_it(withheld):
    a, b, kept = withheld
    sends = [a.send("b:0", np.full(300_000, n, np.uint8)) for n in range(2)]
    assert [(await b.recv("a:0"))[0] for _ in sends] == [0, 1], "even though the receiver's user has the objects"
    await settle()
    assert [work.done() for work in sends] == [False, False]
    kept[1]()
    await sends[1]
    assert not sends[0].done()
    kept[0]()
    await sends[0]
    assert len(kept) == 2


async def test_a_send_that_waits_for_the_window_completes_only_when_the_receiver_holds_it(withheld, world):
    a, b, kept = withheld
    filling, waiting = (a.send("b:0", np.zeros(size, np.uint8)) for size in (world.window, 300_000))
    await settle()
    assert len(b.messages) == 2, "the second one waits for the window"
    for _ in range(2):
        await b.recv("a:0")
    await settle()
    assert not filling.done()
    assert not waiting.done()
    for acknowledge in kept:
        acknowledge()
    await filling
    await waiting


async def test_a_send_of_a_small_object_asks_for_no_acknowledgement(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", bytearray(1000))
    await settle()
    assert [message.n for message in b.messages] == [0]


# --- whose end it was ---


@pytest.mark.parametrize("what", ["send() to b:0", "recv() from b:0"])
async def test_a_peer_that_died_before_its_look_up_is_a_peer_died_error(world, what):
    (a,), (b,) = world.launch("a"), world.launch("b")
    world.die(b)
    work = a.send("b:0", 1) if what.startswith("send") else a.recv("b:0")
    with pytest.raises(PeerDiedError) as caught:
        await work
    assert str(caught.value).startswith(f"{what}: worker b:0 on node0 was ended by signal 9 (SIGKILL)")
    assert caught.value.peer == "b:0"
    assert isinstance(caught.value.__cause__, WorkerDiedError)


async def test_a_peer_that_dies_during_its_look_up_is_a_peer_died_error(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    sending, receiving = a.send("b:0", 1), a.recv("b:0")
    world.die(b)
    for work, what in ((sending, "send\\(\\) to"), (receiving, "recv\\(\\) from")):
        with pytest.raises(PeerDiedError, match=f"^{what} b:0: worker b:0 .*SIGKILL"):
            await work


async def test_a_worker_remembers_a_group_that_the_head_has_forgotten(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    world.die(b)
    world.remembered = False
    with pytest.raises(PeerDiedError, match=r"^send\(\) to b:0: worker b:0 .*SIGKILL"):
        await a.send("b:0", 2)


async def test_a_bounded_number_of_ended_groups_is_remembered(world):
    (a,) = world.launch("a")
    for number in range(REMEMBERED + 10):
        (b,) = world.launch(f"b{number}")
        await a.send(f"b{number}:0", 1)
        world.die(b)
    assert len(a.messenger.directory._groups) == REMEMBERED + 1
    world.remembered = False
    with pytest.raises(PeerDiedError, match="SIGKILL"):
        await a.send(f"b{number}:0", 2)


async def test_a_group_that_ended_unannounced_is_a_peer_died_error(world):
    """The head was restarted and knows nothing of it, nor do we of its end."""
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    waiting = a.recv("b:0")
    await settle()
    a.known["b"].closing = True
    world.die(b, tell=False)
    world.remembered = False
    with pytest.raises(PeerDiedError, match=r"^send\(\) to b:0: group 'b', which this worker knew, has ended"):
        await a.send("b:0", 2)
    with pytest.raises(PeerDiedError, match=r"^recv\(\) from b:0: group 'b', which this worker knew, has ended"):
        await waiting


async def test_an_unknown_name_is_a_group_not_found_error(world):
    (a,) = world.launch("a")
    for work, what in ((a.send("b:0", 1), r"send\(\) to"), (a.recv("b:0"), r"recv\(\) from")):
        with pytest.raises(GroupNotFoundError, match=f"^{what} b:0: no group 'b' is running"):
            await work
    (b,) = world.launch("b")
    with pytest.raises(PlacementError, match=r"^send\(\) to b:3: rank 3 is not in group 'b'"):
        await a.send("b:3", 1)
    await a.send("b:0", 2)
    assert await b.recv("a:0") == 2


async def test_the_end_of_one_rank_fails_no_receive_from_another(world):
    (a,), bs = world.launch("a"), world.launch("b", 2)
    first, second = a.recv("b:0"), a.recv("b:1")
    await settle()
    world.die(bs[0])
    with pytest.raises(PeerDiedError, match=r"^recv\(\) from b:0: worker b:0"):
        await first
    assert not second.done()
    await bs[1].send("a:0", "alive")
    assert await second == "alive"


async def test_nothing_is_kept_of_a_peer_that_is_gone(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    world.die(b)
    for _ in range(3):
        with pytest.raises(PeerDiedError):
            await a.send("b:0", 1)
        with pytest.raises(PeerDiedError):
            await a.recv("b:0")
    assert a.messenger._outboxes == {}
    assert a.messenger._watched == set()


async def test_a_tensor_sender_ends_with_its_receiver(world, monkeypatch):
    monkeypatch.setattr("rlinf_actors.exhaustion.start", lambda thread: None)  # the question is never sent
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    tensors = DetachedTensors()
    tensors.tensors.append("a tensor")
    message = OutgoingMessage("", [b"skeleton"], False, AsyncWork("send() to b:0"), tensors)
    a.messenger.post(a.known["b"].peers[0], message)
    behind = a.send("b:0", 2)
    assert len(a.messenger._tensor_senders) == 1
    world.die(b)
    for work in (message.work, behind):
        with pytest.raises(PeerDiedError, match=r"^send\(\) to b:0: worker b:0 .*SIGKILL"):
            await work
    assert a.messenger._tensor_senders == {}


async def test_a_relaunched_group_gets_new_messages(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "old")
    world.die(b)
    with pytest.raises(PeerDiedError):
        await a.send("b:0", "to nobody")
    (b,) = world.launch("b")
    await a.send("b:0", "new")
    assert await b.recv("a:0") == "new"


# --- links ---


async def test_links_are_made_to_receivers_only(world):
    (a,), bs = world.launch("a"), world.launch("b", 8)
    waiting = [a.recv(f"b:{rank}") for rank in range(8)]
    await a.send("b:3", 1)
    await settle()
    assert [peer.rank for peer in a.known["b"].peers if peer.connected] == [3]
    for member in bs:
        await member.send("a:0", member.rank)
    assert [await work for work in waiting] == list(range(8))
    assert all(peer.pending == {} for peer in a.known["b"].peers)


# --- cancelling ---


async def cancelled(work) -> asyncio.Task:
    """Await it in a task and cancel that; the task keeps the work alive by its traceback."""
    task = asyncio.ensure_future(work.async_wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return task


@pytest.fixture
async def pair(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "meet")
    assert await b.recv("a:0") == "meet"
    return a, b


async def cancelled_with_message(sender, receiver, value):
    """A recv whose message comes in the turn of the loop in which it is cancelled."""
    work = receiver.recv(f"{sender.name}")
    task = asyncio.ensure_future(work.async_wait())
    await settle()
    work._on_done(task.cancel)
    await sender.send(receiver.name, value)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not work.done()
    return work, task


async def test_a_cancelled_recv_gives_its_message_back(pair):
    a, b = pair
    kept = await cancelled_with_message(a, b, 1)
    await a.send("b:0", 2)
    assert [await b.recv("a:0"), await b.recv("a:0")] == [1, 2]
    del kept


async def test_a_cancelled_recv_gives_its_message_to_one_that_waits(pair):
    a, b = pair
    first = b.recv("a:0")
    task = asyncio.ensure_future(first.async_wait())
    second = b.recv("a:0")
    await settle()
    first._on_done(task.cancel)
    await a.send("b:0", 1)
    assert await second == 1
    assert task.cancelled()
    await a.send("b:0", 2)
    assert await first == 2


async def test_a_cancelled_recv_may_be_awaited_again(pair):
    a, b = pair
    work, _task = await cancelled_with_message(a, b, 1)
    assert await work == 1
    assert await work == 1
    other = b.recv("a:0")
    await cancelled(other)
    await a.send("b:0", 2)
    await settle()
    assert not other.done()
    assert await other == 2


async def test_a_recv_cancelled_and_awaited_again_during_the_look_up_takes_one_message(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    work = b.recv("a:0")
    await cancelled(work)
    waiting = asyncio.ensure_future(work.async_wait())
    await settle()
    for n in range(3):
        await a.send("b:0", n)
    assert await waiting == 0
    assert [await b.recv("a:0"), await b.recv("a:0")] == [1, 2]


async def test_cancelling_one_of_two_that_wait_changes_nothing(pair):
    a, b = pair
    work = b.recv("a:0")
    other = asyncio.ensure_future(work.async_wait())
    await cancelled(work)
    await a.send("b:0", 1)
    assert await other == 1


async def test_dropped_receives_give_messages_back_in_order(pair):
    a, b = pair
    works = [b.recv("a:0") for _ in range(3)]
    await settle()
    for n in range(5):
        await a.send("b:0", n)
    await settle()
    assert all(work.done() for work in works)
    while works:
        works.pop(0)
    assert [await b.recv("a:0") for _ in range(5)] == [0, 1, 2, 3, 4]


async def test_a_message_given_back_reaches_a_waiting_recv(pair):
    a, b = pair
    first, second = b.recv("a:0"), b.recv("a:0")
    await settle()
    await a.send("b:0", 1)
    await settle()
    del first
    assert await second == 1


async def test_a_time_limit_ends_a_cancelled_recv_too(pair):
    a, b = pair
    work = b.recv("a:0", timeout=0.02)
    await cancelled(work)
    ended = asyncio.Event()
    work._on_done(ended.set)
    await ended.wait()
    with pytest.raises(CallTimeoutError, match=r"recv\(\) from a:0: no message came within 0.02 s"):
        await work
    await a.send("b:0", 1)
    assert await b.recv("a:0") == 1


# --- a connection that was lost between two who live ---


async def test_a_lost_connection_fails_later_sends_and_receives(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "before")
    assert await b.recv("a:0") == "before"
    waiting = b.recv("a:0")
    await settle()
    world.lose(a, b)
    with pytest.raises(PeerDiedError, match=r"recv\(\) from a:0: .* a message may be missing"):
        await waiting
    with pytest.raises(PeerDiedError, match="a message may be missing"):
        await b.recv("a:0")
    with pytest.raises(PeerDiedError, match=r"send\(\) to b:0: .* was lost, and is there again"):
        await a.send("b:0", "more")
    with pytest.raises(PeerDiedError, match=r"send\(\) to a:0: .* a message may be missing"):
        await b.send("a:0", "back")


async def test_messages_from_before_a_lost_connection_are_received(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "before")
    await settle()
    world.lose(a, b)
    await settle()
    assert await b.recv("a:0") == "before"
    with pytest.raises(PeerDiedError):
        await b.recv("a:0")


async def test_a_lost_connection_fails_broadcasts(world):
    world.launch("g", 2)
    a, b = world.groups["g"]
    groups = [("g", [0, 1])]
    assert [await one.broadcast("x" if one is a else None, groups) for one in (a, b)] == ["x", "x"]
    waiting = b.broadcast(None, groups)
    await settle()
    world.lose(a, b)
    with pytest.raises(PeerDiedError):
        await waiting
    with pytest.raises(PeerDiedError):
        await a.broadcast("y", groups)


async def test_a_lost_connection_does_not_affect_other_workers(world):
    (a,), (b,), (c,) = world.launch("a"), world.launch("b"), world.launch("c")
    await a.send("b:0", 1)
    await a.send("c:0", 2)
    await settle()
    world.lose(a, b)
    await settle()
    await a.send("c:0", 3)
    assert [await c.recv("a:0"), await c.recv("a:0")] == [2, 3]


async def test_a_lost_connection_is_forgotten_when_the_worker_ends(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "before")
    assert await b.recv("a:0") == "before"
    waiting = b.recv("a:0")
    await settle()
    world.lose(a, b)
    with pytest.raises(PeerDiedError):
        await waiting
    assert list(b.messenger._broken) == [a.id]
    later = b.recv("a:0")
    with pytest.raises(PeerDiedError, match="a message may be missing"):
        await later
    again = b.send("a:0", "x")
    with pytest.raises(PeerDiedError, match="a message may be missing"):
        await again
    world.die(a)
    await settle()
    assert b.messenger._broken == {}


@pytest.mark.parametrize("posted", ["before the news", "after the news"])
async def test_a_whole_message_is_received_after_the_news_of_its_senders_death(posted):
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    assert await b.recv("a:0") == 1
    link = a.known["b"].peers[0].link_identity
    listener = b.server._listener
    listener.streams.add(link)
    received, kept = listener.on_message, []
    listener.on_message = lambda *message: kept.append(message)  # in the stream, and not read
    await a.send("b:0", 2)
    works = [b.recv("a:0")] if posted == "before the news" else []
    world.die(a)
    await settle()
    works += [b.recv("a:0") for _ in range(2 - len(works))]
    await settle()
    assert not any(work.done() for work in works)
    for message in kept:
        received(*message)
    listener.end(link)
    assert await works[0] == 2
    with pytest.raises(PeerDiedError):
        await works[1]
    with pytest.raises(PeerDiedError):
        await b.recv("a:0")


async def test_the_news_of_a_death_waits_no_longer_than_a_second_for_the_end_of_the_stream(monkeypatch):
    monkeypatch.setattr(unread_streams, "REST_S", 0.0)
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    assert await b.recv("a:0") == 1
    b.server._listener.streams.add(a.known["b"].peers[0].link_identity)
    work = b.recv("a:0")
    world.die(a)
    with pytest.raises(PeerDiedError):
        await work
