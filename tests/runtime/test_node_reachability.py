"""What waits for workers on another machine fails if the network is cut: on the memory transport."""

from __future__ import annotations

import asyncio

import pytest
from fake_worker import FakeWorker, Waiter

from rlinf_actors.errors import NodeLostError
from rlinf_actors.net.link import Reachability
from rlinf_actors.runtime import node_reachability
from rlinf_actors.runtime.node_reachability import NodeReachability
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire.values import Endpoint, GroupState, WorkerState

pytestmark = pytest.mark.virtual_time

FAR = "tcp://10.0.0.2:5"
BEAT_S, LEASE_S = 0.01, 0.1


@pytest.fixture
async def far(network, monkeypatch):
    """A worker on another machine, its peer here, and a watch that is running."""
    monkeypatch.setattr(node_reachability, "HEAD_FIRST_S", 0.0)
    worker = FakeWorker(network, FAR)
    group = RemoteGroup(network, "driver:x", "here", "ns", "g", ["n0"])
    running = WorkerState("id-0", 0, 0, "10.0.0.2", "running", 1, Endpoint("there", "ipc:///unused", FAR))
    group.adopt(GroupState("ns", "g", "m:C", "o", "running", [running], "tok"))
    watch = NodeReachability(network, "here", lambda: [group])
    watch.start(BEAT_S, LEASE_S)
    yield worker, group.peers[0], watch
    watch.close()


async def test_call_across_a_cut_network_fails_and_names_the_place(network, far):
    _, peer, _ = far
    call = Waiter()
    peer.open(call)
    network.dark.add(FAR)
    await asyncio.wait_for(call.told.wait(), 10)
    assert isinstance(call.error, NodeLostError)
    assert "g:0 on n0 is out of reach from here: its node 10.0.0.2 was silent for" in str(call.error)
    later = Waiter()
    peer.open(later)
    assert later.error is call.error
    assert not peer.connected


@pytest.mark.parametrize("what", ["look", "turn"])
async def test_internal_error_does_not_end_the_watch(network, far, monkeypatch, what):
    reported: list = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    _, peer, watch = far
    owner, name = (network, "check_reachability") if what == "look" else (watch, "_awaited")
    working = getattr(owner, name)

    def fails_once(*_):
        setattr(owner, name, working)
        raise ValueError("a bug")

    setattr(owner, name, fails_once)
    call = Waiter()
    peer.open(call)
    network.dark.add(FAR)
    await asyncio.wait_for(call.told.wait(), 10)
    assert isinstance(call.error, NodeLostError)
    assert [str(error) for error in reported] == ["a bug"]


def check_results(network, before_its_end=lambda: None):
    """The results of all later reachability checks."""
    found: asyncio.Queue = asyncio.Queue()
    look = network.check_reachability

    async def watched(endpoint, timeout_s):
        sight = await look(endpoint, timeout_s)
        before_its_end()
        found.put_nowait(sight)
        return sight

    network.check_reachability = watched
    return found


async def test_listening_or_just_ended_worker_is_not_reported_as_cut_off(network, far):
    worker, peer, _ = far
    found = check_results(network)
    call = Waiter()
    peer.open(call)
    for _ in range(5):  # several leases
        assert await asyncio.wait_for(found.get(), 10) is Reachability.LISTENS
    worker._listener.close()  # the head reports this end
    while await asyncio.wait_for(found.get(), 10) is not Reachability.REFUSED:
        pass
    assert call.error is None


async def test_received_messages_show_a_reachable_node_although_checks_fail(network, far):
    _, peer, _ = far
    network.dark.add(FAR)

    def something_comes():
        peer.received += 1

    found = check_results(network, something_comes)
    call = Waiter()
    peer.open(call)
    for _ in range(10):  # several leases
        assert await asyncio.wait_for(found.get(), 10) is Reachability.SILENT
    assert call.error is None


async def test_node_is_checked_only_while_a_call_waits(network, far):
    _, peer, watch = far
    turns: asyncio.Queue = asyncio.Queue()
    awaited = watch._awaited
    watch._awaited = lambda: turns.put_nowait(None) or awaited()
    found = check_results(network)
    peer.forget(peer.open(Waiter()))
    for _ in range(3 * int(LEASE_S / BEAT_S)):
        await asyncio.wait_for(turns.get(), 10)
    assert found.empty()
    assert peer.error is None


async def test_new_call_does_not_inherit_the_silence_of_an_earlier_call(network, far):
    _, peer, watch = far
    network.dark.add(FAR)
    first = Waiter()
    peer.open(first)
    ends: list[float] = []
    loop = asyncio.get_running_loop()
    again = RemoteGroup(network, "driver:x", "here", "ns", "again", ["n0"])
    running = WorkerState("id-1", 0, 0, "10.0.0.2", "running", 1, Endpoint("there", "ipc:///unused", FAR))
    again.adopt(GroupState("ns", "again", "m:C", "o", "running", [running], "tok"))
    groups = list(watch._groups())
    watch._groups = lambda: groups
    peer.on_gone(lambda _error: ends.append(loop.time()))
    await asyncio.wait_for(first.told.wait(), 10)
    groups.append(again)  # before the watch checks again: no pause between two waits for the same machine
    second = Waiter()
    again.peers[0].open(second)
    await asyncio.wait_for(second.told.wait(), 10)
    assert loop.time() - ends[0] >= LEASE_S


@pytest.mark.parametrize("moment", ["removed", "looked at"])
async def test_peer_of_a_call_that_begins_during_the_check_is_checked_the_next_time(network, far, monkeypatch, moment):
    """Calls begin on other threads: whenever that is, the Peer is among those that the next turn looks at."""
    _, peer, watch = far
    (group,) = watch._groups()
    peer.forget(peer.open(Waiter()))

    class Waits(set):
        def discard(self, other):
            super().discard(other)
            if moment == "removed" and not peer.pending:
                peer.open(Waiter())

    def look(self):
        found = bool(self.pending)
        if moment == "looked at" and not found:
            peer.open(Waiter())
        return found

    monkeypatch.setattr(Peer, "awaited", property(look))
    peer._waits = group._waits = Waits(group._waits)
    group.awaited()
    assert group.awaited() == [peer]
