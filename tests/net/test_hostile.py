"""Hostile bytes at a socket with keys: they reach no handler, and members are served meanwhile."""

from __future__ import annotations

import asyncio
import random

import pytest
from keyed_kit import guarded

EACH = 40
"""Connections of each kind."""
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x06" + len(content).to_bytes(8, "big") + content


def mutated(source: random.Random) -> bytes:
    return bytes(byte if source.random() > 0.05 else source.randrange(256) for byte in greeting())


HOSTILE = {
    "random bytes": lambda source: source.randbytes(source.randrange(1, 400)),
    "a mutated greeting": mutated,
    "a command of 2^62 bytes": lambda source: greeting() + b"\x06" + (1 << 62).to_bytes(8, "big") + bytes(100),
    "a message of 2^62 bytes": lambda source: greeting() + b"\x02" + (1 << 62).to_bytes(8, "big") + bytes(100),
    "a command of 1 GiB that does not come": lambda source: greeting() + b"\x06" + (1 << 30).to_bytes(8, "big"),
    "a HELLO of random bytes": lambda source: greeting() + command(b"HELLO", source.randbytes(194)),
    "a HELLO with a wrong signature": lambda source: (
        greeting() + command(b"HELLO", b"\1\0" + bytes(72) + source.randbytes(120))
    ),
    "INITIATE first": lambda source: greeting() + command(b"INITIATE", source.randbytes(300)),
    "READY, as without keys": lambda source: greeting(b"NULL") + command(b"READY", b"\x0bSocket-Type\0\0\0\6DEALER"),
    "PLAIN": lambda source: greeting(b"PLAIN") + command(b"HELLO", b"\5admin\5admin"),
    "HTTP": lambda source: b"GET / HTTP/1.1\r\nHost: head\r\n\r\n",
    "TLS": lambda source: bytes.fromhex("16030100c8010000c40303") + source.randbytes(190),
    "ZMTP 1": lambda source: b"\x01\x00",
    "ZMTP 2": lambda source: SIGNATURE + b"\x01\x05\x00\x00",
    "nothing": lambda source: b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_bytes_reach_no_handler_and_members_are_served(kind: str, rlinf_leak_check) -> None:
    source = random.Random(kind)
    with guarded() as world:
        host, _, port = world.bind().removeprefix("tcp://").rpartition(":")
        link, _, _ = world.link(world.gate.enlist())
        writers = []
        for n in range(EACH):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(HOSTILE[kind](source))
            writers.append(writer)
            link.send(b"%d" % n)
        await world.inbox.until(EACH)
        assert world.inbox.headers == [b"%d" % n for n in range(EACH)]
        assert {peer for peer, _, _ in world.inbox.messages} == {b"me"}
        again, _, _ = world.link(world.gate.enlist(name="bob"), b"bob")  # while they are all still there
        again.send(b"hello")
        await world.inbox.until(EACH + 1)
        for writer in writers:
            writer.transport.abort()
