"""A TCP connection that is reset between two who live: the link comes back by itself, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import ClassVar

import net_kit
import pytest
import zmq
from scarce_kit import descriptors_left
from tcp_kit import HOST, tcp_server

from rlinf_actors.net.connection_watch import SocketMonitor
from rlinf_actors.net.curve import SUCCEEDED
from rlinf_actors.net.host import HeldPorts

NO_LINGER = struct.pack("ii", 1, 0)


class Middlebox:
    """Forwards connections to one port, until it forgets them: both ends get a reset."""

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


async def test_a_link_says_that_its_connection_was_lost_and_is_there_again(tcp):
    _, endpoint, inbox = tcp.listen()
    box, lost = Middlebox(int(endpoint.rpartition(":")[2])), asyncio.Event()
    async with tcp_server(box.forward) as port:
        link = tcp.network.link(f"tcp://{HOST}:{port}", b"me", net_kit.Inbox(), on_reset=lost.set)
        link.send(b"before")
        await inbox.until(1)
        assert not lost.is_set(), "the first connection is none that was lost"
        for n in range(2):
            box.reset()
            await asyncio.wait_for(lost.wait(), 20)
            lost.clear()
            link.send(b"after")
            await inbox.until(2 + n)


async def test_a_link_that_met_itself_is_ended(tcp):
    """The kernel may give a link the very port, where nobody listens, that it is to connect to; here it must."""
    with contextlib.closing(HeldPorts()) as held:
        itself = f"{HOST}:{held.hold()}"
        lost = asyncio.Event()
        tcp.network.link(f"tcp://{itself};{itself}", b"me", net_kit.Inbox(), on_reset=lost.set)
        await asyncio.wait_for(lost.wait(), 20)  # ended, and made again


@pytest.mark.parametrize("left", range(3))
async def test_a_link_for_which_no_descriptors_are_left_keeps_none(tcp, left):
    """Else each try would find fewer, and none would succeed when there are some again."""
    tcp.listen()  # libzmq has its threads now
    there = set(tcp.network._sockets)
    with descriptors_left(left), pytest.raises(OSError, match="ulimit -n"):
        tcp.network.link(f"tcp://{HOST}:1", b"me", net_kit.Inbox(), on_reset=lambda: None)
    assert tcp.network._sockets == there


class Monitored(zmq.Socket):
    """One whose monitors' names are seen."""

    names: ClassVar[list[str]] = []

    def monitor(self, addr, events=zmq.EVENT_ALL):
        if addr is not None:
            self.names.append(addr)
        super().monitor(addr, events)


async def test_a_monitors_name_is_not_given_again(monkeypatch):
    """libzmq closes in a thread of its own: the last one may be there yet, and Python gives a socket's id again."""
    monkeypatch.setattr(Monitored, "names", [])
    loop = asyncio.get_running_loop()
    with zmq.Context() as context:
        for _ in range(50):
            socket = context.socket(zmq.DEALER, socket_class=Monitored)
            watching = SocketMonitor(socket, loop, SUCCEEDED, lambda event, value: None)
            await asyncio.sleep(0)  # the loop holds no more of it
            watching.close()
            socket.close()
            del watching, socket
    assert len(set(Monitored.names)) == len(Monitored.names) == 50
