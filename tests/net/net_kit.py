"""Networks under test, and an inbox that waits for what arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pace

from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from tests.memory_network import MemoryNetwork

KINDS = ("memory", "ipc", "tcp", "hub", "stream")
JOIN = b"the first message of a stream"
"""First message of a link by a unix stream, so that the listener takes large ones. No inbox has it."""


class Inbox:
    """An OnMessage that keeps all messages."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, bytes, list[bytes]]] = []
        self.arrived = lambda header: None
        self._came = asyncio.Event()

    def __call__(self, peer: bytes, header: bytes, parts: list) -> None:
        self.arrived(header)
        self.messages.append((peer, header, [bytes(part) for part in parts]))
        self._came.set()

    @property
    def headers(self) -> list[bytes]:
        return [header for _, header, _ in self.messages]

    async def until(self, count: int) -> Inbox:
        """Wait until *count* messages have arrived."""
        while len(self.messages) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), pace.PATIENCE_S)
        return self


class Wire:
    """One kind of network, and endpoints for it."""

    def __init__(self, kind: str, folder: str) -> None:
        loop = asyncio.get_running_loop()
        self.kind = kind
        made = {"memory": lambda: MemoryNetwork(loop), "stream": lambda: LocalNetwork(loop, Security(True))}
        self.network = made.get(kind, lambda: ZmqNetwork(loop, Security(True)))()
        self._folder = folder
        self._made = 0

    def endpoint(self) -> str:
        """A new endpoint without a listener."""
        self._made += 1
        return "tcp://127.0.0.1:0" if self.kind in ("tcp", "hub") else f"ipc://{self._folder}/{self._made}"

    def listen(self) -> tuple[object, str, Inbox]:
        inbox = Inbox()

        def joined(peer: bytes, header: bytes, parts: list) -> None:
            if header == JOIN:
                listener.admit(peer)
            else:
                inbox(peer, header, parts)

        listener = self.network.listener(joined)
        return listener, listener.bind(self.endpoint()), inbox

    def link(self, endpoint: str, identity: bytes = b"me", join: bool = True):
        inbox = Inbox()
        link = self.network.link(
            endpoint, identity, inbox, LinkOptions(to="g:0" if self.kind in ("hub", "stream") else "")
        )
        if self.kind == "stream" and join:
            link.send(JOIN, now=True)
        return link, inbox


@contextlib.asynccontextmanager
async def wire(kind: str, folder: object) -> AsyncIterator[Wire]:
    made = Wire(kind, str(folder))
    try:
        yield made
    finally:
        made.network.close()


def written(end: object, monkeypatch) -> list[int]:
    """Return a list that gets the number of messages of each later write of a listener or link."""
    socket = _socket(end)
    write, batches = socket._write, []

    def counted(peer: bytes, messages: list) -> None:
        batches.append(len(messages))
        write(peer, messages)

    monkeypatch.setattr(socket, "_write", counted)
    return batches


def flushes(end: object, monkeypatch) -> list[object]:
    """Return a list that gets an entry for each later flush of a listener or link."""
    socket = _socket(end)
    flush, seen = socket._flush, []
    monkeypatch.setattr(socket, "_flush", lambda: (seen.append(socket), flush()))
    return seen


def _socket(end: object) -> object:
    """The message socket of a listener or link."""
    return getattr(end, "_hub", getattr(end, "_streams", end))
