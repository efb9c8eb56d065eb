"""A lost connection to a worker that lives: open calls fail, later calls use a new connection."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from fake_worker import FakeWorker, Waiter

from rlinf_actors.errors import ConnectionLostError
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.peer import PREDECESSORS, Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState


class World:
    """A stand-in worker and a handle of its group of one."""

    def __init__(self, network, owner: bool) -> None:
        self.network = network
        self.worker = FakeWorker(network, "ipc:///w")
        self.failed: list[RemoteGroup] = []
        construction = None
        if owner:
            construction = Construction("m:C", [b"args"], 0)
        soon = None if owner else asyncio.get_running_loop().call_soon
        self.group = RemoteGroup(
            network, "driver:x", "here", "ns", "g", ["n0"], construction, self.failed.append, soon=soon, me="my-id"
        )
        self.group.adopt(GroupState("ns", "g", "m:C", "o", "running", [self.state()], "tok"))

    def state(self, **more) -> WorkerState:
        endpoint = Endpoint("here", self.worker.endpoint)
        return WorkerState("id-0", 0, 0, "10.0.0.1", "running", 1, endpoint, 0, 4567, **more)

    async def lose(self) -> None:
        self.network.reset(self.worker.peer)
        await asyncio.sleep(0)

    def call(self) -> tuple[Waiter, int]:
        waiter = Waiter()
        peer = self.group.peers[0]
        number = peer.open(waiter)
        peer.send(frames.Call(number, "step"))
        return waiter, number


async def test_open_call_fails_and_a_later_call_uses_a_new_link(network):
    world = World(network, owner=False)
    lost, _ = world.call()
    await world.worker.until(2)
    before = world.worker.peer
    gone: list[Exception] = []
    world.group.peers[0].on_gone(gone.append)
    await world.lose()
    assert isinstance(lost.error, ConnectionLostError)
    assert "the connection to g:0 on n0 was lost, and is there again" in str(lost.error)
    assert gone == [lost.error]
    later, number = world.call()
    join, call = (await world.worker.until(4))[2:]
    assert (join.succeeds, join.worker, join.worker_id) == ([before], "my-id", "id-0")
    assert call == frames.Call(number, "step")
    world.worker.say(frames.Ok(number))
    await later.told.wait()
    assert later.error is None


async def test_new_link_does_not_construct_a_worker_again(network):
    world = World(network, owner=True)
    create = (await world.worker.until(2))[1]
    world.worker.say(frames.Ok(create.id))
    await world.group.ready
    await world.lose()
    world.call()
    assert [type(frame) for frame in (await world.worker.until(4))[2:]] == [frames.Join, frames.Call]
    assert world.failed == []


async def test_link_lost_during_construction_ends_the_group(network):
    world = World(network, owner=True)
    await world.worker.until(2)
    await world.lose()
    with pytest.raises(ConnectionLostError):
        await world.group.ready
    assert world.failed == [world.group]


async def test_worker_that_ends_after_a_lost_link_fails_later_calls(network):
    world = World(network, owner=False)
    world.call()
    await world.worker.until(2)
    await world.lose()
    later, _ = world.call()
    world.group.update([WorkerState("id-0", 0, 0, "10.0.0.1", "gone", exit=ExitReport("signalled", signal=9))])
    assert "signal 9" in str(later.error)
    await world.lose()  # no link is left to lose
    assert world.group.gone.done()


async def test_join_names_the_last_of_many_links_that_brought_nothing(network):
    """A worker takes only short Joins: one that named thousands of links could never join."""
    peers = [Peer(network, "driver:x", "g:0", 0, "n0") for _ in range(2000)]
    for number, (old, new) in enumerate(itertools.pairwise(peers)):
        old.link_identity = b"driver:x#%d" % number
        new.succeed(old)
    assert peers[-1].succeeds == [b"driver:x#%d" % number for number in range(2000 - 1 - PREDECESSORS, 2000 - 1)]
