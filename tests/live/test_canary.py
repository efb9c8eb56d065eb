"""A pickle that would make a directory, sent to every socket that there is: it runs among members of its job alone.

Every kind of frame that carries a payload carries it, and what has none, too. Whether something was read is known by
an answer that is asked for behind it on the same connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pace
import pytest
from canary_workers import Canary, Keeper, Streamer
from keyed_cluster import KeyedCluster, keyed_cluster

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, WorkerError
from rlinf_actors.cli.queries import observing
from rlinf_actors.net.buffer_lending import MARK
from rlinf_actors.net.link import LinkOptions, secret_identity
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.runtime import Runtime
from rlinf_actors.security import keyfile
from rlinf_actors.security.job import JobGate, job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.settings import Settings
from rlinf_actors.testing import LocalCluster
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.client_messages import GetStatus, Status
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint, GroupState
from rlinf_actors.worker.executors import SerialExecutor
from rlinf_actors.worker.worker_server import WorkerServer

pytestmark = pytest.mark.live


@pytest.fixture
def canary(tmp_path) -> Path:
    return tmp_path / "canary"


def spellings(canary: Path) -> list[bytes]:
    """The canary as a payload of each kind, and as nothing but a pickle."""
    data = pickle.dumps(Canary(canary), 5)
    return [b"P" + data, payload.encode(Canary(canary))[0], data]


def join(token: str, worker_id: str) -> bytes:
    return frames.encode(frames.Join(PROTOCOL, "1", "3.11", "driver:x", token, worker_id))


def everything(canary: Path) -> Iterator[tuple[bytes, list[bytes]]]:
    """Every frame that there is, with the canary behind it, lent too; and the canary where a header should be."""
    for data in spellings(canary):
        for kind in frames.AnyFrame.__args__:
            if kind is frames.Join:
                continue
            values = [
                field.default if field.default is not msgspec.NODEFAULT else sample(field.type)
                for field in msgspec.structs.fields(kind)
                if field.default_factory is msgspec.NODEFAULT
            ]
            header = frames.encode(kind(*values))
            yield header, [data]
            yield header, [data, data]
            leases = msgspec.msgpack.encode([False, False, [[0, 1, 0, len(data)]], header])
            yield MARK + leases, [data, data]
        yield data, [data]


def sample(kind: object) -> object:
    """A value of a field; "take" is a method that there is."""
    samples = {str: "take", bytes: b"k", bool: False, list: []}
    return samples.get(getattr(kind, "__origin__", kind), 1)  # type: ignore[call-overload]


# --- with no keys: unix sockets, and the job's token ------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(num_nodes=1) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(local) -> Iterator[Cluster]:
    with local.cluster(namespace="own") as made:
        yield made


@pytest.fixture(scope="module")
def keepers(cluster):
    group = Keeper.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="keepers")
    group.take(1).wait()
    return group


def group_states(cluster: Cluster) -> list[GroupState]:
    status = cluster.runtime.io.submit(cluster.runtime.status(None)).result()
    return [group for group in status.groups if group.state != "gone"]


async def assault(endpoint: str, joins: Sequence[bytes], canary: Path) -> None:
    """Say everything, and wait until that was heard: each Join that is refused is answered."""
    rejected = asyncio.Semaphore(0)

    def received(peer: bytes, header: bytes, parts: list) -> None:
        assert isinstance(frames.decode(header), frames.Rejected), header
        rejected.release()

    network = ZmqNetwork(asyncio.get_running_loop(), Security())
    try:
        link = network.link(endpoint, secret_identity("driver:stranger#1"), received)
        for first in [None, *joins]:
            if first is not None:
                link.send(first)
                await asyncio.wait_for(rejected.acquire(), pace.PATIENCE_S)
            for header, parts in everything(canary):
                link.send(header, parts)
        link.send(joins[0])
        await asyncio.wait_for(rejected.acquire(), pace.PATIENCE_S)
    finally:
        network.close()


def token_of_another_job(local: LocalCluster) -> str:
    runtime = Runtime(
        "driver", "another", security=Security.toward(f"tcp://{local.head}", Settings(key_dir=local.keys), "driver")
    )
    try:
        return runtime.io.submit(runtime.connect(f"tcp://{local.head}", 10)).result().token
    finally:
        runtime.close()


def test_workers_and_channel_hosts_unpickle_nothing_from_non_members(local, cluster, keepers, canary):
    channel = Channel.create("items")
    channel.qsize()
    states = group_states(cluster)
    workers = [worker for state in states for worker in state.workers]
    assert len(workers) == 3, "two keepers and a host"
    ours, theirs = states[0].token, token_of_another_job(local)
    assert len({ours, theirs}) == 2
    for worker in workers:
        assert worker.endpoint is not None
        joins = [join("", worker.id), join("x" * 32, worker.id), join(theirs, worker.id), join(ours, "another")]
        asyncio.run(assault(worker.endpoint.ipc, joins, canary))
    assert keepers.take(1).wait() == [0, 1], "they live"
    channel.put("live")
    assert channel.get() == "live"
    assert not canary.exists()


def test_head_and_templates_unpickle_nothing_from_the_same_user(local, cluster, keepers, canary):
    async def to_head(endpoint: str) -> None:
        async with observing(endpoint, Settings(key_dir=local.keys)) as client:
            await say_to_head(client, canary)

    run_dir = Path(local.nodes[0].run_dir)
    for endpoint in (f"ipc://{run_dir}/head", f"tcp://{local.head}"):
        asyncio.run(to_head(endpoint))
    templates = list((run_dir / "t").glob("*.sock"))
    assert templates
    for path in templates:
        for data in spellings(canary):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(path))
                stranger.send(data)
                assert stranger.recv(100) == b"", "it hangs up"
    assert keepers.take(1).wait() == [0, 1], "they live"
    assert local.nodes[0].alive
    assert not canary.exists()


async def say_to_head(client: ControlClient, canary: Path) -> None:
    """Everything, and a question behind it that is answered."""
    for header, parts in everything(canary):
        client._link.send(header, parts)
    client._link._flush()  # the question travels in a chunk of its own: the head drops a chunk with parts as a whole
    assert isinstance(await client.request(GetStatus("own"), 10), Status)


def test_members_of_a_job_unpickle_what_they_send_each_other(cluster, keepers, canary):
    """Without this the tests above would prove nothing."""
    keepers.take(Canary(f"{canary}-argument")).wait()
    keepers.execute_on(0).give(f"{canary}-result").wait()
    with pytest.raises(WorkerError):
        keepers.execute_on(0).fail(f"{canary}-error").wait()
    streamer = Streamer.create_group().launch(cluster, NodePlacementStrategy([0]), name="streamer")
    assert len(list(streamer.items(f"{canary}-streamed"))) == 1
    Channel.create("passed")
    keepers.pass_on(str(canary), "passed").wait()
    kinds = {path.name.removeprefix("canary-") for path in canary.parent.iterdir()}
    assert kinds == {"argument", "result", "error", "streamed", "message", "item"}


# --- with keys --------------------------------------------------------------------------------------


def test_head_with_keys_unpickles_nothing_from_any_role(canary):
    with keyed_cluster() as cluster:
        cluster.join("n1")
        cluster.join("eve", "--driver")
        files = [cluster.folder("n1") / "agent.key", cluster.folder("eve") / "driver.key"]
        files.append(cluster.folder("head") / "head.key")
        for path in files:
            asyncio.run(with_key(cluster, Security.of(keyfile.load(path)), canary))
        assert not canary.exists()


async def with_key(cluster: KeyedCluster, security: Security, canary: Path) -> None:
    network = ZmqNetwork(asyncio.get_running_loop(), security)
    try:
        endpoint = f"tcp://{cluster.address}"
        client = ControlClient(network, endpoint, secret_identity("observer:x"), lambda notice: None)
        await say_to_head(client, canary)
        client.close()
    finally:
        network.close()


class Tcp:
    """A worker's listening side on TCP in a cluster with keys, and networks of others."""

    def __init__(self) -> None:
        self._networks: list[ZmqNetwork] = []
        self.job = job_pair("ours")
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        gate = JobGate(self.job.public, "ns", lambda text, times: None)
        gate.refused = lambda key, address, why="", times=1: self.refused.put_nowait(key)  # type: ignore[method-assign]
        self.server = WorkerServer(self.network(Security(pair=self.job)), "id-0", "g:0", "ours", gate=gate)
        self.endpoint = self.server.bind("tcp://127.0.0.1:0")
        self.server.open(AtOnce())

    def network(self, security: Security) -> ZmqNetwork:
        made = ZmqNetwork(asyncio.get_running_loop(), security)
        self._networks.append(made)
        return made

    def close(self) -> None:
        self.server.close(0)
        for network in reversed(self._networks):
            network.close()


class AtOnce(SerialExecutor):
    """Runs what arrives where it arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.submit = lambda invocation: invocation.run(self)

    def take(self, value: object) -> None:
        """What a member calls."""


@pytest.fixture
async def tcp() -> AsyncIterator[Tcp]:
    made = Tcp()
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize("who", ["stranger", "agent", "another job", "another server in mind"])
async def test_worker_with_keys_unpickles_nothing_without_the_jobs_key(tcp, canary, who):
    security = {
        "stranger": Security(insecure_test_network=True),
        "agent": Security(pair=KeyPair.make(), head=tcp.job.public),
        "another job": Security(pair=job_pair("theirs"), head=tcp.job.public),
        "another server in mind": Security(pair=tcp.job, head=KeyPair.make().public),
    }[who]
    link = tcp.network(security).link(
        tcp.endpoint,
        secret_identity("driver:x#1"),
        lambda *message: None,
        LinkOptions(
            on_rejected=lambda why, for_good: tcp.refused.put_nowait(why)
        ),  # either end may see it first, and close
    )
    link.send(join("ours", "id-0"))
    for header, parts in everything(canary):
        link.send(header, parts)
    await asyncio.wait_for(tcp.refused.get(), pace.PATIENCE_S)
    # a member's words are heard after that, and run: nothing of the other's came before them
    assert await answered(tcp, canary.with_name("own"))
    assert canary.with_name("own").exists()
    assert not canary.exists()


async def answered(tcp: Tcp, canary: Path) -> bool:
    """A member of the job calls with the canary."""
    told: asyncio.Queue[frames.AnyFrame] = asyncio.Queue()
    network = tcp.network(Security())
    link = network.link(
        tcp.endpoint,
        secret_identity("driver:y#1"),
        lambda peer, header, parts: told.put_nowait(frames.decode(header)),
        LinkOptions(token="ours"),
    )
    link.send(join("ours", "id-0"))
    link.send(frames.encode(frames.Call(1, "take")), payload.encode_call((Canary(canary),), {}))
    return isinstance(await asyncio.wait_for(told.get(), pace.PATIENCE_S), frames.Ok)


class Waiting:
    """A call of a driver's that waits for its answer."""

    def __init__(self) -> None:
        self.parts: asyncio.Future[AuthenticatedParts] = asyncio.get_running_loop().create_future()

    def answer(self, frame: frames.AnyFrame, parts: AuthenticatedParts) -> bool:
        self.parts.set_result(parts)
        return True

    def fail(self, error: Exception) -> None:
        self.parts.set_exception(error)


@pytest.mark.parametrize("whose", ["agent", "another job", "own"])
async def test_driver_unpickles_nothing_from_a_false_worker(tcp, canary, whose):
    """An agent could name an endpoint of its own; what listens there must have the job's pair."""
    pair = {"agent": KeyPair.make(), "another job": job_pair("theirs"), "own": tcp.job}[whose]
    gate = JobGate(tcp.job.public, "ns", lambda text, times: None)  # it would let the driver in
    came: asyncio.Queue[str] = asyncio.Queue()
    gate.refused = lambda key, address, why="", times=1: came.put_nowait(why)  # type: ignore[method-assign]
    fake = tcp.network(Security(pair=pair))

    def lies(peer: bytes, header: bytes, parts: list) -> None:
        came.put_nowait("a driver came")
        listener.send(peer, frames.encode(frames.Ok(call)), [spellings(canary)[0]])

    listener = fake.listener(lies, gate=gate)
    endpoint = Endpoint("elsewhere", "", listener.bind("tcp://127.0.0.1:0"))
    peer = Peer(tcp.network(Security()), "driver:z", "g:0", 0, "n")
    waiting = Waiting()
    call = peer.open(waiting)
    peer.connect(endpoint, "here", "ours", lambda: None)
    why = await asyncio.wait_for(came.get(), pace.PATIENCE_S)
    if whose == "own":
        payload.decode(await asyncio.wait_for(waiting.parts, pace.PATIENCE_S))
        assert canary.exists()
    else:
        assert why == "it expected a server with another key than this one's"
        assert (peer.received, waiting.parts.done(), canary.exists()) == (0, False, False)
    peer.close()
