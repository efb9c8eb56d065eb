"""Networks of processes with keys, and a gate whose members the test sets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pace
from net_kit import Inbox

from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import Member


class Facts:
    """Records its calls in order; a test can wait for the next."""

    def __init__(self) -> None:
        self.all: list[tuple] = []
        self._came = asyncio.Event()

    def __call__(self, *fact: object) -> None:
        self.all.append(fact)
        self._came.set()

    async def until(self, count: int = 1) -> list[tuple]:
        while len(self.all) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), pace.PATIENCE_S)
        return self.all


class ListGate:
    """Admits the listed keys."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.refused = Facts()

    def admit(self, public_key: str) -> Member | None:
        return self.members.get(public_key)

    def enlist(self, role: str = "driver", name: str = "ann") -> KeyPair:
        pair = KeyPair.make()
        self.members[pair.public] = Member(role, name, key=pair.public)
        return pair


class Guarded:
    """A listener with keys on TCP, and links to it."""

    def __init__(self) -> None:
        self.pair = KeyPair.make()
        self.gate = ListGate()
        self.networks: list[ZmqNetwork] = []
        self.network = self.net(Security(pair=self.pair, head=self.pair.public))
        self.inbox = Inbox()
        self.listener = self.network.listener(self.inbox, gate=self.gate)
        self.endpoint = ""

    def net(self, security: Security) -> ZmqNetwork:
        made = ZmqNetwork(asyncio.get_running_loop(), security)
        self.networks.append(made)
        return made

    def bind(self) -> str:
        self.endpoint = self.listener.bind("tcp://127.0.0.1:0")
        return self.endpoint

    def link(self, pair: KeyPair | None, identity: bytes = b"me", server: str = ""):
        """A link with a network of its own, its inbox, and the Facts of its refusals."""
        security = Security(True) if pair is None else Security(pair=pair, head=server or self.pair.public)
        inbox, turned_away = Inbox(), Facts()
        network = self.net(security)
        return network.link(self.endpoint, identity, inbox, LinkOptions(on_rejected=turned_away)), inbox, turned_away


@contextlib.contextmanager
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    try:
        yield made
    finally:
        for network in reversed(made.networks):
            network.close()
