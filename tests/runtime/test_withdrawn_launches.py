"""Withdrawn launches, and what a restarted head learns of launches."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from rlinf_actors.errors import ClusterTimeoutError, RlinfActorsError
from rlinf_actors.net.rpc import ControlServer
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.wire.agent_messages import HELLO_AGAIN, Beat, ClientHello, Welcome
from rlinf_actors.wire.client_messages import Done, Handles, Launch, Launched, StopGroup
from rlinf_actors.wire.values import Endpoint, GroupState, WorkerSpec, WorkerState

SPECS = [WorkerSpec(f"abc-{rank}", "g", "ns", rank, 2, rank, {}) for rank in range(2)]
IDS = ["abc-0", "abc-1"]
MESSAGE = Launch("ns", "g", "m:C", SPECS)


class Head:
    """A head's end that the test controls, and a driver's runtime that is connected to it."""

    def __init__(self, directory) -> None:
        self.network = ZmqNetwork(asyncio.get_running_loop())
        self.server = ControlServer(self.network, lambda peer, envelope: self.came.put_nowait((peer, envelope)))
        self.came: asyncio.Queue = asyncio.Queue()
        self.endpoint = self.server.bind(f"ipc://{directory}/head")
        self.runtime = Runtime("driver", "ns")

    async def connect(self) -> None:
        connecting = self.runtime.io.submit(self.runtime.connect(self.endpoint, 10))
        await self.welcome()
        await asyncio.wrap_future(connecting)

    async def next(self):
        """The next message that is not a heartbeat."""
        while True:
            peer, envelope = await asyncio.wait_for(self.came.get(), 10)
            if not isinstance(envelope.body, Beat):
                return peer, envelope

    async def welcome(self) -> bytes:
        peer, hello = await self.next()
        assert isinstance(hello.body, ClientHello)
        # this head answers no heartbeats: a driver that missed three would send a hello in between
        self.server.reply(peer, hello.id, Welcome("epoch", "1", 60.0, 600.0))
        return peer

    def launch(self) -> concurrent.futures.Future[None]:
        construction = Construction("m:C", [b""], 0)
        group = self.runtime.groups.new("ns", "g", ["n0", "n1"], construction, IDS)
        return self.runtime.io.submit(self.runtime.groups.launch(MESSAGE, group))


@pytest.fixture
async def head(tmp_path):
    made = Head(tmp_path)
    await made.connect()
    yield made
    await asyncio.to_thread(made.runtime.close)
    made.server.close()
    made.network.close()


def states() -> list[WorkerState]:
    return [WorkerState(id, rank, rank, "", "running", 7, Endpoint("h", "ipc://x")) for rank, id in enumerate(IDS)]


async def test_cancelled_launch_is_withdrawn_by_its_worker_ids(head):
    launching = head.launch()
    assert (await head.next())[1].body == MESSAGE
    launching.cancel()
    peer, stop = await head.next()
    assert stop.body == StopGroup("ns", "g", 1.0, IDS)
    again = head.launch()  # the next launch waits for that
    head.server.reply(peer, stop.id, Done())
    _, asked = await head.next()
    assert asked.body == MESSAGE
    head.server.reply(peer, asked.id, Launched(GroupState("ns", "g", "m:C", "d", "running", states())))
    await asyncio.wrap_future(again)


async def test_launch_that_timed_out_is_withdrawn(head):
    launching = asyncio.wrap_future(head.launch())
    peer, asked = await head.next()
    head.server.fail(peer, asked.id, "timeout", "too late")
    with pytest.raises(ClusterTimeoutError):
        await launching
    _, stop = await head.next()
    assert stop.body == StopGroup("ns", "g", 1.0, IDS)


async def test_refused_launch_sends_no_stop(head):
    launching = asyncio.wrap_future(head.launch())
    peer, asked = await head.next()
    head.server.fail(peer, asked.id, "name_in_use", "taken")
    with pytest.raises(RlinfActorsError, match="taken"):
        await launching
    again = asyncio.wrap_future(head.launch())
    peer, asked = await head.next()
    assert asked.body == MESSAGE  # no StopGroup came first
    head.server.fail(peer, asked.id, "name_in_use", "taken")
    with pytest.raises(RlinfActorsError, match="taken"):
        await again


async def test_restarted_head_gets_known_groups_and_launches_before_repeated_requests(head):
    launching = head.launch()
    peer, _ = await head.next()
    head.server.notify(peer, Beat(HELLO_AGAIN))
    peer = await head.welcome()
    assert (await head.next())[1].body == Handles([], IDS)
    _, asked = await head.next()
    assert asked.body == MESSAGE
    head.server.reply(peer, asked.id, Launched(GroupState("ns", "g", "m:C", "d", "running", states())))
    await asyncio.wrap_future(launching)
    head.server.notify(peer, Beat(HELLO_AGAIN))
    await head.welcome()
    _, told = await head.next()
    assert ([state.id for handle in told.body.groups for state in handle.workers], told.body.launching) == (IDS, [])


async def test_group_in_shutdown_stays_known_until_its_workers_are_gone(head):
    launching = head.launch()
    peer, asked = await head.next()
    head.server.reply(peer, asked.id, Launched(GroupState("ns", "g", "m:C", "d", "running", states())))
    await asyncio.wrap_future(launching)
    group = head.runtime.groups.get("ns", "g")
    stopping = head.runtime.io.submit(head.runtime.groups.stop(group, 5.0))
    assert (await head.next())[1].body == StopGroup("ns", "g", 5.0, IDS)
    head.server.notify(peer, Beat(HELLO_AGAIN))
    peer = await head.welcome()
    told = (await head.next())[1].body
    assert [handle.name for handle in told.groups] == ["g"]
    _, stop = await head.next()
    assert stop.body == StopGroup("ns", "g", 5.0, IDS)
    head.server.reply(peer, stop.id, Done())
    await asyncio.wrap_future(stopping)
    head.server.notify(peer, Beat(HELLO_AGAIN))
    await head.welcome()
    assert (await head.next())[1].body == Handles([])


async def test_group_whose_end_was_not_confirmed_can_be_stopped_again(head):
    launching = head.launch()
    peer, asked = await head.next()
    head.server.reply(peer, asked.id, Launched(GroupState("ns", "g", "m:C", "d", "running", states())))
    await asyncio.wrap_future(launching)
    group = head.runtime.groups.get("ns", "g")
    stopping = asyncio.wrap_future(head.runtime.io.submit(head.runtime.groups.stop(group, 5.0)))
    peer, stop = await head.next()
    head.server.fail(peer, stop.id, "timeout", "its node does not answer")
    with pytest.raises(ClusterTimeoutError):
        await stopping
    assert not group.gone.done(), "its workers may run"
    head.server.notify(peer, Beat(HELLO_AGAIN))
    await head.welcome()
    assert (await head.next())[1].body == Handles([]), "a restarted head is to end it"
    again = asyncio.wrap_future(head.runtime.io.submit(head.runtime.groups.stop(group, 5.0)))
    peer, stop = await head.next()
    assert stop.body == StopGroup("ns", "g", 5.0, IDS)
    head.server.reply(peer, stop.id, Done())
    await again
    assert group.gone.done()
