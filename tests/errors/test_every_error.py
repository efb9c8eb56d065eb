"""Every public error class, raised by what raises it for users. A new class needs a row here and in the reference."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import error_workers
import pace
import pytest
from error_workers import CONFIG, Doer

from rlinf_actors import Channel, Cluster, FlexiblePlacementStrategy, NodePlacementStrategy, WorkerGroup, errors
from rlinf_actors.group.control import control_of
from rlinf_actors.routing.batches import split_batch
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.testing import LocalCluster
from rlinf_actors.wire import control_codec, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import Endpoint, GroupState, WorkerState
from rlinf_actors.worker.worker_server import WorkerServer
from tests.memory_network import MemoryNetwork

pytestmark = pytest.mark.live

HERE = Path(__file__).parent
ESTOP = [sys.executable, "-m", "rlinf_actors.cli.main", "estop"]


class Scene:
    """Two nodes, an arm on the first, and a Cluster once a row wants it."""

    def __init__(self, local: LocalCluster, place: Path) -> None:
        self.local = local
        self.place = place

    @functools.cached_property
    def cluster(self) -> Cluster:
        return self.local.cluster(cluster_cfg=CONFIG)

    @functools.cached_property
    def group(self) -> WorkerGroup[Doer]:
        return self.launch("group").wait_ready()

    def launch(self, name: str, node: int = 0) -> WorkerGroup[Doer]:
        return Doer.create_group().launch(self.cluster, NodePlacementStrategy([node]), name=name)

    def on_the_arm(self, name: str) -> WorkerGroup[Doer]:
        return Doer.create_group().launch(self.cluster, FlexiblePlacementStrategy([[0]], "lab"), name=name)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    env = {"RLINF_EXT_MODULE": error_workers.__name__, "PYTHONPATH": str(HERE)}
    with LocalCluster(2, env=env, options=pace.timers(beat_s=0.5, lease_s=3)) as local:
        yield Scene(local, tmp_path_factory.mktemp("modules"))


# --- before there is a Cluster ---


def cluster_timeout(scene: Scene) -> None:
    Cluster(num_nodes=3, head=scene.local.head, keys=scene.local.keys, timeout=0.5)


def not_the_head(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    connection = stack.enter_context(server.accept()[0])
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        try:
            Cluster(num_nodes=1, head=f"127.0.0.1:{server.getsockname()[1]}", keys=scene.local.keys)
        finally:
            server.shutdown(socket.SHUT_RDWR)


# --- with one ---


def config(scene: Scene) -> None:
    Cluster(cluster_cfg={"num_nodes": 2, "node_grups": []})


def placement(scene: Scene) -> None:
    scene.group.remove_ranks(0)  # type: ignore[attr-defined]


def node_rank(scene: Scene) -> None:
    scene.launch("nowhere", node=7)


def call_timeout(scene: Scene) -> None:
    scene.launch("sleeps").sleep().wait(0.1)


def worker(scene: Scene) -> None:
    scene.group.fail().wait()


def worker_died(scene: Scene) -> None:
    scene.launch("dies").end().wait()


def worker_start(scene: Scene) -> None:
    module = scene.place / "only_here.py"
    module.write_text("from rlinf_actors import Worker\nclass OnlyHere(Worker): ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(scene.place))
        from only_here import OnlyHere  # type: ignore[import-not-found]

        module.unlink()
        try:
            OnlyHere.create_group().launch(scene.cluster, NodePlacementStrategy([0]), name="only-here").wait_ready()
        finally:
            del sys.modules["only_here"]


def name_in_use(scene: Scene) -> None:
    scene.launch(scene.group.worker_group_name)


def group_not_found(scene: Scene) -> None:
    WorkerGroup.from_group_name(Doer, "nobody") if scene.cluster else None


def group_closed(scene: Scene) -> None:
    group = scene.launch("closed").wait_ready()
    group.shutdown()
    group.echo(1).wait()


def usage(scene: Scene) -> None:
    Doer()


def serialization(scene: Scene) -> None:
    scene.group.echo({"lock": threading.Lock()})


def peer_died(scene: Scene) -> None:
    with pytest.raises(errors.WorkerDiedError):
        scene.launch("mortal").end().wait()
    raised_in(scene.group.hear("mortal"))


def channel_closed(scene: Scene) -> None:
    channel = Channel.create("closed") if scene.cluster else None
    channel.close()
    channel.put(1)


def channel_broken(scene: Scene) -> None:
    channel = Channel.create("broken") if scene.cluster else None
    channel.qsize()
    os.kill(channel._backend._group.states[0].pid, signal.SIGKILL)
    channel.get(timeout=pace.PATIENCE_S)


def item_not_processed(scene: Scene) -> None:
    channel = Channel.create("poisoned", max_deliveries=1) if scene.cluster else None
    channel.put("poison")
    with pytest.raises(ArithmeticError), channel.take():
        raise ArithmeticError
    channel.take().__enter__()


def hardware_in_use(scene: Scene) -> None:
    with scene.on_the_arm("has-it"):
        scene.on_the_arm("wants-it")


def emergency_stop(scene: Scene) -> None:
    command = [*ESTOP, "--head", scene.local.head]
    env = {**os.environ, **scene.local.driver_env}
    assert scene.cluster
    subprocess.run(command, env=env, check=True, capture_output=True)
    try:
        scene.on_the_arm("stopped")
    finally:
        subprocess.run([*command, "--release"], env=env, check=True, capture_output=True)


def base(scene: Scene) -> None:
    scene.local.restart_agent(0)  # it runs


def node_lost(scene: Scene) -> None:
    group = scene.launch("far", node=1).wait_ready()
    waiting = group.sleep()
    scene.local.kill_node(1)
    waiting.wait(pace.PATIENCE_S)


def raised_in(result: Any) -> None:
    """Raise what a method raised, as its worker saw it."""
    with pytest.raises(errors.WorkerError) as caught:
        result.wait(pace.PATIENCE_S)
    assert caught.value.__cause__ is not None
    raise caught.value.__cause__


# --- of a peer that does what it should not: on the memory network ---


class Waiter:
    """Keeps how its call ends."""

    def __init__(self) -> None:
        self.error: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def answer(self, frame: Any, parts: Any) -> bool:
        raise ArithmeticError("a bug of ours")

    def fail(self, error: Exception) -> None:
        self.error.set_result(error)


async def call(peer: Peer) -> Waiter:
    waiter = Waiter()
    peer.send(frames.ChannelLook(peer.open(waiter), b"k"))
    return waiter


def joined(token: str) -> tuple[WorkerServer, Peer]:
    """A worker's server and another process's link to it, on the loop of the test."""
    network = MemoryNetwork(asyncio.get_running_loop())
    server = WorkerServer(network, "w-0", "w:0", "token")
    server.serve((frames.ChannelLook,), lambda peer, frame, _: server.answer(peer, frames.Ok(frame.id)))
    peer = Peer(network, "worker:a", "w:0", 0, "n", me="a-0")
    peer.worker_id = "w-0"
    peer.connect(Endpoint("here", server.bind("ipc:///w")), "here", token, lambda: None)
    return server, peer


async def authentication() -> None:
    _, peer = joined("of another job")
    raise await asyncio.wait_for((await call(peer)).error, pace.PATIENCE_S)


async def internal() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    _, peer = joined("token")
    raise await asyncio.wait_for((await call(peer)).error, pace.PATIENCE_S)


async def connection_lost() -> None:
    loop = asyncio.get_running_loop()
    network, came = MemoryNetwork(loop), asyncio.Queue[bytes]()
    listener = network.listener(lambda peer, header, parts: came.put_nowait(peer))
    endpoint = Endpoint("here", listener.bind("ipc:///w"))
    group = RemoteGroup(network, "driver:x", "here", "ns", "g", ["n0"], None, soon=loop.call_soon, me="my-id")
    state = WorkerState("id-0", 0, 0, "10.0.0.1", "running", 1, endpoint, 0, 4567)
    group.adopt(GroupState("ns", "g", "m:C", "o", "running", [state], "tok"))
    waiter = await call(group.peers[0])
    network.reset(await came.get())
    raise await asyncio.wait_for(waiter.error, pace.PATIENCE_S)


async def protocol() -> None:
    control_of(b"no handle")


async def protocol_mismatch() -> None:
    head, *rest = payload.encode(lambda: 1)
    other = bytes(head)[:2] + bytes([sys.version_info[1] + 1]) + bytes(head)[3:]
    payload.decode(AuthenticatedParts([other, *rest]))


async def remote_wire() -> None:
    control_codec.decode(b"\xc1 no message")


async def routing() -> None:
    split_batch([1, 2, 3], [2, 2])


LIVE: dict[type[Exception], Callable[[Scene], None]] = {
    errors.ClusterTimeoutError: cluster_timeout,
    errors.WrongServerError: not_the_head,
    errors.ConfigError: config,
    errors.PlacementError: placement,
    errors.NodeRankError: node_rank,
    errors.UsageError: usage,
    errors.CallTimeoutError: call_timeout,
    errors.WorkerError: worker,
    errors.WorkerDiedError: worker_died,
    errors.WorkerStartError: worker_start,
    errors.NameInUseError: name_in_use,
    errors.GroupNotFoundError: group_not_found,
    errors.GroupClosedError: group_closed,
    errors.SerializationError: serialization,
    errors.PeerDiedError: peer_died,
    errors.ChannelClosedError: channel_closed,
    errors.ChannelBrokenError: channel_broken,
    errors.ItemNotProcessedError: item_not_processed,
    errors.HardwareInUseError: hardware_in_use,
    errors.EmergencyStopError: emergency_stop,
    errors.RlinfActorsError: base,
    errors.EndedError: peer_died,
    errors.NodeLostError: node_lost,  # the last: node 1 is gone then
}
HERE_ALONE: dict[type[Exception], Callable[[], Awaitable[None]]] = {
    errors.AuthenticationError: authentication,
    errors.ConnectionLostError: connection_lost,
    errors.InternalError: internal,
    errors.ProtocolError: protocol,
    errors.ProtocolMismatchError: protocol_mismatch,
    errors.RemoteWireError: remote_wire,
    errors.RoutingError: routing,
}
BASES = (errors.EndedError,)
"""Caught, and never raised themselves."""


def check(error: Exception, kind: type[Exception]) -> None:
    """It is of that very class, says something, and crosses processes as it is."""
    assert type(error) is kind or kind in BASES or (kind is errors.WorkerError and isinstance(error, ValueError))
    assert str(error)
    if type(error) is kind:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", LIVE, ids=lambda kind: kind.__name__)
def test_it_is_raised(scene, kind):
    with pytest.raises(kind) as caught:
        LIVE[kind](scene)
    check(caught.value, kind)


@pytest.mark.parametrize("kind", HERE_ALONE, ids=lambda kind: kind.__name__)
async def test_it_is_raised_in_this_process(kind):
    with pytest.raises(kind) as caught:
        await HERE_ALONE[kind]()
    check(caught.value, kind)


def test_every_public_error_has_a_row():
    public = {kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert public == LIVE.keys() | HERE_ALONE.keys()
