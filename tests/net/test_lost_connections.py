"""A TCP connection that is reset between two who live: the link comes back by itself, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import net_kit
import pytest

NO_LINGER = struct.pack("ii", 1, 0)


class Middlebox:
    """Forwards connections to one port, until it forgets them: both ends get a reset."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)

    def reset(self) -> None:
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            writer.transport.abort()
        self._writers.clear()

    def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()


@pytest.fixture
async def tcp(tmp_path):
    async with net_kit.wire("tcp", tmp_path) as made:
        yield made


async def test_a_link_says_that_its_connection_was_lost_and_is_there_again(tcp):
    _, endpoint, inbox = tcp.listen()
    box = Middlebox(int(endpoint.rpartition(":")[2]))
    port = await box.start()
    lost = asyncio.Event()
    link = tcp.network.link(f"tcp://127.0.0.1:{port}", b"me", net_kit.Inbox(), on_reset=lost.set)
    try:
        link.send(b"before")
        await inbox.until(1)
        assert not lost.is_set(), "the first connection is none that was lost"
        for n in range(2):
            box.reset()
            await asyncio.wait_for(lost.wait(), 20)
            lost.clear()
            link.send(b"after")
            await inbox.until(2 + n)
    finally:
        box.close()
