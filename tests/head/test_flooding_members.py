"""Members that send more than the head handles, or ask more than they read, over real sockets with keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
import zmq
from sockets_kit import HEAD, KeyedHead, driver_hello

from rlinf_actors.net import fair_inbox, unread
from rlinf_actors.net.framing import pack
from rlinf_actors.net.link import secret_identity
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.client_messages import GetStatus
from rlinf_actors.wire.control_codec import Request, encode


@pytest.fixture
async def head():
    head = KeyedHead()
    yield head
    head.close()


class Connections:
    """Makes connections of members that may never read."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket] = []


@pytest.fixture
def context() -> Iterator[Connections]:
    made = Connections()
    yield made
    for socket in made.sockets:
        socket.close(linger=0)
    made.context.term()


def connection(context: Connections, head: KeyedHead, pair: KeyPair) -> zmq.Socket:
    socket = context.context.socket(zmq.DEALER)
    context.sockets.append(socket)
    for option, value in ((zmq.SNDHWM, 4), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.ROUTING_ID, secret_identity("bad"))
    socket.setsockopt(zmq.CURVE_SERVERKEY, HEAD.public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    socket.connect(head.endpoint)
    return socket


def asks(count: int) -> bytes:
    return pack([(encode(Request(n, GetStatus())), ()) for n in range(1, count + 1)])[0]


async def flood(socket: zmq.Socket, chunk: bytes, head: KeyedHead, *words: str) -> str:
    """Send a chunk again and again until the event log has a refusal with these words; return it."""
    noted = asyncio.ensure_future(head.noted(*words))
    while not noted.done():
        try:
            socket.send(chunk, zmq.NOBLOCK)
        except zmq.Again:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
    return await noted


async def test_connection_that_does_not_read_is_closed_and_its_member_may_connect_again(head, context, monkeypatch):
    monkeypatch.setattr(unread, "UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(unread, "LOOK_BYTES", 1 << 16)
    pair, good = await head.listed("driver", "greedy"), await head.listed("driver", "good")
    socket = connection(context, head, pair)
    text = await flood(socket, asks(1000), head, "driver 'greedy'", "it has not read")
    assert "its connection is closed; it may connect again" in text
    with contextlib.suppress(zmq.Again):  # what it had been sent; the next connection of the socket has its identity
        while True:
            socket.recv_multipart(zmq.NOBLOCK)
    while not socket.poll(0):
        with contextlib.suppress(zmq.Again):
            socket.send(asks(1), zmq.NOBLOCK)
        await asyncio.sleep(0.01)
    assert await head.client(good).request(GetStatus(), 10)
    assert await head.client(pair).request(GetStatus(), 10)


async def test_member_beyond_its_bytes_is_refused_by_name_of_the_limit(head, context, monkeypatch):
    monkeypatch.setattr(fair_inbox, "HELD_BYTES", 1 << 20)
    bad, good = await head.listed("driver", "bad"), await head.listed("driver", "good")
    text = await flood(connection(context, head, bad), asks(20_000), head, "driver 'bad'", "wait to be handled")
    assert "the most of one process: its connection is closed" in text
    client = head.client(good)
    assert await client.request(driver_hello("i1", "good"), 10, first=True)
    assert await client.request(GetStatus(), 10)


async def test_connections_that_have_ended_are_forgotten(head, monkeypatch):
    monkeypatch.setattr(unread, "ENDED_S", 0.0)
    pair = await head.listed("driver", "often")
    stays = head.client(pair)
    assert await stays.request(GetStatus(), 10)
    listener = head.server._server._listener
    standing = set(listener._connections._connections)
    for _ in range(60):
        client = head.client(pair)
        assert await client.request(GetStatus(), 10)
        client.close()
    assert len(listener._connections._connections) < 30
    assert len(listener._admission._owners) < 30
    assert len(listener._admission._addresses) < 30
    assert len(standing) == 2
    assert standing <= listener._connections._connections.keys() & listener._admission._owners.keys()
    assert await stays.request(GetStatus(), 10)
