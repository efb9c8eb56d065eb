"""A worker's listener of unix streams, links to it, and strangers at its socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import net_kit
import pace

from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.stream_framing import prefix
from rlinf_actors.net.unix_stream import HELLO, StreamLink, path_of


class World:
    """One network with a listener at `endpoint`. `heard` is its inbox, `path` the path of its stream socket."""

    def __init__(self, folder: str) -> None:
        self.network = LocalNetwork(asyncio.get_running_loop())
        self.endpoint = f"ipc://{folder}/w"
        self.path = path_of(self.endpoint)
        self.resets = 0
        self.listen()

    def listen(self) -> None:
        self.heard = net_kit.Inbox()
        self.listener = self.network.listener(self._joined)
        self.listener.bind(self.endpoint)

    def _joined(self, peer: bytes, header: bytes, parts: list) -> None:
        if header == net_kit.JOIN:
            self.listener.admit(peer)
        else:
            self.heard(peer, header, parts)

    def link(self, identity: bytes = b"me", join: bool = True) -> tuple[StreamLink, net_kit.Inbox]:
        inbox = net_kit.Inbox()
        link = self.network.link(self.endpoint, identity, inbox, LinkOptions(to="g:0", on_reset=self._reset))
        assert isinstance(link, StreamLink)
        if join:
            link.send(net_kit.JOIN, now=True)
        return link, inbox

    def _reset(self) -> None:
        self.resets += 1

    def stranger(self, identity: bytes = b"") -> socket.socket:
        """A connection of bytes. With *identity* it has said HELLO."""
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(self.path)
        if identity:
            stream.sendall(chunk(HELLO + identity))
        stream.setblocking(False)
        return stream

    @property
    def connections(self) -> int:
        """Number of connections that the listener has."""
        return len(self.listener._streams._connections)


def chunk(records: bytes) -> bytes:
    return prefix(records, ()) + records


async def until(condition) -> None:
    """Wait until *condition* returns True."""
    limit = time.monotonic() + pace.PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it did not come true"
        await asyncio.sleep(0.002)


async def closed(stream: socket.socket) -> bool:
    """Wait until the other end has closed the connection."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionResetError):
        while await asyncio.wait_for(loop.sock_recv(stream, 1 << 16), 10):
            pass
    stream.close()
    return True


@contextlib.asynccontextmanager
async def world(folder: str) -> AsyncIterator[World]:
    made = World(folder)
    try:
        yield made
    finally:
        made.network.close()
