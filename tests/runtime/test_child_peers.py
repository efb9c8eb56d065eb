"""How another process finds the children of workers: on the memory transport, with stand-ins for worker and child."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from fake_worker import FakeWorker

from rlinf_actors.errors import ConnectionLostError, PeerDiedError, WorkerDiedError
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime import child_peers
from rlinf_actors.runtime.child_peers import ChildPeers
from rlinf_actors.runtime.pending import PendingRequest
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState

KILLED = ExitReport("signalled", signal=9)
CHILD = WorkerAddress("g", (0, 1))


class World:
    """A group of one worker, and a child of that worker."""

    def __init__(self, network) -> None:
        loop = asyncio.get_running_loop()
        self.network = network
        self.worker = FakeWorker(network, "ipc:///w")
        self.child = FakeWorker(network, "ipc:///c")
        io = SimpleNamespace(call=loop.call_soon_threadsafe)
        self.peers = ChildPeers(
            SimpleNamespace(network=network, io=io, identity="worker:x", host="here", worker_id="x")
        )
        self.group = RemoteGroup(
            network, "worker:x", "here", "ns", "g", ["n0"], None, lambda group: None, loop.call_soon_threadsafe, me="x"
        )
        self.group.adopt(GroupState("ns", "g", "m:C", "o", "running", [self.state()], "tok"))
        self.found: list = []
        self._seen = 0
        self._told = asyncio.Event()

    def state(self, **more) -> WorkerState:
        fields = {"state": "running", "endpoint": Endpoint("here", self.worker.endpoint), **more}
        return WorkerState("id-0", 0, 0, "10.0.0.1", pid=1, port=0, master_port=4567, **fields)

    def note(self, outcome) -> None:
        self.found.append(outcome)
        self._told.set()

    def find(self, mark=None) -> None:
        self.peers.find(self.group, CHILD, lambda outcome: self.note(outcome if mark is None else mark))

    async def asked(self, kind: type[frames.Frame]):
        """The next frame of this kind that the worker receives."""
        while True:
            came = await self.worker.until(self._seen + 1)
            self._seen += 1
            if isinstance(came[self._seen - 1], kind):
                return came[self._seen - 1]

    async def report_child(self, id: str = "id-0_1") -> int:
        """The worker reports that the child is up. Returns the number of the request."""
        question = await self.asked(frames.WhereIs)
        assert question.path == [1]
        self.worker.say(frames.ChildIs(question.id, id, Endpoint("here", self.child.endpoint)))
        return question.id

    async def until(self, count: int) -> list:
        while len(self.found) < count:
            self._told.clear()
            await asyncio.wait_for(self._told.wait(), 10)
        return self.found

    async def up(self):
        self.find()
        number = await self.report_child()
        (peer,) = await self.until(1)
        return peer, number


async def ended(peer) -> None:
    gone = asyncio.Event()
    peer.on_gone(lambda error: gone.set())
    await asyncio.wait_for(gone.wait(), 10)


@pytest.fixture
def world(network):
    async def make():
        return World(network)

    return make


async def test_child_is_requested_once_and_keeps_the_order_of_messages(world):
    w = await world()
    for mark in range(3):
        w.find(mark)
    await w.report_child()
    assert await w.until(3) == [0, 1, 2]
    w.find()
    peer = w.found[3]  # at once
    assert (peer.name, peer.worker_id, peer.node, peer.error) == ("g:0:1", "id-0_1", "n0", None)
    peer.send(frames.WhatRuns(5))
    join, question = await w.child.until(2)
    assert (join.worker_id, join.worker, join.token) == ("id-0_1", "x", "tok")
    assert question == frames.WhatRuns(5)
    assert w.peers.all() == [peer]


async def test_only_the_last_children_that_ended_are_remembered(world, monkeypatch):
    monkeypatch.setattr(child_peers, "REMEMBERED", 2)
    w = await world()
    living, _ = await w.up()
    for rank in range(2, 8):
        w.peers.find(w.group, WorkerAddress("g", (0, rank)), w.note)
        question = await w.asked(frames.WhereIs)
        w.worker.say(frames.ChildEnded(question.id, f"id-0_{rank}", KILLED))
        await w.until(rank)
    assert [peer.name for peer in w.peers.all()] == ["g:0:1", "g:0:6", "g:0:7"]
    assert w.peers.all()[0] is living


async def test_ended_child_fails_its_peer_and_the_next_child_is_requested(world):
    w = await world()
    peer, number = await w.up()
    w.worker.say(frames.ChildEnded(number, "id-0_1", KILLED))
    await ended(peer)
    assert isinstance(peer.error, WorkerDiedError)
    assert "worker g:0:1 on n0 was ended by signal 9 (SIGKILL)" in str(peer.error)
    w.find()
    question = await w.asked(frames.WhereIs)
    w.worker.say(frames.ChildEnded(question.id, "id-0_1", KILLED))
    assert (await w.until(2))[1] is peer
    w.find()
    await w.report_child("id-0_2")
    second = (await w.until(3))[2]
    assert (second.worker_id, second.error) == ("id-0_2", None)


async def test_operation_that_begins_when_the_waits_for_a_child_fail_is_not_told_of_that_end(world):
    w = await world()
    peer, number = await w.up()
    peer.on_gone(lambda _error: w.find())
    w.worker.say(frames.ChildEnded(number, "id-0_1", KILLED))
    await w.report_child("id-0_2")
    second = (await w.until(2))[1]
    assert (second.worker_id, second.error) == ("id-0_2", None)


async def test_operation_that_begins_when_one_to_an_ended_child_fails_asks_again(world):
    w = await world()
    peer, number = await w.up()
    w.worker.say(frames.ChildEnded(number, "id-0_1", KILLED))
    await ended(peer)
    w.peers.find(w.group, CHILD, lambda dead: (w.note(dead), w.find()))
    question = await w.asked(frames.WhereIs)
    w.worker.say(frames.ChildEnded(question.id, "id-0_1", KILLED))
    await w.report_child("id-0_2")
    _, dead, second = await w.until(3)
    assert (dead, second.worker_id, second.error) == (peer, "id-0_2", None)


async def test_operation_that_begins_after_the_parent_was_asked_is_not_told_of_an_end_before_it(world):
    w = await world()
    w.find()
    question = await w.asked(frames.WhereIs)
    w.find()  # the child that ends may have ended already, and another have registered
    w.worker.say(frames.ChildEnded(question.id, "id-0_1", KILLED))
    await w.report_child("id-0_2")
    first, second = await w.until(2)
    assert (first.worker_id, str(first.error)[:13]) == ("id-0_1", "worker g:0:1 ")
    assert (second.worker_id, second.error) == ("id-0_2", None)


async def test_operation_that_begins_when_the_worker_was_replaced_asks_the_new_one(world):
    w = await world()
    peer, number = await w.up()
    w.worker.say(frames.ChildEnded(number, "id-0_1", KILLED))
    await ended(peer)
    w.group.peers[0].open(PendingRequest(lambda frame, parts: None, lambda error: w.find()))
    w.worker, w._seen = FakeWorker(w.network, "ipc:///w2"), 0
    w.group.update([msgspec.structs.replace(w.state(restarts=1), id="id-0.1")])
    await w.report_child("id-0.1_1")
    _, second = await w.until(2)
    assert (second.worker_id, second.error) == ("id-0.1_1", None)


async def test_child_that_ended_before_the_request_fails_its_calls(world):
    w = await world()
    w.find()
    question = await w.asked(frames.WhereIs)
    w.worker.say(frames.ChildEnded(question.id, "id-0_1", ExitReport("exited", 7)))
    (peer,) = await w.until(1)
    assert "exited with code 7" in str(peer.error)


@pytest.mark.parametrize("when", ["asked", "found"])
async def test_children_end_with_their_worker(world, when):
    w = await world()
    if when == "found":
        peer, _ = await w.up()
    else:
        w.find()
        await w.asked(frames.WhereIs)
    w.group.update([w.state(state="gone", exit=KILLED)])
    (peer,) = await w.until(1)
    await ended(peer)
    assert isinstance(peer.error, PeerDiedError)
    assert "g:0:1 has ended with its worker: worker g:0 on n0 was ended by signal 9" in str(peer.error)
    w.find()
    assert (await w.until(2))[1] is peer


async def test_lost_link_to_the_worker_does_not_end_its_children(world):
    w = await world()
    peer, _ = await w.up()
    w.network.reset(w.worker.peer)
    number = await w.report_child()
    w.find()
    assert (await w.until(2))[1] is peer
    assert peer.error is None
    w.worker.say(frames.ChildEnded(number, "id-0_1", KILLED))
    await ended(peer)


async def test_lost_link_to_a_child_fails_its_open_calls(world):
    w = await world()
    peer, _ = await w.up()
    peer.send(frames.WhatRuns(5))
    await w.child.until(2)
    before = w.child.peer
    w.network.reset(w.child.peer)
    join = (await w.child.until(3))[2]
    assert isinstance(join, frames.Join)
    assert join.succeeds == [before]
    assert isinstance(peer.error, ConnectionLostError)
    w.find()
    second = (await w.until(2))[1]
    assert (second.worker_id, second.error) == ("id-0_1", None)


async def test_child_of_a_removed_rank_ends_with_it(world):
    w = await world()
    peer, _ = await w.up()
    w.group.shrink(0)
    w.group.membership.end_removed()
    await ended(peer)
    assert isinstance(peer.error, PeerDiedError)


async def test_look_up_of_a_child_of_a_removed_rank_ends(world):
    w = await world()
    w.find()
    await w.asked(frames.WhereIs)
    w.group.shrink(0)
    w.group.membership.end_removed()
    (found,) = await w.until(1)
    assert isinstance(found.error, PeerDiedError)
    w.group.membership.removed.clear()
    w.find()
    assert "its worker was removed from its group" in str((await w.until(2))[1])
