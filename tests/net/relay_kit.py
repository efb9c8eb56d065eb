"""A process, a relay and the workers of its node, in one loop: a real RelayPath, Relay and unix streams."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator

import stream_kit

from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.relay_path import RelayPath
from rlinf_actors.wire import frames
from rlinf_actors.worker.relay import Relay


class Cable:
    """The connection between a process and its relay: the relay's Peer for a path.

    Frames arrive in later turns of the loop, in order. While `stopped` is True the relay stands still, as by SIGSTOP.
    After `cut` it is dead, and what was under way is lost.
    """

    name, node = "relay:0", "n1"

    def __init__(self, network: LocalNetwork, folder: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.relay = Relay(network, folder, self._answer)
        self.path = RelayPath(self, 7)
        self.received = 0
        self.sent: list[frames.Relayed] = []
        self.down: collections.deque = collections.deque()
        self.up: collections.deque = collections.deque()
        self.stopped = self.dead = self.deaf = False
        self.most = 10**9  # frames after which the relay dies

    def post(self, header, parts=(), *, now=False):
        frame = frames.decode(header)
        self.sent.append(frame)
        self.down.append((frame, list(parts)))
        self._loop.call_soon_threadsafe(self._pass_down)

    def soon(self, function):
        self._loop.call_soon_threadsafe(function)

    def _pass_down(self):
        while self.down and not self.stopped and not self.dead:
            frame, parts = self.down.popleft()
            self.relay.handle(b"caller", frame, parts)
            self.most -= 1
            if not self.most:
                self.cut()

    def _answer(self, peer, frame, parts):
        if not self.dead:
            self.up.append((frame, list(parts)))
            self._loop.call_soon(self._pass_up)

    def _pass_up(self):
        while self.up and not self.dead and not self.deaf:
            frame, parts = self.up.popleft()
            self.received += 1
            self.path.answer(frame, parts)

    def go_on(self):
        self.stopped = self.deaf = False
        self._pass_down()
        self._pass_up()

    def cut(self):
        """Kill the relay: what it had and what is under way is lost, and the path is told."""
        self.dead = True
        self.relay.forget(b"caller")
        self.path.fail(ConnectionError("the relay is dead"))


class FakeRank:
    """A worker: answers each message that is no Join, and keeps the headers in order."""

    def __init__(self, network, folder: str, rank: int) -> None:
        self.endpoint = f"ipc://{folder}/{rank}"
        self.heard: list[bytes] = []
        self.peers: set[bytes] = set()
        self.answer = b"" if rank < 0 else b"!"
        self.listener = network.listener(self._on)
        self.listener.bind(self.endpoint)

    def _on(self, peer, header, parts):
        self.peers.add(peer)
        if header == b"join":
            self.listener.admit(peer)
            return
        self.heard.append(header)
        self.listener.send(peer, header + self.answer, parts[:1], now=True)


class Caller:
    """A link of the process to a FakeRank by the relay."""

    def __init__(self, path, rank: FakeRank, identity: bytes) -> None:
        self.rank = rank
        self.answers: list[bytes] = []
        self.resets = 0
        self.link = path.link(rank.endpoint, identity, self._on, LinkOptions(to="g:0", on_reset=self._reset))
        self.link.send(b"join", now=True)

    def _on(self, _peer, header, parts):
        self.answers.append(header)

    def _reset(self):
        self.resets += 1


class Node:
    """A cable with *size* ranks and a link to each."""

    def __init__(self, folder: str, size: int) -> None:
        self.network = LocalNetwork(asyncio.get_running_loop())
        self.cable = Cable(self.network, folder)
        self.ranks = [FakeRank(self.network, folder, rank) for rank in range(size)]
        self.callers = [Caller(self.cable.path, rank, b"me#%d" % n) for n, rank in enumerate(self.ranks)]

    def call(self, header: bytes, parts=()) -> None:
        for caller in self.callers:
            caller.link.send(header, parts)


@contextlib.asynccontextmanager
async def node(folder, size: int) -> AsyncIterator[Node]:
    made = Node(str(folder), size)
    try:
        await stream_kit.until(lambda: all(rank.peers for rank in made.ranks))
        yield made
    finally:
        made.cable.relay.forget(b"caller")
        made.network.close()
