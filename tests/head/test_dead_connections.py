"""An agent's report of a driver's end, over real sockets, with an open and with a closed connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.link import secret_identity
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.wire.agent_messages import AgentHello, Beat, ClientHello, ProcessGone, Watch
from rlinf_actors.wire.client_messages import Events, GetEvents, GetNodes, Nodes
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import NodeReport


class Cluster:
    """A head, an agent, and a driver whose process the agent watches."""

    def __init__(self, directory: Path) -> None:
        self.network = ZmqNetwork(asyncio.get_running_loop(), Security())
        self.server = HeadServer(self.network)
        (self.endpoint,) = self.server.start([f"ipc://{directory}/head"])
        self.heard: dict[str, asyncio.Queue[Body]] = {"agent": asyncio.Queue(), "driver": asyncio.Queue()}
        self.agent, self.driver = self.client("agent"), self.client("driver")

    def client(self, name: str) -> ControlClient:
        return ControlClient(self.network, self.endpoint, secret_identity(name), self.heard[name].put_nowait)

    async def begin(self) -> None:
        report = NodeReport(
            "n1", hostname="n1", ip="10.0.0.1", host="h", num_cpus=1, memory_bytes=1, python="3", interpreter="/py"
        )
        await self.agent.request(AgentHello(PROTOCOL, "1", "i1", report), 10)
        await self.driver.request(ClientHello(PROTOCOL, "1", "d1", "driver", "ns", "h", 77, 5), 10)
        assert await self.next("agent", Watch) == Watch("d1", 77, 5)

    async def next(self, name: str, kind: type[Body]) -> Body:
        while not isinstance(said := await asyncio.wait_for(self.heard[name].get(), 10), kind):
            pass
        return said

    async def ended(self) -> str:
        """Wait for the event of the driver's end and return it."""
        asked = GetEvents(wait_s=5.0)
        while True:
            answer = await self.agent.request(asked, 10)
            assert isinstance(answer, Events)
            assert answer.events, "nothing happened in 5 s"
            for event in answer.events:
                if event.kind == "driver_ended":
                    return event.text
            asked = GetEvents(answer.next, answer.log, wait_s=5.0)

    def close(self) -> None:
        self.agent.close()
        self.driver.close()
        self.server.close()
        self.network.close()


@pytest.fixture
async def cluster(tmp_path: Path, rlinf_leak_check) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    with contextlib.closing(made):
        await made.begin()
        yield made


async def test_reported_driver_with_a_closed_connection_has_ended(cluster: Cluster) -> None:
    cluster.driver.close()
    cluster.agent.notify(ProcessGone("d1"))
    assert (await cluster.ended()).endswith("has ended: its process ended")


async def test_reported_driver_with_an_open_connection_has_not_ended(cluster: Cluster) -> None:
    cluster.agent.notify(ProcessGone("d1"))
    for _ in range(3):  # at each attempt
        assert await cluster.next("driver", Beat) == Beat("")
    assert isinstance(await cluster.driver.request(GetNodes(), 10), Nodes)
