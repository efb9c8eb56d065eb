"""A channel's host and its users in one loop: real queue, host, server, links and requests over the memory network."""

from __future__ import annotations

import asyncio
import typing

from rlinf_actors.channel.client import RemoteChannel, remote_channel
from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_server import QueueServer
from rlinf_actors.channel.results import Take
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState
from rlinf_actors.worker.worker_server import WorkerServer
from tests.memory_network import MemoryNetwork


class Io:
    """The I/O thread's loop is the test's."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, function, *args) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon(function, *args)

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class User:
    """A process that uses the channel; it is its runtime too."""

    def __init__(self, world: World, name: str) -> None:
        self.io = Io()
        self.identity = f"worker:{name}"
        self.group = RemoteGroup(world.network, self.identity, "here", "ns", "channel@q", ["node"], soon=self.io.call)
        self.channel: RemoteChannel = remote_channel(self, self.group, "q", 0, self.identity)

    def put(self, item, key="k", weight=0, nowait=False, timeout=None):
        return self.channel.put(key, item, weight, nowait, timeout)

    def get(self, key="k", nowait=False, timeout=None):
        return self.channel.get(key, nowait, timeout)

    def batch(self, target, key="k"):
        return self.channel.batch(key, target, None)

    def take(self, key="k", timeout=None):
        return Take(lambda: self.channel.take(key, timeout), "q")


class World:
    """The host, and what the head does for everybody. `heard` is what reached the host."""

    def __init__(
        self, maxsize: int = 0, max_bytes: int = 0, keep=lambda part: part, max_deliveries: int = 3, memory=None
    ) -> None:
        self.network = MemoryNetwork(asyncio.get_running_loop())
        self.network.memory = memory
        self.server = WorkerServer(self.network, "host-0", "channel@q:0", "token")
        self.watched: dict[str, typing.Callable[[], None]] = {}
        self.drained = 0
        self.heard: list[frames.AnyFrame] = []
        self.queue = ChannelQueue(maxsize, max_bytes, max_deliveries)
        self.dead: set[str] = set()
        soon = asyncio.get_running_loop().call_soon
        self.host = QueueServer(self.queue, self.server.send, self._watch, keep, self._drained, soon=soon)
        self.users: list[User] = []
        self.server.serve(typing.get_args(frames.ChannelFrame), self._handle)
        self.server.on_link_lost(self.host.link_lost)
        self.endpoint = self.server.bind("ipc://host")

    def user(self, name: str, linked: bool = True) -> User:
        made = User(self, name)
        self.users.append(made)
        if linked:
            self.link(made)
        return made

    def link(self, user: User) -> None:
        """The head tells a user where the host listens."""
        user.group.adopt(GroupState("ns", "channel@q", "m:C", "o", "running", [self._state("running")], "token"))

    def die(self, user: User) -> None:
        """SIGKILL of a user; the head tells the host."""
        for peer in list(self.server._members):
            if peer.startswith(user.identity.encode()):
                self.network.cut(peer)
        name = user.identity.partition(":")[2]
        self.dead.add(name)
        self.watched.pop(name, lambda: None)()  # watched since its first request

    def lose(self, user: User) -> None:
        """The connection of a user to the host is lost, and there again."""
        self.network.reset(user.group.peers[0].link_identity)

    def host_dies(self, **how) -> None:
        """The head tells the users."""
        self.server.close(0)
        report = ExitReport(**{"kind": "signalled", **(how or {"signal": 9})})
        for user in self.users:
            user.group.update([self._state("gone", report)])

    def _state(self, state: str, ended: ExitReport | None = None) -> WorkerState:
        return WorkerState("host-0", 0, 0, "10.0.0.1", state, 1, Endpoint("here", self.endpoint), exit=ended)

    def _watch(self, name: str, gone) -> None:
        if name in self.dead:  # its last messages came after its end; the head tells at once
            asyncio.get_running_loop().call_soon(gone)
        else:
            self.watched[name] = gone

    def _handle(self, peer, frame, parts) -> None:
        self.heard.append(frame)
        self.host.handle(peer, frame, parts)

    def _drained(self) -> None:
        self.drained += 1


async def settle() -> None:
    """Let everything that is under way in this loop come to rest."""
    for _ in range(100):
        await asyncio.sleep(0)
