"""Links of a large group by relays: they wait while relays start, and are direct when a relay does not come or ends."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_actors.errors import ConnectionLostError, WorkerDiedError
from rlinf_actors.net import relay_path
from rlinf_actors.runtime.node_relays import NodeRelays
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, GroupState, WorkerState


class Links:
    """A network that keeps the frames of each link that it makes, by endpoint."""

    forked, memory, bulk = False, None, None

    def __init__(self) -> None:
        self.links: dict[str, list[frames.AnyFrame]] = {}
        self.closed: list[str] = []

    def link(self, endpoint, identity, on_message, options):
        sent = self.links[endpoint] = []
        network = self

        class Link:
            def send(self, header, parts=(), *, now=False):
                sent.append(frames.decode(header))

            def close(self, linger_ms=0):
                network.closed.append(endpoint)

        return Link()

    def soon(self, function):
        asyncio.get_running_loop().call_soon(function)


class World:
    """A group of two ranks on node 1 and one on node 0, and the relay of node 1 at tcp://relay."""

    def __init__(self) -> None:
        self.network = Links()
        self.group = RemoteGroup(
            self.network, "driver:x", "here", "ns", "g", ["n"] * 3, soon=asyncio.get_running_loop().call_soon
        )
        self.group.relays = self.relays = NodeRelays()
        self.relays.begin(1)
        self.relay = Peer(self.network, "driver:x", "relay:0", 0, "n1")
        self.relay.wanted = True
        self.relay.connect(Endpoint("there", "", "tcp://relay"), "here", "", lambda: None)

    def adopt(self) -> None:
        self.group.adopt(GroupState("ns", "g", "m:C", "o", "running", [self.state(rank) for rank in range(3)], "tok"))

    def state(self, rank: int) -> WorkerState:
        endpoint = Endpoint("there" if rank else "here", f"ipc:///w/{rank}", f"tcp://{rank}")
        return WorkerState(f"l-{rank}", rank, min(rank, 1), "10.0.0.1", "running", 1, endpoint, 0, 4567)

    def call(self, rank: int) -> list[Exception]:
        errors: list[Exception] = []
        peer = self.group.peers[rank]

        class Waiter:
            anywhere = False

            def answer(self, frame, parts):
                return True

            fail = staticmethod(errors.append)

        peer.send(frames.Call(peer.open(Waiter()), "step"))
        return errors

    def relayed(self) -> list[frames.Relayed]:
        return [frame for frame in self.network.links["tcp://relay"] if isinstance(frame, frames.Relayed)]


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(relay_path, "RESET_S", 0.0)
    return World()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0.001)


async def test_links_wait_for_the_relay_and_then_go_by_it(world):
    world.adopt()
    for rank in range(3):
        world.call(rank)
    await settle()
    assert set(world.network.links) == {"tcp://relay", "ipc:///w/0"}
    world.relays.ready(1, world.relay)
    await settle()
    opened = [link for frame in world.relayed() for link in frame.opened]
    assert [link.endpoint for link in opened] == ["ipc:///w/1", "ipc:///w/2"]
    assert set(world.network.links) == {"tcp://relay", "ipc:///w/0"}
    assert not world.relay.awaited, "a path alone makes no reachability checks"


async def test_relay_that_does_not_come_leaves_links_direct(world):
    world.adopt()
    world.call(1)
    await settle()
    world.relays.give_up(1)
    await settle()
    assert set(world.network.links) == {"tcp://relay", "tcp://1"}


async def test_end_of_the_relay_fails_open_calls_and_makes_direct_links(world):
    world.relays.ready(1, world.relay)
    world.adopt()
    errors = [world.call(rank) for rank in range(3)]
    await settle()
    before = [peer.link_identity for peer in world.group.peers]
    world.relay.fail(WorkerDiedError("the relay was killed"))
    await settle()
    assert [[type(error) for error in found] for found in errors] == [[], [ConnectionLostError], [ConnectionLostError]]
    for rank in (1, 2):
        (join,) = world.network.links[f"tcp://{rank}"]
        assert join.succeeds == [before[rank]]
    assert world.relays.knows(1)
    assert world.relays.path(1) is None


async def test_whoever_gets_the_error_can_call_all_ranks_again(world):
    """When the first call fails, every rank has its new Peer."""
    world.relays.ready(1, world.relay)
    world.adopt()
    before = list(world.group.peers)
    seen: list[list[Peer]] = []
    before[2].on_gone(lambda _: seen.append(list(world.group.peers)))
    before[1].on_gone(lambda _: seen.append(list(world.group.peers)))
    for rank in range(3):
        world.call(rank)
    await settle()
    world.relay.fail(WorkerDiedError("the relay was killed"))
    await settle()
    assert len(seen) == 2
    for peers in seen:
        assert [now is then for now, then in zip(peers, before, strict=True)] == [True, False, False]


async def test_relay_that_has_ended_before_it_is_used_leaves_links_direct(world):
    world.relay.fail(WorkerDiedError("killed at once"))
    world.relays.ready(1, world.relay)
    await settle()
    world.adopt()
    world.call(1)
    await settle()
    assert "tcp://1" in world.network.links


async def test_added_rank_goes_by_the_relay_of_its_node(world):
    world.relays.ready(1, world.relay)
    world.adopt()
    peer = world.group._peer(3, "n")
    state = world.state(3)
    world.group._connect(peer, state, lambda: None)
    assert peer.relay is world.relays.path(1)
    assert peer.sibling is not None
