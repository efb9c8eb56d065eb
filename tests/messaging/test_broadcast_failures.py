"""Broadcasts that fail although all members live: every member hears at once who failed and why, and none waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from message_kit import World, settle

from rlinf_actors.errors import PeerDiedError, RlinfActorsError

ALL = [("a", range(5))]
NODES = [0, 1, 1, 2, 2]  # the source sends to 1 and 3, which are the relays of 2 and 4


async def met(members, value="met", source=0):
    groups, src = ALL, ("a", source)
    works = [member.broadcast(value if member.rank == source else None, groups, src) for member in members]
    return [await asyncio.wait_for(work, 5) for work in works]


# --- a connection is lost ---


@pytest.fixture
async def world():
    return World()


async def cut(world, members, sender=1, receiver=2):
    await met(members)
    world.lose(members[sender], members[receiver])
    await settle()


async def test_connection_that_two_members_lose_fails_the_broadcasts_of_all(world):
    members = world.launch("a", 5, NODES)
    await met(members)
    works = [member.broadcast(None, ALL) for member in members[1:]]
    world.lose(members[1], members[2])
    for work in works:
        with pytest.raises(PeerDiedError, match=r"^broadcast\(\).* connection .* was lost"):
            await asyncio.wait_for(work, 5)


async def test_member_that_lost_no_connection_hears_who_did(world):
    members = world.launch("a", 5, NODES)
    await met(members)
    work = members[4].broadcast(None, ALL)
    world.lose(members[1], members[2])
    with pytest.raises(PeerDiedError, match=r"a:[12] reports: the connection .* was lost") as caught:
        await asyncio.wait_for(work, 5)
    assert caught.value.peer in ("a:1", "a:2")


async def test_later_broadcasts_of_the_same_members_fail_at_once_at_all(world):
    members = world.launch("a", 5, NODES)
    await cut(world, members)
    for _ in range(2):
        works = [member.broadcast("x" if member.rank == 0 else None, ALL) for member in members]
        for work in works:
            with pytest.raises(PeerDiedError, match=r"the connection .* was lost"):
                await asyncio.wait_for(work, 5)
        await settle()
    assert [len(member.messenger._mailbox) for member in members] == [0] * 5
    assert [member.broadcaster._trees for member in members] == [{}] * 5


async def test_one_failure_is_reported_once_to_each_member(world):
    members = world.launch("a", 5, NODES)
    await met(members)
    told = []
    for member in members:
        serve = member.broadcaster.told
        member.server.serve(
            (type_of_report(),), lambda *args, serve=serve, name=member.name: (told.append(name), serve(*args))
        )
    world.lose(members[1], members[2])
    await settle()
    for _ in range(3):
        members[3].broadcast(None, ALL)
        await settle()
    assert max(told.count(member.name) for member in members) <= 2  # of the two that lost the connection


def type_of_report():
    from rlinf_actors.wire import frames

    return frames.BroadcastFailed


async def test_relaunched_workers_broadcast_again(world):
    members = world.launch("a", 5, NODES)
    await cut(world, members)
    for member in members:
        world.die(member)
    assert await met(world.launch("a", 5, NODES)) == ["met"] * 5


# --- tensors cannot be sent ---


@pytest.fixture
async def lanes():
    torch = pytest.importorskip("torch")
    world = World(1 << 30, {"cpu": "lane"})
    world.value = torch.ones(100_000)
    yield world
    over = RlinfActorsError("the test is over")
    for member in world.members:
        for sender in list(member.messenger._tensor_senders.values()):
            sender._fail(over)
        member.messenger.tensor_receiver._lanes.end_all(lambda: over)
    for thread in threading.enumerate():
        if thread.name.startswith("rlinf-actors-lane"):
            await asyncio.to_thread(thread.join, 25)


async def outcomes(members, value):
    works = [member.broadcast(value if member.rank == 0 else None, ALL) for member in members]
    found = []
    for work in works:
        try:
            found.append(await asyncio.to_thread(work.wait, 10))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)
    return found


@pytest.mark.torch
async def test_tensor_that_a_relay_cannot_send_fails_there_and_below_and_the_next_broadcast_works(lanes):
    members = lanes.launch("a", 5, NODES)
    await outcomes(members, lanes.value)
    sender = members[1].messenger.tensor_sender(members[1].known["a"].peers[2])
    plan = sender._plan
    sender._plan = lambda *args: (_ for _ in ()).throw(RuntimeError("CUDA out of memory"))
    found = await outcomes(members, lanes.value)
    for rank in (1, 2):
        assert "CUDA out of memory" in str(found[rank])
    assert "a:1 cannot send the tensors to a:2" in str(found[2])
    assert all((found[rank] == 1).all() for rank in (0, 3, 4))
    sender._plan = plan
    for value in (lanes.value, "small"):
        assert not any(isinstance(one, Exception) for one in await outcomes(members, value))


@pytest.mark.torch
async def test_lane_that_breaks_at_a_relay_fails_one_broadcast_and_the_next_one_works(lanes):
    members = lanes.launch("a", 5, NODES)
    await outcomes(members, lanes.value)
    sender = members[1].messenger.tensor_sender(members[1].known["a"].peers[2])
    (lane,) = sender._lanes._lanes.values()
    lane.lane._fail(RuntimeError("the network card is gone"))
    found = await outcomes(members, lanes.value)
    assert not any(isinstance(found[rank], Exception) for rank in (0, 3, 4))
    for _ in range(3):
        found = await outcomes(members, lanes.value)
    assert not any(isinstance(one, Exception) for one in found)


@pytest.mark.torch
async def test_tensor_by_a_lane_that_its_receiver_has_ended_fails_at_once(lanes, monkeypatch):
    """The sender goes on with a lane that it has reported until the receiver's answer comes."""
    members = lanes.launch("a", 5, NODES)
    await outcomes(members, lanes.value)
    sender = members[1].messenger.tensor_sender(members[1].known["a"].peers[2])
    (lane,) = sender._lanes._lanes.values()
    answers, closed = [], sender._lanes.other_end_closed
    monkeypatch.setattr(sender._lanes, "other_end_closed", lambda *answer: answers.append(answer) or True)
    lane.lane._fail(RuntimeError("the network card is gone"))
    await settle()
    assert answers
    works = [member.broadcast(lanes.value if member.rank == 0 else None, ALL) for member in members]
    with pytest.raises(RlinfActorsError, match=r"the lane from a:1 to a:2 .* failed: the network card is gone"):
        await asyncio.to_thread(works[2].wait, 10)
    monkeypatch.undo()
    closed(*answers[0])
    for work in works[:2]:
        with contextlib.suppress(RlinfActorsError):
            await asyncio.to_thread(work.wait, 10)
    assert not any(isinstance(one, Exception) for one in await outcomes(members, lanes.value))


@pytest.mark.torch
async def test_bug_of_ours_on_the_thread_of_a_tree_reaches_all_members(lanes, monkeypatch):
    members = lanes.launch("a", 5, NODES)
    await outcomes(members, lanes.value)
    tree = next(iter(members[1].broadcaster._trees.values()))
    monkeypatch.setattr(tree, "forward", lambda *args, **options: 1 / 0)
    found = await outcomes(members, lanes.value)
    assert ["ZeroDivisionError" in repr(found[rank]) for rank in (1, 2)] == [True] * 2
    found = await outcomes(members, lanes.value)
    assert ["ZeroDivisionError" in repr(one) for one in found] == [True] * 5
