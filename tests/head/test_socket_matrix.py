"""Each listening socket admits the right processes only; the others get the reason, and are logged.

The head writes refusals to its event log, a worker and a template to their own logs.

The sockets are those of docs/explanation/security.md ("Sockets"; tests/live/test_listening_sockets.py finds no other
in a running cluster). The sockets of torch have no protection; that page names this exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from sockets_kit import HEAD, KeyedHead, KeyedWorker, agent_hello, driver_hello, refused

from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.security.job import job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import fingerprint
from rlinf_actors.template.agent_link import AgentLink
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.agent_messages import ClientHello, Welcome, WorkerReady
from rlinf_actors.wire.client_messages import GetNodes, GetStatus, Launch, Launched, Status
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.key_messages import Enroll, Enrolled, RevokeKey
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint, WorkerSpec


class World:
    """Driver ann's job "ns" has a worker, g:0, on node n1; driver bob has a job of his own."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.head = KeyedHead(f"ipc://{place}/head")
        self.worker: KeyedWorker | None = None

    async def start(self) -> None:
        head = self.head
        self.ann, self.bob = head.client(await head.listed("driver", "ann")), await head.listed("driver", "bob")
        self.token = await self._job(self.ann, "ns")
        self.others = await self._job(head.client(self.bob), "bobs")
        self.agent = head.client(await head.listed("agent", "n1"))
        await self.agent.request(agent_hello("n1"), 10)
        await self.ann.request(GetNodes(1), 10)
        launch = Launch("ns", "g", "m:C", [WorkerSpec("g-0", "g", "ns", 0, 1, 0, {})])
        assert isinstance(await self.ann.request(launch, 10), Launched)
        self.worker = KeyedWorker(self.token)
        ipc = self.worker.bind(f"ipc://{self.place}/w")
        self.worker.endpoint = self.worker.bind("tcp://127.0.0.1:0")
        self.agent.notify(WorkerReady("g-0", 7, Endpoint("h", ipc, self.worker.endpoint)))

    async def _job(self, client: ControlClient, namespace: str) -> str:
        welcome = await client.request(driver_hello(f"i-{namespace}", namespace), 10)
        assert isinstance(welcome, Welcome)
        return welcome.token

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.head.close()


@pytest.fixture
async def world(rlinf_leak_check, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("rlinf_actors.net.reachability.SURE_S", 0.1)
    with tempfile.TemporaryDirectory(prefix="m-") as place, contextlib.closing(World(place)) as made:
        await made.start()
        yield made


# --- TCP: each process proves a key ---


@dataclass
class Visitor:
    """A process that connects over TCP.

    Attributes:
        pair: its own key pair, or None.
        knows: the public key that it expects of the server, "" for the right one.
        says: its message to the head.
        token: its token for a worker.
    """

    pair: KeyPair | None
    knows: str = ""
    says: Body = field(default_factory=GetStatus)
    token: str = ""


async def no_key(world: World) -> Visitor:
    return Visitor(None)


async def wrong_server_key(world: World) -> Visitor:
    return Visitor(world.bob, KeyPair.make().public)


async def unlisted_key(world: World) -> Visitor:
    return Visitor(KeyPair.make())


async def revoked_key(world: World) -> Visitor:
    pair = await world.head.listed("driver", "eve")
    await world.head.admin.request(RevokeKey("eve", "me"), 10)
    return Visitor(pair)


async def agents_key(world: World) -> Visitor:
    return Visitor(await world.head.listed("agent", "n2"), says=driver_hello())


async def drivers_key(world: World) -> Visitor:
    return Visitor(world.bob, says=agent_hello("n2"))


async def heads_key(world: World) -> Visitor:
    return Visitor(HEAD, says=driver_hello())


async def another_nodes_key(world: World) -> Visitor:
    return Visitor(await world.head.listed("agent", "n2"), says=agent_hello("n1"))


async def expired_token(world: World) -> Visitor:
    return Visitor(await world.head.listed("agent", "n3", token_s=0.0))


async def used_token(world: World) -> Visitor:
    pair = await world.head.listed("agent", "n4", token_s=900.0)
    await world.head.client(pair).request(Enroll(KeyPair.make().public), 10)
    return Visitor(pair)


async def unused_token(world: World) -> Visitor:
    return Visitor(await world.head.listed("agent", "n5", token_s=900.0))


async def another_jobs_key(world: World) -> Visitor:
    hello = ClientHello(PROTOCOL, "1", "w9", "worker", "ns", "elsewhere", 0, 0, "g-0")
    return Visitor(job_pair(world.others), says=hello)


async def another_clusters_job(world: World) -> Visitor:
    return Visitor(job_pair("a token of another head's"))


async def jobs_key_alone(world: World) -> Visitor:
    return Visitor(job_pair(world.token), token="a guess")


NONE = "what listens there wants a key, and this process has none"
OTHER = "what listens there does not have the key that is expected of it"
CLOSED = "is not admitted there: it is not listed, or revoked, or has expired"
HEADS, WORKERS = "the head's", "a worker's"
NOT_OURS = "refused a connection from 127.0.0.1: key {key} is not its job's"

TCP = [
    # visitor              where    its error                         the log has
    (no_key,               HEADS,   NONE,                             "it came without a key"),
    (no_key,               WORKERS, NONE,                             "it came without a key"),
    (wrong_server_key,     HEADS,   OTHER,                            "it expected a server with another key"),
    (wrong_server_key,     WORKERS, OTHER,                            "it expected a server with another key"),
    (unlisted_key,         HEADS,   CLOSED,                           "127.0.0.1: key {key} is not listed"),
    (unlisted_key,         WORKERS, CLOSED,                           NOT_OURS),
    (revoked_key,          HEADS,   CLOSED,                           "key of driver 'eve' ({key}) has ended"),
    (revoked_key,          WORKERS, CLOSED,                           NOT_OURS),
    (agents_key,           HEADS,   "'n2' may not say ClientHello",   "agent 'n2' may not say ClientHello"),
    (agents_key,           WORKERS, CLOSED,                           NOT_OURS),
    (drivers_key,          HEADS,   "'bob' may not say AgentHello",   "driver 'bob' may not say AgentHello"),
    (drivers_key,          WORKERS, CLOSED,                           NOT_OURS),
    (heads_key,            HEADS,   "may not say ClientHello",        "the head's own key may not say ClientHello"),
    (heads_key,            WORKERS, CLOSED,                           NOT_OURS),
    (another_nodes_key,    HEADS,   "agent 'n2' calls its node 'n1'", "agent 'n2' calls its node 'n1'"),
    (expired_token,        HEADS,   CLOSED,                           "join token of agent 'n3' ({key}) has ended"),
    (expired_token,        WORKERS, CLOSED,                           NOT_OURS),
    (used_token,           HEADS,   CLOSED,                           "join token of agent 'n4' ({key}) has ended"),
    (used_token,           WORKERS, CLOSED,                           NOT_OURS),
    (unused_token,         HEADS,   "enroll 'n5' may not say",        "enroll 'n5' may not say GetStatus"),
    (unused_token,         WORKERS, CLOSED,                           NOT_OURS),
    (another_jobs_key,     HEADS,   "belongs to job 'ns'",      "a worker of job 'bobs' says that it"),
    (another_jobs_key,     WORKERS, CLOSED,                           NOT_OURS),
    (another_clusters_job, HEADS,   CLOSED,                           "127.0.0.1: key {key} is not listed"),
    (another_clusters_job, WORKERS, CLOSED,                           NOT_OURS),
    (jobs_key_alone,       WORKERS, "does not belong to the job",     "refused the link 'driver:x': it does not have"),
]  # fmt: skip
"""At the head, another node's key is `another_nodes_key`, and the job's own key is admitted. A worker knows one key
only: all others are keys of no member of its job."""


async def knocked(endpoint: str) -> None:
    """Connect without a key, and stay until the server closes the connection: clients of libzmq would close it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("visitor", "where", "told", "noted"), TCP, ids=[f"{row[0].__name__} at {row[1]}" for row in TCP]
)
async def test_wrong_keys_are_refused_over_tcp(
    world: World, visitor: Callable[[World], Awaitable[Visitor]], where: str, told: str, noted: str
) -> None:
    who = await visitor(world)
    if where == HEADS:
        client = world.head.client(who.pair, who.knows or HEAD.public)
        assert told in await refused(client, who.says, 10)
    elif who.pair is None:
        assert told in await world.worker.join(Security(insecure_test_network=True), link_token=world.token)
    else:
        known = Security(pair=who.pair, head=who.knows or world.worker.job.public)
        assert told in await world.worker.join(known, token=who.token)
    if who.pair is None:
        await knocked(world.head.endpoint if where == HEADS else world.worker.endpoint)
    key = fingerprint(who.pair.public) if who.pair is not None else ""
    await (world.head.noted if where == HEADS else world.worker.logged)(noted.format(key=key))


async def test_right_keys_are_admitted_over_tcp(world: World) -> None:
    """The owners of these keys: each is admitted now, or was when the world was made."""
    head = world.head
    assert isinstance(await head.admin.request(GetStatus(), 10), Status)
    assert isinstance(await world.ann.request(GetStatus("ns"), 10), Status)
    assert isinstance(await world.agent.request(GetStatus(), 10), Status)
    assert isinstance(await head.client(job_pair(world.token)).request(GetStatus("ns"), 10), Status)
    token = await head.listed("agent", "n6", token_s=900.0)
    assert isinstance(await head.client(token).request(Enroll(KeyPair.make().public), 10), Enrolled)
    assert await world.worker.join(Security(), link_token=world.token) == ""  # of a driver that has no key of its own
    assert await world.worker.join(Security(pair=world.bob, head=HEAD.public), link_token=world.token) == ""
    assert await world.worker.join(Security(pair=job_pair(world.token), head=world.worker.job.public)) == ""


# --- unix sockets: each process belongs to this user ---


class Template:
    """A template's socket for the next agentd."""

    def __init__(self, world: World) -> None:
        self._agentd, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector = selectors.DefaultSelector()
        self.adopted: list[template_protocol.ToTemplate] = []
        self._link = AgentLink(
            self._selector,
            theirs,
            f"{world.place}/t",
            60.0,
            self._adopted,
            lambda: None,
        )
        self._link.start()

    def _adopted(self, packet: template_protocol.ToTemplate) -> bool:
        self.adopted.append(packet)
        return True

    def turn(self) -> None:
        """Handle one request."""
        while ready := self._selector.select(0.0):
            for key, mask in ready:
                key.data(mask)

    def close(self) -> None:
        self._link.close()
        self._selector.close()
        self._agentd.close()


@pytest.fixture
async def template(world: World) -> AsyncIterator[Template]:
    with contextlib.closing(Template(world)) as made:
        yield made


STRANGER = """
import os, socket, sys
os.setgroups([]), os.setgid(61007), os.setuid(61007)
kind = socket.SOCK_SEQPACKET if sys.argv[1].endswith("/t") else socket.SOCK_STREAM
with socket.socket(socket.AF_UNIX, kind) as stranger:
    try:
        stranger.connect(sys.argv[1])
        said = stranger.recv(64)
        print("is let in" if said else "is closed", flush=True)
    except (ConnectionError, PermissionError) as error:
        print(type(error).__name__, flush=True)
"""

BY_PATH = [
    # socket, in its run directory   directory   another user sees
    ("head",                         0o700,      "PermissionError"),
    ("w",                            0o700,      "PermissionError"),
    ("t",                            0o700,      "PermissionError"),
    ("head",                         0o755,      "is closed"),
    ("w",                            0o755,      "is closed"),
    ("t",                            0o755,      "is closed"),
]  # fmt: skip
"""The kernel keeps other users out of the directory, and our processes do not notice the attempt. If the
directory is open, libzmq closes another user's connection without reporting the user; a template logs the attempt."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("name", "mode", "seen"), BY_PATH, ids=[f"{row[0]} in {row[1]:o}" for row in BY_PATH])
async def test_another_user_is_refused_on_a_unix_socket(
    world: World, template: Template, caplog: pytest.LogCaptureFixture, name: str, mode: int, seen: str
) -> None:
    path = f"{world.place}/{name}"
    os.chmod(world.place, mode)
    os.chmod(path, 0o777)
    command = [sys.executable, "-c", STRANGER, path]
    stranger = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert stranger.stdout is not None
    loop, accepted = asyncio.get_running_loop(), template.turn
    loop.add_reader(template._selector.fileno(), accepted)
    try:
        assert (await asyncio.wait_for(stranger.stdout.readline(), 15)).decode().strip() == seen
        await stranger.wait()
    finally:
        loop.remove_reader(template._selector.fileno())
    if name == "t" and seen == "is closed":
        assert "refused a connection to this template's socket (1 so far): its process belongs to user 61007" in (
            caplog.messages
        )


async def test_this_user_without_the_token_is_refused_on_a_unix_socket(world: World) -> None:
    told = await world.worker.join(Security(), token="a guess", at=f"ipc://{world.place}/w")
    assert "does not belong to the job of g:0" in told
    await world.worker.logged("refused the link 'driver:x': it does not have its job's token")


async def test_this_user_is_refused_as_agentd_on_a_unix_socket(
    world: World, template: Template, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"{world.place}/t")
        stranger.send(b"Adopt, please")
        template.turn()
        assert stranger.recv(1) == b""
    assert not template.adopted
    assert "refused a connection to this template's socket (1 so far): its process is no agentd" in caplog.messages


async def test_right_processes_are_admitted_on_a_unix_socket(world: World, template: Template) -> None:
    """The head admits every process of this user, as the administrator."""
    network = world.worker.net(Security())
    client = ControlClient(network, f"ipc://{world.place}/head", b"observer:1", lambda notice: None)
    assert isinstance(await client.request(GetStatus(), 10), Status)
    client.close()
    assert await world.worker.join(Security(), at=f"ipc://{world.place}/w") == ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agentd:
        agentd.connect(f"{world.place}/t")
        agentd.send(template_protocol.encode(template_protocol.Adopt()))
        template.turn()
        assert template.adopted == [template_protocol.Adopt()]
