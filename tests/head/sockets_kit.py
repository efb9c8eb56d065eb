"""A head with keys and a worker of one of its jobs, with real sockets in one loop, and their clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from rlinf_actors.errors import AuthenticationError, ClusterTimeoutError
from rlinf_actors.head.audit import AuditLog
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.link import LinkOptions, secret_identity
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security.job import JobGate, job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire import frames
from rlinf_actors.wire.agent_messages import AgentHello, ClientHello
from rlinf_actors.wire.client_messages import GetEvents, GetStatus
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.key_messages import AddKey
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import NodeReport
from rlinf_actors.worker.joining import RejectedPeers
from rlinf_actors.worker.worker_server import WorkerServer

HEAD = KeyPair.make()


class KeyedHead:
    """A head with keys, and processes that connect to it, each with its own sockets.

    Args:
        more: endpoints besides the TCP one.
        audit: the audit log, if there is one.
    """

    def __init__(self, *more: str, audit: AuditLog | None = None) -> None:
        self._networks: list[ZmqNetwork] = []
        self._clients: list[ControlClient] = []
        self._ports = HeldPorts()  # keeps the port while one head replaces another
        self._network = self.net(HEAD)
        self.server = HeadServer(self._network, own=OwnKeys(HEAD.public), audit=audit)
        self.endpoint = self.server.start([*more, f"tcp://127.0.0.1:{self._ports.hold()}"])[-1]
        self.admin = self.client(HEAD)

    def net(self, pair: KeyPair | None, head: str = HEAD.public) -> ZmqNetwork:
        network = ZmqNetwork(asyncio.get_running_loop(), Security(pair is None, pair, head))
        self._networks.append(network)
        return network

    def client(
        self, pair: KeyPair | None, head: str = HEAD.public, on_notice: Callable[[Body], None] = lambda notice: None
    ) -> ControlClient:
        identity = secret_identity("driver:x")
        client = ControlClient(self.net(pair, head), self.endpoint, identity, on_notice)
        self._clients.append(client)
        return client

    def replaced(self, pair: KeyPair, driver: KeyPair) -> None:
        """Replace this head by another one with these keys and short beats."""
        self.server.close()
        self._networks.remove(self._network)
        self._network.close()  # when this returns, the port is free
        self._network = self.net(pair)
        own = OwnKeys(pair.public, driver.public, "here")
        self.server = HeadServer(self._network, own=own, timing=Timing(beat_s=0.1))
        self.server.start([self.endpoint])

    async def listed(self, role: str, name: str, token_s: float | None = None) -> KeyPair:
        pair = KeyPair.make()
        await self.admin.request(AddKey(pair.public, role, name, "me", token_s), 10)  # type: ignore[arg-type]
        return pair

    async def noted(self, *words: str) -> str:
        """Wait until a refusal with these words is in the event log; return its text."""
        since, seen = 0, []
        while True:
            events = await self.admin.request(GetEvents(since, wait_s=5.0), 10)
            texts = [event.text for event in events.events if event.kind == "refused"]
            found = [text for text in texts if all(word in text for word in words)]
            if found:
                return str(found[0])
            seen = [*seen, *texts]
            assert events.events, f"no refusal with {words}: {seen}"
            since = events.next

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        for network in reversed(self._networks):
            network.close()
        self._ports.close()


async def refused(client: ControlClient, body: Body | None = None, within_s: float = 5.0) -> str:
    with pytest.raises((AuthenticationError, ClusterTimeoutError)) as error:
        await client.request(body or GetStatus(), within_s)
    return str(error.value)


def driver_hello(incarnation: str = "i1", namespace: str = "ns") -> ClientHello:
    return ClientHello(PROTOCOL, "1", incarnation, "driver", namespace, "elsewhere", 0, 0)


def agent_hello(name: str) -> AgentHello:
    report = NodeReport(
        name, hostname=name, ip="10.0.0.1", host=name, num_cpus=1, memory_bytes=1, python="3", interpreter="/py"
    )
    return AgentHello(PROTOCOL, "1", "i2", report)


class _LogLines(logging.Handler):
    """The lines that one logger writes from now on."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._logger = logging.getLogger(logger)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put_nowait(record.getMessage())

    async def wait(self, *words: str) -> str:
        while True:
            line = await asyncio.wait_for(self._lines.get(), 10)
            if all(word in line for word in words):
                return line

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()


class KeyedWorker:
    """A worker's listener in a cluster with keys, and processes that try to join it.

    Args:
        token: of its job.
    """

    def __init__(self, token: str = "ours") -> None:
        self._networks: list[ZmqNetwork] = []
        self._token = token
        self.job = job_pair(token)
        rejected = RejectedPeers()
        gate = JobGate(self.job.public, "ns", rejected.add)
        network = self.net(Security.of_worker(token, HEAD.public, "tcp://127.0.0.1:1", "10.0.0.1"))
        self._server = WorkerServer(network, "g-0", "g:0", token, gate=gate, rejected=rejected)
        self._server.refuse(ValueError("there is no class: a member is told so"))
        self.bind = self._server.bind
        self.endpoint = ""
        self._log = _LogLines("rlinf_actors.worker")

    def net(self, security: Security) -> ZmqNetwork:
        network = ZmqNetwork(asyncio.get_running_loop(), security)
        self._networks.append(network)
        return network

    async def join(self, security: Security, *, link_token: str = "", token: str = "", at: str = "") -> str:
        """Connect with *security*, join with *token* and call a method; return why there is no answer, or ""."""
        told: asyncio.Queue[str] = asyncio.Queue()

        def received(peer: bytes, header: bytes, parts: list) -> None:
            frame = frames.decode(header)
            told.put_nowait("" if isinstance(frame, frames.Raised) else frame.text)

        link = self.net(security).link(
            at or self.endpoint,
            secret_identity("driver:x#1"),
            received,
            LinkOptions(token=link_token, on_rejected=lambda why, for_good: told.put_nowait(why)),
        )
        link.send(frames.encode(frames.Join(PROTOCOL, "1", "3.11", "driver:x", token or self._token, "g-0")))
        link.send(frames.encode(frames.Call(1, "anything")))
        return await asyncio.wait_for(told.get(), 10)

    async def logged(self, *words: str) -> str:
        """Wait until the worker's log has a line with these words; return the line."""
        return await self._log.wait(*words)

    def close(self) -> None:
        self._log.close()
        self._server.close(0)
        for network in reversed(self._networks):
            network.close()
