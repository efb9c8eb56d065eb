"""Which connections a listener with keys admits, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest
from keyed_kit import Guarded, guarded
from net_kit import Inbox
from tcp_kit import HOST, tcp_server

from rlinf_actors import compat
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.socket_security import Security
from rlinf_actors.security.job import job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import LOCAL


@pytest.fixture
async def world(rlinf_leak_check):
    with guarded() as made:
        yield made


async def assert_only_a_listed_key_arrives(world: Guarded, header: bytes = b"right") -> None:
    """A message with a listed key arrives, and no other message has."""
    before = list(world.inbox.headers)
    link, _, _ = world.link(world.gate.enlist(name="control"), b"control")
    link.send(header)
    await world.inbox.until(len(before) + 1)
    assert world.inbox.headers == [*before, header]


async def test_listed_key_is_admitted_and_its_member_known(world: Guarded) -> None:
    world.bind()
    link, answers, _ = world.link(world.gate.enlist("agent", "node-1"))
    link.send(b"hello", [b"x" * 40_000])
    await world.inbox.until(1)
    member = world.listener.member_of(b"me")
    assert member is not None
    assert (member.role, member.name) == ("agent", "node-1")
    world.listener.send(b"me", b"welcome")
    assert (await answers.until(1)).headers == [b"welcome"]
    assert world.gate.refused.all == []


async def test_connection_without_a_key_is_refused(world: Guarded) -> None:
    world.bind()
    link, _, turned_away = world.link(None)
    link.send(b"hello")
    assert "wants a key" in (await turned_away.until())[0][0]
    await assert_only_a_listed_key_arrives(world)


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.0, without a key."""


async def test_connection_without_a_key_is_reported_to_the_gate(world: Guarded) -> None:
    host, _, port = world.bind().removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(GREETING)
    assert (await world.gate.refused.until())[0] == ("", "", "it came without a key", 1)
    while await reader.read(100):  # until the listener closes it
        pass
    writer.close()
    await writer.wait_closed()


async def test_connection_that_expects_another_server_key_is_refused(world: Guarded) -> None:
    world.bind()
    link, _, turned_away = world.link(world.gate.enlist(), server=KeyPair.make().public)
    link.send(b"hello")
    assert "expected a server with another key" in (await world.gate.refused.until())[0][2]
    assert "does not have the key that is expected" in (await turned_away.until())[0][0]
    await assert_only_a_listed_key_arrives(world)


async def test_unlisted_key_is_refused(world: Guarded) -> None:
    world.bind()
    stranger = KeyPair.make()
    link, _, turned_away = world.link(stranger)
    link.send(b"hello")
    assert (await world.gate.refused.until())[0] == (stranger.public, "127.0.0.1", "")
    why, for_good = (await turned_away.until())[0]
    assert "not listed, or revoked" in why
    assert for_good
    await assert_only_a_listed_key_arrives(world)


async def test_messages_and_connections_of_a_revoked_key_are_refused(world: Guarded) -> None:
    world.bind()
    pair = world.gate.enlist()
    link, _, turned_away = world.link(pair)
    link.send(b"before")
    await world.inbox.until(1)
    del world.gate.members[pair.public]
    assert world.listener.member_of(b"me") is None
    link.send(b"after")
    assert (await turned_away.until())[0][1]  # the connection was closed and its successor refused
    await assert_only_a_listed_key_arrives(world, b"somebody else")
    again, _, refused = world.link(pair, b"again")
    again.send(b"again")
    assert (await refused.until())[0][1]
    await assert_only_a_listed_key_arrives(world, b"and another")


async def test_key_of_another_job_is_refused(world: Guarded) -> None:
    """As in a worker: the listener has its job's pair, and links prove membership by the token."""
    ours, theirs = job_pair("token of ours"), job_pair("token of theirs")
    world.gate.members[ours.public] = LOCAL
    network = world.net(Security(pair=ours, head="x" * 40))
    inbox = Inbox()
    endpoint = network.listener(inbox, gate=world.gate).bind("tcp://127.0.0.1:0")
    sender = world.net(Security(pair=KeyPair.make(), head="x" * 40))
    wrong = sender.link(endpoint, b"wrong", Inbox(), LinkOptions(token="token of theirs"))
    wrong.send(b"no")
    await world.gate.refused.until()
    knowing = world.net(Security(pair=theirs, head=ours.public))  # with their own key, and ours as the server's
    link = knowing.link(endpoint, b"knowing", Inbox())
    link.send(b"no")
    refused = world.gate.refused
    while (theirs.public, "127.0.0.1", "") not in refused.all:  # the wrong one comes again and again meanwhile
        await refused.until(len(refused.all) + 1)
    right = sender.link(endpoint, b"right", Inbox(), LinkOptions(token="token of ours"))
    right.send(b"yes")
    assert (await inbox.until(1)).headers == [b"yes"]


async def test_without_a_running_handler_every_connection_is_refused(world: Guarded) -> None:
    world.bind()
    assert world.network._zap is not None
    world.network._zap.close()
    link, _, turned_away = world.link(world.gate.enlist())
    link.send(b"hello")
    await turned_away.until()
    assert world.inbox.messages == []


async def test_identity_belongs_to_the_first_member_that_used_it(
    world: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    world.bind()
    link, _, _ = world.link(world.gate.enlist(name="ann"), b"driver:1")
    link.send(b"first")
    await world.inbox.until(1)
    thief, _, _ = world.link(world.gate.enlist(name="bob"), b"driver:1")
    thief.send(b"stolen")
    control, _, _ = world.link(world.gate.enlist(name="control"), b"control")
    admission = world.listener._admission
    while not admission.stolen:  # each ping follows the thief's message
        control.send(b"ping")
        await world.inbox.until(len(world.inbox.messages) + 1)
    assert b"stolen" not in world.inbox.headers
    assert world.listener.member_of(b"driver:1").name == "ann"
    assert "driver 'bob' uses 'driver:1', the identity of another" in caplog.text


async def test_unix_socket_of_a_keyed_listener_needs_no_key(world: Guarded, short_dir: str) -> None:
    ipc = world.listener.bind(f"ipc://{short_dir}/s")
    world.bind()
    link = world.net(Security()).link(ipc, b"local", Inbox())
    link.send(b"hello")
    await world.inbox.until(1)
    assert world.listener.member_of(b"local") == LOCAL
    await assert_only_a_listed_key_arrives(world)


async def test_each_frame_is_checked_by_its_own_connection(world: Guarded, short_dir: str) -> None:
    ipc = world.listener.bind(f"ipc://{short_dir}/s")
    world.bind()
    pair = world.gate.enlist(name="ann")
    near, (far, _, turned_away) = world.net(Security()).link(ipc, b"near", Inbox()), world.link(pair, b"far")
    for n, (link, header) in enumerate(
        [(near, b"1"), (near, b"2"), (far, b"3"), (far, b"4"), (near, b"5"), (far, b"6")]
    ):
        link.send(header)
        await world.inbox.until(n + 1)
    assert world.inbox.headers == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert world.listener.member_of(b"near") == LOCAL
    assert world.listener.member_of(b"far").name == "ann"
    near.send(b"7")
    await world.inbox.until(7)
    del world.gate.members[pair.public]
    far.send(b"after its end")
    assert (await turned_away.until())[0][1]
    near.send(b"8")
    await world.inbox.until(8)
    assert world.inbox.headers[6:] == [b"7", b"8"]


async def test_a_unix_socket_after_tcp_is_refused(world: Guarded, short_dir: str) -> None:
    world.bind()
    with pytest.raises(ValueError, match="unix sockets before TCP"):
        world.listener.bind(f"ipc://{short_dir}/s")


async def test_a_keyed_listener_without_a_gate_raises_config_error(world: Guarded) -> None:
    with pytest.raises(ConfigError, match="nobody knows whose keys may come in"):
        world.network.listener(Inbox()).bind("tcp://127.0.0.1:0")


async def test_job_pair_without_a_token_raises_value_error(world: Guarded) -> None:
    with pytest.raises(ValueError, match="without a token"):
        job_pair("")


async def test_link_to_a_stalled_server_stands_retries_and_is_not_refused(
    world: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_actors.net.curve.LISTENER_S", 0.2)
    tries: asyncio.Queue[None] = asyncio.Queue()

    async def silent(connection: socket.socket) -> None:
        tries.put_nowait(None)
        await asyncio.get_running_loop().create_future()  # wait until the server ends

    async with tcp_server(silent) as port:
        world.endpoint = f"tcp://{HOST}:{port}"
        link, _, turned_away = world.link(world.gate.enlist())
        link.send(b"hello")
        for _ in range(3):  # two attempts failed, the third began
            await asyncio.wait_for(tries.get(), 10)
        async with compat.timeout(10):
            while not link.stands():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0)
        link.close()
    assert turned_away.all == []


OTHER_USER = """
import os, sys, zmq
from zmq.utils.monitor import parse_monitor_message
os.setgroups([]), os.setgid(65534), os.setuid(65534)
socket = zmq.Context().socket(zmq.DEALER)
events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
monitor = socket.get_monitor_socket(events)
socket.connect(sys.argv[1])
socket.send(b"hello")
print(zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"]).name, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_refused_on_the_unix_socket(world: Guarded, short_dir: str) -> None:
    os.chmod(short_dir, 0o755)  # other users may enter the directory
    ipc = world.listener.bind(f"ipc://{short_dir}/s")
    os.chmod(f"{short_dir}/s", 0o777)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", OTHER_USER, ipc], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.strip() != "HANDSHAKE_SUCCEEDED"
    link = world.net(Security()).link(ipc, b"local", Inbox())
    link.send(b"ours")
    assert (await world.inbox.until(1)).headers == [b"ours"]
