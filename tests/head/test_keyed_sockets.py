"""Who comes in at the head's socket and at a worker's, over CURVE on loopback: the right one; the others are noted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from rlinf_actors.errors import AuthenticationError, ClusterTimeoutError
from rlinf_actors.head.keys import OwnKeys
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.link import secret_identity
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.security import Security
from rlinf_actors.net.transport import ZmqNetwork
from rlinf_actors.runtime.headlink import HeadLink
from rlinf_actors.security.job import JobGate, job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire import frames
from rlinf_actors.wire.keys import AddKey, RevokeKey
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.operators import GetEvents, GetStatus, Status
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.session import AgentHello, ClientHello, Welcome
from rlinf_actors.wire.values import NodeReport
from rlinf_actors.worker.server import WorkerServer

HEAD = KeyPair.make()


class KeyedHead:
    """A head with keys, and processes that come to it, each with sockets of its own."""

    def __init__(self) -> None:
        self._networks: list[ZmqNetwork] = []
        self._clients: list[ControlClient] = []
        self.server = HeadServer(self.net(HEAD), own=OwnKeys(HEAD.public))
        (self.endpoint,) = self.server.start(["tcp://127.0.0.1:0"])
        self.admin = self.client(HEAD)

    def net(self, pair: KeyPair | None, head: str = HEAD.public) -> ZmqNetwork:
        network = ZmqNetwork(asyncio.get_running_loop(), Security(pair is None, pair, head))
        self._networks.append(network)
        return network

    def client(self, pair: KeyPair | None, head: str = HEAD.public) -> ControlClient:
        client = ControlClient(self.net(pair, head), self.endpoint, secret_identity("x"), lambda notice: None)
        self._clients.append(client)
        return client

    async def listed(self, role: str, name: str, token_s: float | None = None) -> KeyPair:
        pair = KeyPair.make()
        await self.admin.request(AddKey(pair.public, role, name, "me", token_s), 10)  # type: ignore[arg-type]
        return pair

    async def noted(self, *words: str) -> None:
        """Wait until a refusal with these words is in the event log."""
        since, seen = 0, []
        while True:
            events = await self.admin.request(GetEvents(since, wait_s=5.0), 10)
            texts = [event.text for event in events.events if event.kind == "refused"]
            if any(all(word in text for word in words) for text in texts):
                return
            seen = [*seen, *texts]
            assert events.events, f"no refusal with {words}: {seen}"
            since = events.next

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        for network in reversed(self._networks):
            network.close()


@pytest.fixture
async def head(rlinf_leak_check) -> AsyncIterator[KeyedHead]:
    made = KeyedHead()
    with contextlib.closing(made):
        yield made


async def refused(client: ControlClient, body: Body | None = None, within_s: float = 5.0) -> str:
    with pytest.raises((AuthenticationError, ClusterTimeoutError)) as error:
        await client.request(body or GetStatus(), within_s)
    return str(error.value)


def driver_hello(incarnation: str = "i1") -> ClientHello:
    return ClientHello(PROTOCOL, "1", incarnation, "driver", "ns", "elsewhere", 0, 0)


def agent_hello(name: str) -> AgentHello:
    report = NodeReport(
        name, hostname=name, ip="10.0.0.1", host=name, num_cpus=1, memory_bytes=1, python="3", interpreter="/py"
    )
    return AgentHello(PROTOCOL, "1", "i2", report)


async def test_each_listed_key_comes_in_for_what_it_is(head: KeyedHead) -> None:
    assert isinstance(await head.admin.request(GetStatus(), 10), Status)
    driver = head.client(await head.listed("driver", "ann"))
    welcome = await driver.request(driver_hello(), 10)
    assert isinstance(welcome, Welcome)
    agent = head.client(await head.listed("agent", "n1"))
    assert isinstance(await agent.request(agent_hello("n1"), 10), Welcome)
    worker = head.client(job_pair(welcome.token))
    assert isinstance(await worker.request(GetStatus("ns"), 10), Status)


async def test_without_a_key(head: KeyedHead) -> None:
    assert "wants a key, and this process has none" in await refused(head.client(None))


async def test_with_another_server_in_mind(head: KeyedHead) -> None:
    pair = await head.listed("driver", "ann")
    assert "does not have the key that is expected" in await refused(
        head.client(pair, KeyPair.make().public), within_s=1.0
    )
    await head.noted("expected a server with another key")


async def test_with_a_key_that_nobody_listed(head: KeyedHead) -> None:
    assert "not listed, or revoked" in await refused(head.client(KeyPair.make()))
    await head.noted("127.0.0.1", "is not listed")


async def test_with_a_key_that_was_revoked(head: KeyedHead) -> None:
    pair = await head.listed("driver", "ann")
    before = head.client(pair)
    await before.request(driver_hello(), 10)
    await head.admin.request(RevokeKey("ann", "me"), 10)
    assert "did not answer" in await refused(before, within_s=1.0)  # its connection is there, and nobody listens to it
    assert "not listed, or revoked" in await refused(head.client(pair))
    await head.noted("key of driver 'ann'", "revoked it")


async def test_with_a_join_token_that_has_expired(head: KeyedHead) -> None:
    pair = await head.listed("agent", "n1", token_s=0.0)
    assert "not listed, or revoked" in await refused(head.client(pair))
    await head.noted("join token of agent 'n1'", "its time was over")


async def test_in_another_role(head: KeyedHead) -> None:
    agent, driver = await head.listed("agent", "n1"), await head.listed("driver", "ann")
    assert "ClientHello" in await refused(head.client(agent), driver_hello())
    assert "AgentHello" in await refused(head.client(driver), agent_hello("n1"))
    assert "n1" in await refused(head.client(agent), agent_hello("n2"))
    await head.noted("agent 'n1'", "ClientHello")
    await head.noted("driver 'ann'", "AgentHello")


async def test_with_the_key_of_a_job_that_is_not_here(head: KeyedHead) -> None:
    assert "not listed, or revoked" in await refused(head.client(job_pair("a token of another head's")))
    await head.noted("is not listed")


async def test_a_worker_waits_for_a_restarted_head_that_does_not_know_its_job_yet(head: KeyedHead) -> None:
    token = "a token from before the restart"
    hello = ClientHello(PROTOCOL, "1", "w1", "worker", "ns", "elsewhere", 0, 0, "g-0", token)
    link = HeadLink(head.net(job_pair(token)), head.endpoint, hello, lambda notice: None)
    starting = asyncio.ensure_future(link.start(15))
    try:
        await head.noted("is not listed")
        driver = head.client(await head.listed("driver", "ann"))
        await driver.request(msgspec.structs.replace(driver_hello(), token=token), 10)  # it knows the job
        with pytest.raises(AuthenticationError, match="worker 'g-0' is not known here"):  # so it was heard
            await starting
    finally:
        link.close("the test ends")


# --- a worker's socket -----------------------------------------------------------------------------


class KeyedWorker:
    """A worker's listening side in a cluster with keys, and those who try to join it."""

    def __init__(self) -> None:
        self._networks: list[ZmqNetwork] = []
        security = Security.of_worker("ours", HEAD.public, "tcp://127.0.0.1:1", "10.0.0.1")
        assert security.pair is not None
        self.job = security.pair
        network = self._net(security)
        self._server = WorkerServer(network, "id-0", "g:0", "ours", gate=JobGate(self.job.public, "ns"))
        self._server.refuse(ValueError("there is no class: a member is told so"))
        self.endpoint = self._server.bind("tcp://127.0.0.1:0")

    def _net(self, security: Security) -> ZmqNetwork:
        network = ZmqNetwork(asyncio.get_running_loop(), security)
        self._networks.append(network)
        return network

    async def join(self, security: Security, *, link_token: str = "", token: str = "ours") -> str:
        """Come with that security, say that token and call something; why that is not answered, "" if it is."""
        told: asyncio.Queue[str] = asyncio.Queue()

        def received(peer: bytes, header: bytes, parts: list) -> None:
            frame = frames.decode(header)
            told.put_nowait("" if isinstance(frame, frames.Raised) else frame.text)

        link = self._net(security).link(
            self.endpoint,
            secret_identity("driver:x#1"),
            received,
            token=link_token,
            on_turned_away=lambda why, for_good: told.put_nowait(why),
        )
        link.send(frames.encode(frames.Join(PROTOCOL, "1", "3.11", "driver:x", token, "id-0")))
        link.send(frames.encode(frames.Call(1, "anything")))
        return await asyncio.wait_for(told.get(), 10)

    def close(self) -> None:
        self._server.close(0)
        for network in reversed(self._networks):
            network.close()


@pytest.fixture
async def worker(rlinf_leak_check) -> AsyncIterator[KeyedWorker]:
    made = KeyedWorker()
    with contextlib.closing(made):
        yield made


async def test_a_member_of_the_job_is_answered(worker: KeyedWorker) -> None:
    assert await worker.join(Security(), link_token="ours") == ""  # a driver that came to the head by a unix socket
    assert await worker.join(Security(pair=KeyPair.make(), head=HEAD.public), link_token="ours") == ""


async def test_the_token_alone_is_not_enough(worker: KeyedWorker) -> None:
    plain = Security(insecure_test_network=True)
    assert "wants a key" in await worker.join(plain, link_token="ours")


async def test_the_key_of_another_job(worker: KeyedWorker) -> None:
    assert "does not have the key that is expected" in await worker.join(Security(), link_token="theirs")
    knows_ours = Security(pair=job_pair("theirs"), head=worker.job.public)
    assert "not listed, or revoked" in await worker.join(knows_ours)


@pytest.mark.parametrize("role", ["head", "agent", "driver"])
async def test_any_other_key(worker: KeyedWorker, role: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = HEAD if role == "head" else KeyPair.make()
    assert "not listed, or revoked" in await worker.join(Security(pair=pair, head=worker.job.public))
    assert "refused a connection from 127.0.0.1: it has the key of another" in caplog.text


async def test_another_server_in_mind(worker: KeyedWorker) -> None:
    assert "does not have the key that is expected" in await worker.join(
        Security(pair=worker.job, head=KeyPair.make().public)
    )


async def test_the_pair_without_the_token(worker: KeyedWorker) -> None:
    assert "is not a member of the job" in await worker.join(Security(), link_token="ours", token="guess")
