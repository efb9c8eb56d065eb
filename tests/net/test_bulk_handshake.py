"""The bulk port: who is admitted, what strangers cost, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
from bulk_kit import MIB, Pair, array, eventually

from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net import bulk_handshake
from rlinf_actors.net.bulk_framing import BulkHandshake
from rlinf_actors.net.bulk_streams import STREAMS


@pytest.fixture(params=[False, True], ids=["plain", "keyed"])
async def pair(request, rlinf_leak_check):
    if request.param:
        pytest.importorskip("cryptography")
    made = Pair(request.param)
    yield made
    await made.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what the port sends until it closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""


async def hello(pair: Pair, session: bytes, secret: bytes, *, then: bytes = b"") -> bytes:
    """Say a Hello with these values, and return what follows the nonce until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
    try:
        nonce = await reader.readexactly(framing.NONCE)
        writer.write(BulkHandshake(session, secret, nonce, os.urandom(framing.NONCE)).hello() + then)
        return await ended(reader)
    finally:
        writer.close()


async def opened(pair: Pair) -> tuple[bytes, bytes]:
    """Let the pair open its session. Return the session's id, and its secret."""
    pair.near.send(b"x", array(MIB))
    await pair.far.until(1)
    session = pair.far.bulk._session
    return session, pair.far.transport._expected[session].result()[1]


async def test_a_stranger_without_the_secret_reads_nothing_and_stores_nothing(pair, caplog):
    session, _ = await opened(pair)
    streams = len(pair.far.bulk._streams)
    assert await hello(pair, session, os.urandom(framing.SECRET)) == b""
    assert len(pair.far.bulk._streams) == streams
    assert "refused a bulk stream" in caplog.text


async def test_an_unknown_session_is_refused_in_time(pair, monkeypatch):
    monkeypatch.setattr(bulk_handshake, "HANDSHAKE_S", 0.2)
    assert await hello(pair, os.urandom(framing.SESSION), os.urandom(framing.SECRET)) == b""
    assert not pair.far.transport._expected


async def test_garbage_and_silence_end_in_time(pair, monkeypatch):
    monkeypatch.setattr(bulk_handshake, "HANDSHAKE_S", 0.2)
    for said in (b"", b"GET / HTTP/1.1\r\n", os.urandom(1000)):
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
        writer.write(said)
        assert len(await ended(reader)) in (0, framing.NONCE)  # unread bytes may reset the connection
        writer.close()
    await eventually(lambda: not pair.far.transport._waiting)


async def test_a_flood_of_strangers_keeps_no_member_out(pair, monkeypatch):
    monkeypatch.setattr(bulk_handshake, "WAITING", 8)
    strangers = [socket.create_connection(("127.0.0.1", pair.port)) for _ in range(40)]
    try:
        part = array(3 * MIB)
        pair.near.send(b"x", part)
        message = (await pair.far.until(1))[0]
        assert bytes(message[1][0]) == bytes(part)
        assert pair.near.bulk._session
        assert len(pair.far.transport._waiting) <= 9
    finally:
        for stranger in strangers:
            stranger.close()


async def test_a_replayed_hello_is_refused(pair):
    """The port's nonce differs for each connection, so a recorded Hello proves nothing."""
    session, secret = await opened(pair)
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.port)
    await reader.readexactly(framing.NONCE)
    writer.write(BulkHandshake(session, secret, os.urandom(framing.NONCE), os.urandom(framing.NONCE)).hello())
    assert await ended(reader) == b""
    writer.close()


async def test_a_process_that_does_not_know_the_secret_is_no_listener(pair):
    """Somebody else listens at the port: nothing is sent there, and the parts go by the link."""
    said = []

    async def impostor(reader, writer):
        writer.write(os.urandom(framing.NONCE))
        await reader.readexactly(framing.HELLO)
        writer.write(os.urandom(framing.PROOF))
        said.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    pair.near.bulk._address = server.sockets[0].getsockname()
    part = array(2 * MIB)
    pair.near.send(b"x", part)
    message = (await pair.far.until(1))[0]
    assert bytes(message[1][0]) == bytes(part)
    await eventually(lambda: len(said) == STREAMS)
    assert set(said) == {b""}
    server.close()


async def test_a_tampered_piece_ends_the_session_and_loses_nothing(rlinf_leak_check):
    """A relay between the two changes a byte of a piece."""
    pytest.importorskip("cryptography")
    pair = Pair(keyed=True)
    changed = False

    async def pump(reader, writer, from_near):
        nonlocal changed
        count = 0
        while data := await reader.read(1 << 16):
            count += len(data)
            if from_near and not changed and count > MIB:
                data, changed = data[:-1] + bytes([data[-1] ^ 1]), True
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader, writer):
        other = await asyncio.open_connection("127.0.0.1", pair.port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(pump(reader, other[1], True), pump(other[0], writer, False))
        writer.close()
        other[1].close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    pair.near.bulk._address = server.sockets[0].getsockname()
    part = array(16 * MIB)
    pair.near.send(b"x", part)
    message = (await pair.far.until(1))[0]
    assert changed
    assert bytes(message[1][0]) == bytes(part)
    assert not pair.far.bulk._session
    server.close()
    await pair.close()


async def test_a_process_without_the_cipher_does_not_listen(pair, monkeypatch):
    monkeypatch.setattr(bulk_handshake.importlib.util, "find_spec", lambda name: None)
    transport = bulk_handshake.BulkTransport(asyncio.get_running_loop(), True)
    assert transport.listen("127.0.0.1") == 0
    await transport.close()


async def test_a_broken_cipher_at_either_end_leaves_all_to_the_link(pair, monkeypatch, caplog):
    """It is installed, and does not load: no internal error, and what was announced arrives by the link."""

    def broken(_key):
        raise ImportError("libssl.so.3: cannot open shared object file")

    pair.near.transport.keyed = pair.far.transport.keyed = True
    monkeypatch.setattr(bulk_handshake, "Cipher", broken)
    part = array(16 * MIB)
    pair.near.send(b"x", part)
    message = (await pair.far.until(1))[0]
    assert bytes(message[1][0]) == bytes(part)
    assert "cryptography does not load here" in caplog.text
    assert not pair.far.transport.available


async def test_of_strangers_no_more_than_a_hello_each_is_read(pair, monkeypatch):
    """However much they send: what is not authenticated costs a fixed number of bytes, and one session at most."""
    monkeypatch.setattr(bulk_handshake, "HANDSHAKE_S", 0.5)
    read, real = [], pair.far.transport._read

    async def reading(sock, size):
        data = await real(sock, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(pair.far.transport, "_read", reading)
    more = bytes(100_000)
    said = [hello(pair, os.urandom(framing.SESSION), os.urandom(framing.SECRET), then=more) for _ in range(40)]
    strangers = asyncio.gather(*said)
    await eventually(lambda: len(read) == 40)
    assert set(read) == {framing.HELLO}
    assert len(pair.far.transport._expected) <= 40
    assert await strangers == [b""] * 40
    await eventually(lambda: not (pair.far.transport._expected or pair.far.transport._waiting))
