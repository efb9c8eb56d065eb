"""A TCP connection is reset while both processes live: the link reconnects and reports it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import ClassVar

import net_kit
import pytest
import zmq
from descriptor_kit import descriptors_left
from tcp_kit import HOST, tcp_server

from rlinf_actors import compat
from rlinf_actors.net.connection_watch import SocketMonitor
from rlinf_actors.net.curve import SUCCEEDED
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.net.link import LinkOptions

NO_LINGER = struct.pack("ii", 1, 0)


class Middlebox:
    """Forwards connections to one port until reset(), which resets both ends."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: dict[asyncio.Task, tuple[socket.socket, socket.socket]] = {}

    async def forward(self, near: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        with socket.socket() as far:
            far.setblocking(False)
            await asyncio.get_running_loop().sock_connect(far, (HOST, self._to))
            self._open[task] = near, far
            await asyncio.gather(_copy(near, far), _copy(far, near))

    def reset(self) -> None:
        for task, ends in self._open.items():
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            task.cancel()
        self._open.clear()


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await loop.sock_recv(source, 65536):
            await loop.sock_sendall(sink, data)


@pytest.fixture
async def tcp(tmp_path):
    async with net_kit.wire("tcp", tmp_path) as made:
        yield made


async def test_link_reports_a_lost_connection_and_reconnects(tcp):
    _, endpoint, inbox = tcp.listen()
    box, lost = Middlebox(int(endpoint.rpartition(":")[2])), asyncio.Event()
    async with tcp_server(box.forward) as port:
        link = tcp.network.link(f"tcp://{HOST}:{port}", b"me", net_kit.Inbox(), LinkOptions(on_reset=lost.set))
        link.send(b"before")
        await inbox.until(1)
        assert not lost.is_set(), "the first connection is not reported as lost"
        for n in range(2):
            box.reset()
            await asyncio.wait_for(lost.wait(), 20)
            lost.clear()
            link.send(b"after")
            await inbox.until(2 + n)


async def test_link_stands_while_the_kernel_has_delivered_all(tcp):
    """A client may then wait for a busy listener, instead of asking it again over another connection."""
    read, reading = asyncio.Event(), asyncio.Event()

    async def mute(near: socket.socket) -> None:  # a listener behind a middlebox that stops forwarding
        with socket.create_connection((HOST, int(endpoint.rpartition(":")[2]))) as far:
            far.setblocking(False)
            back = asyncio.ensure_future(_copy(far, near))
            loop = asyncio.get_running_loop()
            while not read.is_set():
                await loop.sock_sendall(far, await loop.sock_recv(near, 65536))
            reading.set()
            await asyncio.Event().wait()
        back.cancel()

    _, endpoint, inbox = tcp.listen()
    connected = asyncio.Event()
    async with tcp_server(mute) as port:
        link = tcp.network.link(f"tcp://{HOST}:{port}", b"me", net_kit.Inbox(), LinkOptions(on_reset=connected.set))
        assert not link.stands(), "not connected yet"
        link.send(b"hello")
        await inbox.until(1)
        await _until(link.stands)  # the monitor's event may be under way
        read.set()
        link.send(b"x")
        await reading.wait()
        link.send(b"", [bytes(32 << 20)])
        await _until(lambda: not link.stands())  # libzmq's thread has it for a moment


async def test_no_link_stands_without_a_connection_of_the_kernel(tmp_path):
    async with net_kit.wire("ipc", tmp_path) as made:
        _, endpoint, inbox = made.listen()
        link, _ = made.link(endpoint)
        link.send(b"hello")
        await inbox.until(1)
        assert not link.stands()


async def _until(fact) -> None:
    async with compat.timeout(10):
        while not fact():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)


async def test_link_that_connected_to_itself_is_ended(tcp):
    """The kernel may assign a link the very port to which it connects, if the port has no listener; here it must."""
    with contextlib.closing(HeldPorts()) as held:
        itself = f"{HOST}:{held.hold()}"
        lost = asyncio.Event()
        tcp.network.link(f"tcp://{itself};{itself}", b"me", net_kit.Inbox(), LinkOptions(on_reset=lost.set))
        await asyncio.wait_for(lost.wait(), 20)  # the connection to itself was ended


@pytest.mark.parametrize("left", range(3))
async def test_failed_link_releases_its_descriptors(tcp, left):
    """Otherwise each attempt would leak descriptors, and no later attempt could succeed."""
    tcp.listen()  # starts libzmq's threads
    there = set(tcp.network._sockets)
    with descriptors_left(left), pytest.raises(OSError, match="ulimit -n"):
        tcp.network.link(f"tcp://{HOST}:1", b"me", net_kit.Inbox(), LinkOptions(on_reset=lambda: None))
    assert tcp.network._sockets == there


class Monitored(zmq.Socket):
    """A socket that records the names of its monitors."""

    names: ClassVar[list[str]] = []

    def monitor(self, addr, events=zmq.EVENT_ALL):
        if addr is not None:
            self.names.append(addr)
        super().monitor(addr, events)


async def test_monitor_names_are_unique(monkeypatch):
    """libzmq closes monitors in its own thread, so an old one may still exist when Python reuses a socket's id."""
    monkeypatch.setattr(Monitored, "names", [])
    loop = asyncio.get_running_loop()
    with zmq.Context() as context:
        for _ in range(50):
            socket = context.socket(zmq.DEALER, socket_class=Monitored)
            watching = SocketMonitor(socket, loop, SUCCEEDED, lambda event, value, address: None)
            await asyncio.sleep(0)  # the loop drops its references
            watching.close()
            socket.close()
            del watching, socket
    assert len(set(Monitored.names)) == len(Monitored.names) == 50
