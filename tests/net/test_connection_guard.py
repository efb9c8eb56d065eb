"""Limits of connections whose handshake is not done, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from keyed_kit import Guarded, guarded
from test_hostile import greeting

from rlinf_actors.net.connection_guard import TOO_MANY, ConnectionGuard
from rlinf_actors.net.connection_watch import BorrowedSocket

FEW = 8


@pytest.fixture
async def world(rlinf_leak_check, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlinf_actors.net.connection_guard.PENDING", FEW)
    monkeypatch.setattr("rlinf_actors.net.admission.FAIR_S", 0.0)
    with guarded() as made:
        yield made


@pytest.fixture
def strangers() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def address(world: Guarded) -> tuple[str, int]:
    host, _, port = world.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


async def stranger(world: Guarded, strangers: contextlib.ExitStack, source: str = "127.0.0.1") -> socket.socket:
    made = strangers.enter_context(socket.socket())
    made.setblocking(False)
    made.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(made, address(world))
    return made


async def until_closed(link: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(link, 100):
            pass


def closed(link: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return not link.recv(100)
    return False


async def test_flood_closes_the_oldest_pending_connections_and_no_members(
    world: Guarded, strangers: contextlib.ExitStack
) -> None:
    world.bind()
    link, _, turned_away = world.link(world.gate.enlist())
    link.send(b"before")
    await world.inbox.until(1)
    idle = [await stranger(world, strangers) for _ in range(FEW + 12)]
    for one in idle[:12]:
        await until_closed(one)
    where, why = (await world.gate.refused.until(1))[0][1:3]
    assert (where, why) == ("127.0.0.1", TOO_MANY)
    other, _, _ = world.link(world.gate.enlist(name="bob"), b"bob")
    other.send(b"among them")
    await world.inbox.until(2)
    link.send(b"after")
    await world.inbox.until(3)
    assert turned_away.all == []
    assert not any(map(closed, idle[14:]))  # two more went for bob, at most


async def test_flood_of_one_address_leaves_another_addresss_connection_open(
    world: Guarded, strangers: contextlib.ExitStack
) -> None:
    world.bind()
    slow = await stranger(world, strangers, "127.0.0.2")
    idle = [await stranger(world, strangers) for _ in range(3 * FEW)]
    for one in idle[: 2 * FEW]:
        await until_closed(one)
    slow.send(greeting())
    assert await asyncio.get_running_loop().sock_recv(slow, 100)


@pytest.mark.parametrize("flags", [b"\x06", b"\x02"])
async def test_connection_that_floods_before_its_handshake_is_closed(
    flags: bytes, world: Guarded, strangers: contextlib.ExitStack
) -> None:
    """A command or message of 4 GiB: libzmq would accept it, because this listener has no size limit."""
    world.bind()
    link, loop = await stranger(world, strangers), asyncio.get_running_loop()
    await loop.sock_sendall(link, greeting() + flags + (1 << 32).to_bytes(8, "big"))
    with contextlib.suppress(ConnectionError):
        for _ in range(1 << 16):
            await loop.sock_sendall(link, bytes(1 << 16))
            await asyncio.sleep(0)  # let the listener run, so that libzmq does not read gigabytes first
        pytest.fail("the listener read all bytes")
    assert (await world.gate.refused.until(1))[0][1:3] == ("127.0.0.1", "it has sent more than a handshake has")


async def test_bytes_that_libzmq_has_read_already_count_too(
    world: Guarded, strangers: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """epoll reports a connection only while it has bytes to read."""
    monkeypatch.setattr(ConnectionGuard, "_drain", lambda self: self._epoll.poll(0))
    world.bind()
    link = await stranger(world, strangers)
    await asyncio.get_running_loop().sock_sendall(
        link, greeting() + b"\x06" + (1 << 32).to_bytes(8, "big") + bytes(5000)
    )
    await until_closed(link)
    assert (await world.gate.refused.until(1))[0][1:3] == ("127.0.0.1", "it has sent more than a handshake has")


async def test_authenticated_member_may_send_a_large_message_at_once(world: Guarded) -> None:
    world.bind()
    for n in range(2 * FEW):
        link, _, _ = world.link(world.gate.enlist(name=f"m{n}"), b"m%d" % n)
        link.send(b"big", [bytes(1 << 20)])
        await world.inbox.until(n + 1)
    assert world.gate.refused.all == []


async def test_all_members_connect_if_more_come_at_once_than_may_be_pending(world: Guarded) -> None:
    """Members whose pending connection was closed reconnect; authenticated members lose no message."""
    world.bind()
    for n in range(4 * FEW):
        link, _, _ = world.link(world.gate.enlist(name=f"m{n}"), b"m%d" % n)
        link.send(b"%d" % n)
    await world.inbox.until(4 * FEW)
    assert sorted(map(int, world.inbox.headers)) == list(range(4 * FEW))


def test_reused_descriptor_number_is_left_alone(rlinf_leak_check, tmp_path: Path) -> None:
    """libzmq may close a connection before we learn of it; the descriptor's number is then free or something else's."""
    one, other = socket.socketpair()
    with (
        contextlib.closing(BorrowedSocket()) as borrowed,
        open(tmp_path / "file", "w") as file,
        one as end,
        other,
        socket.socket() as unconnected,
    ):
        unconnected.bind(("127.0.0.1", 0))
        port = unconnected.getsockname()[1]
        for fd in (file.fileno(), end.fileno(), unconnected.fileno(), 10**6):
            with borrowed.on(fd, {port}) as found:
                assert found is None
