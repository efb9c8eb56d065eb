"""Sends and receives of workers in one loop: what becomes of them when a worker is gone, in every order of events."""

from __future__ import annotations

import pytest
from message_kit import World, settle

from rlinf_actors.errors import GroupNotFoundError, PeerDiedError, PlacementError, WorkerDiedError


@pytest.fixture
async def world():
    return World()


async def test_there_and_back(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", {"x": 1})
    assert await b.recv("a:0") == {"x": 1}
    waiting = a.recv("b:0")
    await b.send("a:0", "back", piggyback=7)
    assert await waiting == ("back", 7)


# --- whose end it was ---


@pytest.mark.parametrize("what", ["send() to b:0", "recv() from b:0"])
async def test_a_peer_that_is_gone_before_it_was_ever_looked_up(world, what):
    (a,), (b,) = world.launch("a"), world.launch("b")
    world.die(b)
    work = a.send("b:0", 1) if what.startswith("send") else a.recv("b:0")
    with pytest.raises(PeerDiedError) as caught:
        await work
    assert str(caught.value).startswith(f"{what}: worker b:0 on node0 was ended by signal 9 (SIGKILL)")
    assert caught.value.peer == "b:0"
    assert isinstance(caught.value.__cause__, WorkerDiedError)


async def test_one_that_dies_during_the_look_up(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    sending, receiving = a.send("b:0", 1), a.recv("b:0")
    world.die(b)
    for work, what in ((sending, "send\\(\\) to"), (receiving, "recv\\(\\) from")):
        with pytest.raises(PeerDiedError, match=f"^{what} b:0: worker b:0 .*SIGKILL"):
            await work


async def test_a_group_that_the_head_has_forgotten_but_we_have_not(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", 1)
    world.die(b)
    world.remembered = False
    with pytest.raises(PeerDiedError, match=r"^send\(\) to b:0: worker b:0 .*SIGKILL"):
        await a.send("b:0", 2)


async def test_a_group_whose_end_nobody_told(world):
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


async def test_a_name_that_nobody_knows(world):
    (a,) = world.launch("a")
    for work, what in ((a.send("b:0", 1), r"send\(\) to"), (a.recv("b:0"), r"recv\(\) from")):
        with pytest.raises(GroupNotFoundError, match=f"^{what} b:0: no group 'b' is running"):
            await work
    (b,) = world.launch("b")
    with pytest.raises(PlacementError, match=r"^send\(\) to b:3: rank 3 is not in group 'b'"):
        await a.send("b:3", 1)
    await a.send("b:0", 2)
    assert await b.recv("a:0") == 2


async def test_the_end_of_one_rank_leaves_the_others_alone(world):
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


async def test_a_successor_of_the_name(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "old")
    world.die(b)
    with pytest.raises(PeerDiedError):
        await a.send("b:0", "to nobody")
    (b,) = world.launch("b")
    await a.send("b:0", "new")
    assert await b.recv("a:0") == "new"


# --- links ---


async def test_a_link_is_made_to_whom_one_sends(world):
    (a,), bs = world.launch("a"), world.launch("b", 8)
    waiting = [a.recv(f"b:{rank}") for rank in range(8)]
    await a.send("b:3", 1)
    await settle()
    assert [peer.rank for peer in a.known["b"].peers if peer.connected] == [3]
    for member in bs:
        await member.send("a:0", member.rank)
    assert [await work for work in waiting] == list(range(8))
    assert all(peer.pending == {} for peer in a.known["b"].peers)
