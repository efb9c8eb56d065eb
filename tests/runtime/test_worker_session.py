"""A worker's session with the head: it sends no heartbeats, and learns of a restarted head from its agentd."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from session_kit import HELLO, Ends

from rlinf_actors.errors import ClusterTimeoutError
from rlinf_actors.net.link import is_older, peer_name
from rlinf_actors.wire.agent_messages import Beat, ClientHello, Goodbye, Welcome
from rlinf_actors.wire.client_messages import Done, GetStatus

pytestmark = pytest.mark.virtual_time
WORKER = replace(HELLO, role="worker", worker_id="w", token="tok")
CHILD = replace(WORKER, worker_id="w_0", parent="w")


@pytest.fixture(params=[WORKER, CHILD], ids=["worker", "child"])
async def ends(network, request):
    made = Ends(network, request.param)
    yield made
    made.link.close("the test ends")


def drop_all(ends):
    """The head gets none of the session's messages from now on."""
    ends.network.drop = lambda identity, header: identity == ends.link.identity


async def test_worker_sends_nothing_in_100_seconds(ends):
    await ends.welcome(beat_s=1.0)
    await asyncio.sleep(100)
    assert ends.came.empty()
    assert ends.alone.empty()


async def test_worker_outlives_a_silent_head_because_its_agentd_watches_that_head(ends):
    await ends.welcome(beat_s=1.0, lease_s=10.0, grace_s=20.0)
    drop_all(ends)
    ends.network.dark.add(ends.endpoint)
    await asyncio.sleep(100)
    assert ends.alone.empty()


@pytest.mark.parametrize(("epoch", "again", "hellos"), [("e", False, 0), ("e", True, 1), ("e2", False, 1)])
async def test_hello_after_the_node_has_registered_with_another_head_or_lost_messages(ends, epoch, again, hellos):
    await ends.welcome(beat_s=1.0)
    ends.link.node_registered(epoch, again)
    await asyncio.sleep(0.1)
    assert [type(envelope.body) for _, envelope in list(ends.came._queue)] == [ClientHello] * hellos


async def test_node_that_registered_twice_causes_one_hello(ends):
    await ends.welcome(beat_s=1.0)
    ends.link.node_registered("e2", False)
    ends.link.node_registered("e2", True)
    peer, hello = await ends.next(ClientHello)
    ends.server.reply(peer, hello.id, Welcome("e2", "0.1", 1.0, 10.0))
    await asyncio.sleep(50)
    assert ends.came.empty()


async def test_first_hello_that_a_dead_head_has_taken_is_sent_again(ends):
    starting = asyncio.ensure_future(ends.link.start(60))
    await ends.next(ClientHello)
    ends.link.node_registered("e2", False)
    peer, hello = await ends.next(ClientHello)
    ends.server.reply(peer, hello.id, Welcome("e2", "0.1", 1.0, 10.0))
    assert (await starting).epoch == "e2"


async def test_each_connection_to_the_head_has_an_identity_of_its_own(ends):
    """With one identity libzmq would no longer read the newer one if the older one came to a starting head after it."""
    lost = []

    def is_lost(identity, header):
        if lost or b"ClientHello" not in header:
            return False
        lost.append(identity)
        return True

    first = await ends.welcome(beat_s=1.0)
    ends.network.drop = is_lost
    ends.link.node_registered("e2", False)
    second, hello = await ends.next(ClientHello)
    ends.server.reply(second, hello.id, Welcome("e2", "0.1", 1.0, 10.0))
    assert lost == [first]
    assert second != first
    assert is_older(first, second)
    assert peer_name(first) == peer_name(second) == "worker:inc"


async def test_request_of_before_a_restart_is_answered_by_the_next_head(ends):
    peer = await ends.welcome(beat_s=1.0)
    ends.server.notify(peer, Goodbye("SIGTERM", restarting=True))
    asking = asyncio.ensure_future(ends.link.request(GetStatus(), 100))
    await asyncio.sleep(20)
    assert ends.came.empty()
    ends.link.node_registered("e2", False)
    peer, hello = await ends.next(ClientHello)
    ends.server.reply(peer, hello.id, Welcome("e2", "0.1", 1.0, 10.0))
    peer, asked = await ends.next(GetStatus)
    ends.server.reply(peer, asked.id, Done())
    assert await asking == Done()


async def test_lost_connection_is_followed_by_a_new_hello(ends):
    await ends.welcome(beat_s=1.0)
    ends.network.reset(ends.link.identity)
    await ends.next(ClientHello)


async def test_owner_of_robots_sends_heartbeats_from_then_on(ends):
    await ends.welcome(beat_s=1.0, grace_s=20.0)
    await asyncio.sleep(100)
    ends.link.own_robots()
    for _ in range(20):
        peer, beat = await asyncio.wait_for(ends.came.get(), 0.3)  # eight in a lease of 2 s
        assert isinstance(beat.body, Beat)
        ends.server.notify(peer, Beat("e"))
    assert ends.alone.empty()


async def test_owner_of_robots_ends_when_no_head_comes_back(ends):
    await ends.welcome(beat_s=1.0, grace_s=20.0)
    await asyncio.sleep(100)
    ends.link.own_robots()
    drop_all(ends)
    said = await asyncio.wait_for(ends.alone.get(), 30)
    assert "was silent for 20 s" in said


async def test_wait_for_signs_of_life_asks_for_them_and_no_longer(ends):
    await ends.welcome(beat_s=1.0)
    await asyncio.sleep(100)
    waiting = asyncio.ensure_future(ends.link.silent(5))
    for _ in range(20):  # a head that answers is not silent
        peer, _ = await ends.next(Beat)
        ends.server.notify(peer, Beat("e"))
    assert not waiting.done()
    began = asyncio.get_running_loop().time()
    await waiting
    assert asyncio.get_running_loop().time() - began == pytest.approx(5, abs=0.1)
    ends.came = asyncio.Queue()
    await asyncio.sleep(100)
    assert all(not isinstance(envelope.body, Beat) for _, envelope in list(ends.came._queue))


@pytest.mark.parametrize("quiet_s", [0, 100])
async def test_timeout_of_a_request_counts_the_silence_from_the_request(ends, quiet_s):
    await ends.welcome(beat_s=1.0)
    await asyncio.sleep(quiet_s)
    with pytest.raises(ClusterTimeoutError, match=r"GetStatus within 1 s") as raised:
        await ends.link.request(GetStatus(), 1)
    assert "Is it running" not in str(raised.value)
    with pytest.raises(ClusterTimeoutError, match=r"has not answered for 8 s; GetStatus waited 8 s for it"):
        await ends.link.request(GetStatus(), 8)
