"""Unix streams between processes of one node. tests/net/test_zmq_network.py has what all transports do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import net_kit
import pytest
from descriptor_kit import descriptors, descriptors_left
from stream_kit import World, chunk, closed, until, world

from rlinf_actors import forks
from rlinf_actors.net import (
    framing,
    reading,
    reading_queues,
    stream_framing,
    stream_socket,
    stream_strangers,
    unix_stream,
)
from rlinf_actors.net.descriptors import descriptor_of, part_of
from rlinf_actors.net.framing import pack
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.stream_connection import StreamConnection
from rlinf_actors.net.stream_framing import prefix
from rlinf_actors.net.stream_strangers import PENDING
from rlinf_actors.net.unix_stream import AGAIN, HELLO, STRANGER, StreamLink, path_of
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.wire import frames


@pytest.fixture
async def streams(short_dir, rlinf_leak_check):
    async with world(short_dir) as made:
        yield made


# --- bursts ---


async def test_calls_and_results_that_wait_together_are_one_message(streams: World) -> None:
    link, answers = streams.link()
    link.send(b"first")
    for n in range(3):
        link.queue(frames.Call(n, "step"), ())
    link.send(b"last")
    await streams.heard.until(3)
    assert streams.heard.headers == [b"first", frames.encode(frames.Calls([0, 1, 2], "step")), b"last"]
    for n in range(3):
        streams.listener.queue(b"me", frames.Ok(n, 0.5), ())
    await answers.until(1)
    assert answers.headers == [frames.encode(frames.Oks([0, 1, 2], [0.5, 0.5, 0.5]))]


# --- who connects ---


async def test_worker_without_a_stream_is_reached_by_zeromq(streams: World, short_dir: str) -> None:
    old = ZmqNetwork(asyncio.get_running_loop())
    heard = net_kit.Inbox()
    endpoint = old.listener(heard).bind(f"ipc://{short_dir}/old")
    link = streams.network.link(endpoint, b"me", net_kit.Inbox(), LinkOptions(to="g:0"))
    assert not isinstance(link, StreamLink)
    link.send(b"hello")
    await heard.until(1)
    old.close()


async def test_process_without_streams_reaches_a_worker_by_zeromq(streams: World) -> None:
    old = ZmqNetwork(asyncio.get_running_loop())
    answers = net_kit.Inbox()
    old.link(streams.endpoint, b"old", answers, LinkOptions(to="g:0")).send(b"hello")
    await streams.heard.until(1)
    streams.listener.send(b"old", b"welcome")
    await answers.until(1)
    old.close()


async def test_path_too_long_for_a_socket_leaves_zeromq(short_dir: str, caplog, rlinf_leak_check) -> None:
    network, heard = LocalNetwork(asyncio.get_running_loop()), net_kit.Inbox()
    name = "n" * (106 - len(short_dir))
    endpoint = network.listener(heard).bind(f"ipc://{short_dir}/{name}")
    assert "reach this one by ZeroMQ" in caplog.text
    network.link(endpoint, b"me", net_kit.Inbox(), LinkOptions(to="g:0")).send(b"hello")
    await heard.until(1)
    network.close()


async def test_socket_of_an_ended_process_is_replaced_and_removed_at_the_end(short_dir: str) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(f"{short_dir}/w{unix_stream.SUFFIX}")
    stale.close()
    async with world(short_dir) as streams:
        streams.link()[0].send(b"hello")
        await streams.heard.until(1)
    assert os.listdir(short_dir) == []


async def test_socket_of_a_successor_is_not_removed(streams: World) -> None:
    os.unlink(streams.path)
    successor = socket.socket(socket.AF_UNIX)
    successor.bind(streams.path)
    streams.listener.close()
    assert os.listdir(os.path.dirname(streams.path)).count("w_u") == 1
    successor.close()


async def test_another_user_is_cut_off_on_both_sides(streams: World, monkeypatch, caplog) -> None:
    monkeypatch.setattr(unix_stream, "peer_of", lambda stream: (1, 12345))
    rejected: list[tuple[str, bool]] = []
    stranger = streams.stranger(b"me")
    assert await closed(stranger)
    streams.network.link(
        streams.endpoint, b"me", net_kit.Inbox(), LinkOptions(to="g:0", on_rejected=lambda *why: rejected.append(why))
    )
    await until(lambda: rejected)
    assert rejected == [("a process of another user listens there", True)]
    assert streams.connections == 0


async def test_root_is_served(streams: World, monkeypatch) -> None:
    monkeypatch.setattr(unix_stream.os, "geteuid", lambda: 12345)
    monkeypatch.setattr(unix_stream, "peer_of", lambda stream: (1, 0))
    streams.link()[0].send(b"hello")
    await streams.heard.until(1)


# --- strangers ---

HOSTILE = {
    "random bytes": lambda source: source.randbytes(400),
    "HTTP": lambda source: b"GET / HTTP/1.1\r\n\r\n",
    "no HELLO": lambda source: chunk(b"me"),
    "HELLO without an identity": lambda source: chunk(HELLO),
    "a long HELLO": lambda source: chunk(HELLO + bytes(1000)),
    "records of random bytes": lambda source: chunk(HELLO + b"x") + chunk(source.randbytes(100)),
    "a long first chunk": lambda source: chunk(HELLO + b"x") + chunk(bytes(STRANGER)),
    "a frame of 2^40 bytes": lambda source: (
        chunk(HELLO + b"x") + bytes([0xC5, 0, 0, 0, 0, 1, 0, 0, 0]) + (1 << 40).to_bytes(8, "little")
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_bytes_end_their_connection_and_members_are_served(streams: World, kind: str, caplog) -> None:
    link, _ = streams.link(b"member")
    source = random.Random(kind)
    for _ in range(20):
        stranger = streams.stranger()
        stranger.send(HOSTILE[kind](source))
        assert await closed(stranger)
    link.send(b"hello", [bytes(1 << 20)])
    await streams.heard.until(1)
    assert [peer for peer, _, _ in streams.heard.messages] == [b"member"]
    assert "dropped what" in caplog.text
    await until(lambda: streams.connections == 1)


async def test_silent_connections_are_bounded_and_end(streams: World, monkeypatch) -> None:
    silent = [streams.stranger() for _ in range(PENDING + 20)]
    await until(lambda: streams.connections == PENDING)
    assert await closed(silent[0]), "the oldest makes room"
    monkeypatch.setattr(stream_strangers, "HANDSHAKE_S", 0.05)
    late = streams.stranger()
    streams.listener._streams._strangers.close()
    streams.listener._streams._strangers._look()
    link, _ = streams.link()
    link.send(b"hello")
    await streams.heard.until(1)
    for stream in (late, *silent[1:]):
        stream.close()
    await until(lambda: streams.connections == 1)


async def test_strangers_that_never_join_are_bounded_and_end(streams: World, monkeypatch) -> None:
    monkeypatch.setattr(stream_strangers, "PENDING", 20)
    monkeypatch.setattr(stream_strangers, "HANDSHAKE_S", 0.3)
    link, _ = streams.link()
    link.send(b"1")
    await streams.heard.until(1)
    strangers = [streams.stranger(b"%d" % n) for n in range(60)]
    await until(lambda: 0 < streams.connections <= 21)
    for stranger in strangers:
        assert await closed(stranger)
    link.send(b"2")
    await streams.heard.until(2)
    await until(lambda: streams.connections == 1)


async def test_joins_that_come_while_the_listeners_loop_stands_still_are_in_time(streams: World, monkeypatch) -> None:
    monkeypatch.setattr(stream_strangers, "HANDSHAKE_S", 0.1)
    link, _ = streams.link(join=False)
    await until(lambda: b"me" in streams.listener._streams.peers)
    link.send(net_kit.JOIN, now=True)
    time.sleep(0.8)  # noqa: ASYNC251 - the loop stands still
    link.send(b"1")
    await streams.heard.until(1)
    await asyncio.sleep(0.3)
    link.send(b"2")
    await streams.heard.until(2)
    assert streams.resets == 0


async def test_stranger_that_passes_descriptors_is_cut_off(streams: World) -> None:
    before = descriptors()
    for identity in (b"", b"x"):
        stranger = streams.stranger(identity)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in chunk(HELLO + bytes(300)):
                socket.send_fds(stranger, [bytes([byte])], [0, 1, 2])
                await asyncio.sleep(0.001)
        assert await closed(stranger)
        stranger.close()
    await until(lambda: streams.connections == 0)
    assert not descriptors() - before


async def test_storm_of_links_is_accepted(streams: World) -> None:
    links = [streams.link(b"%d" % n)[0] for n in range(300)]
    for link in links:
        link.send(b"hello")
    await streams.heard.until(300)
    for link in links:
        link.close()
    await until(lambda: streams.connections == 0)


async def test_full_backlog_delays_a_link(streams: World, monkeypatch) -> None:
    full = [BlockingIOError] * 3
    connect = unix_stream.connected

    def sometimes(path: str) -> socket.socket:
        if full:
            raise full.pop()
        return connect(path)

    monkeypatch.setattr("rlinf_actors.net.local_network.connected", sometimes)
    monkeypatch.setattr(unix_stream, "connected", sometimes)
    link, _ = streams.link()
    link.send(b"1")
    link.send(b"2", now=True)
    await streams.heard.until(2)
    assert streams.heard.headers == [b"1", b"2"]
    assert streams.resets == 0


async def test_listener_without_descriptors_accepts_later(streams: World, monkeypatch, caplog) -> None:
    monkeypatch.setattr(unix_stream, "PAUSE_S", 0.02)
    with descriptors_left(1):
        stranger = streams.stranger()
        await until(lambda: "no connection can be accepted" in caplog.text)
        stranger.close()
    link, _ = streams.link()
    link.send(b"hello")
    await streams.heard.until(1)


# --- identities ---


async def test_reconnected_link_replaces_its_connection(streams: World) -> None:
    first = streams.stranger(b"me")
    await until(lambda: b"me" in streams.listener._streams.peers)
    _, answers = streams.link(b"me")
    assert await closed(first)
    streams.listener.send(b"me", b"for the second")
    await answers.until(1)


async def test_message_to_a_peer_that_has_gone_is_reported(streams: World) -> None:
    link, _ = streams.link()
    link.send(b"hello")
    await streams.heard.until(1)
    unreachable: list[bytes] = []
    streams.listener.on_unreachable = unreachable.append
    link.close()
    await until(lambda: streams.connections == 0)
    streams.listener.send(b"me", b"late")
    await until(lambda: unreachable)
    assert unreachable == [b"me"]


# --- lost connections ---


async def test_link_connects_again_and_reports_that_messages_may_be_lost(streams: World) -> None:
    link, _ = streams.link()
    link.send(b"1")
    await streams.heard.until(1)
    streams.listener.close()
    await until(lambda: link._connection is None)
    link.send(b"kept until there is a listener")
    streams.listen()
    await streams.heard.until(1)
    await until(lambda: streams.resets)
    assert (streams.resets, streams.heard.headers) == (1, [b"kept until there is a listener"])


async def test_answer_of_the_listener_is_expected_before_it_is_asked_for(streams: World, monkeypatch) -> None:
    """Another thread may read it before the loop's thread goes on, and the loss would never be reported."""
    link, _ = streams.link()
    send_chunk, expected = StreamConnection.send_chunk, []

    def send(connection: StreamConnection, records: bytes) -> None:
        if records.startswith(AGAIN):
            expected.append(link._resuming)
        send_chunk(connection, records)

    monkeypatch.setattr(StreamConnection, "send_chunk", send)
    await until(lambda: b"me" in streams.listener._streams.peers)
    link._connection.end()
    await until(lambda: streams.resets)
    assert expected == [True]


async def test_connection_to_a_process_that_is_ending_is_no_reset(streams: World) -> None:
    """Its listening socket may be open after its connections: the kernel connects, and nobody answers."""
    link, _ = streams.link()
    link.send(b"1")
    await streams.heard.until(1)
    streams.listener.close()
    ending = socket.socket(socket.AF_UNIX)
    ending.bind(streams.path)
    ending.listen()
    await until(lambda: link._connection is not None and link._resuming)
    ending.close()
    await until(lambda: link._connection is None)
    assert streams.resets == 0
    streams.listen()
    await until(lambda: streams.resets == 1)


async def test_malformed_answer_ends_the_link_s_connection(streams: World) -> None:
    streams.link()
    await until(lambda: b"me" in streams.listener._streams.peers)
    streams.listener._streams.peers[b"me"].socket.send(b"no chunk at all")
    await until(lambda: streams.resets == 1)


class Broken:
    """A socket whose next sending fails as without memory of the kernel."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def send(self, *_):
        raise OSError(errno.ENOBUFS, "no buffer space")

    def sendmsg(self, *_):
        raise OSError(errno.ENOBUFS, "no buffer space")


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("from_listener", [False, True], ids=["link", "listener"])
async def test_connection_that_cannot_send_ends_and_reports_it(streams: World, size: int, from_listener: bool) -> None:
    link, _ = streams.link()
    link.send(b"1")
    await streams.heard.until(1)
    connection = streams.listener._streams.peers[b"me"] if from_listener else link._connection
    connection.socket = Broken(connection.socket)
    if from_listener:
        streams.listener.send(b"me", b"lost", [bytes(size)], now=True)
    else:
        link.send(b"lost", [bytes(size)], now=True)
    await until(lambda: streams.resets == 1)
    link.send(b"2")
    await streams.heard.until(2)
    assert streams.heard.headers == [b"1", b"2"]


async def test_message_that_finds_no_memory_ends_its_connection(streams: World, monkeypatch) -> None:
    link, _ = streams.link()
    link.send(b"1")
    await streams.heard.until(1)

    def none(*size: int):
        if size:
            raise MemoryError
        return bytearray()

    monkeypatch.setattr(stream_framing, "bytearray", none, raising=False)
    link.send(b"large", [bytes(1 << 20)])
    await until(lambda: streams.resets == 1)


async def test_data_before_the_end_of_a_process_arrives(streams: World) -> None:
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(bytes.fromhex(sys.argv[2])); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    last = chunk(HELLO + b"it") + chunk(framing.pack([(b"last words", [])])[0])
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, streams.path, last.hex())
    assert await process.wait() == -9
    await streams.heard.until(1)
    assert streams.heard.headers == [b"last words"]
    await until(lambda: streams.connections == 0)


# --- sending ---


async def test_peer_that_does_not_read_blocks_nobody(streams: World) -> None:
    slow = streams.stranger(b"slow")
    await until(lambda: b"slow" in streams.listener._streams.peers)
    _, answers = streams.link(b"quick")
    await until(lambda: b"quick" in streams.listener._streams.peers)
    for n in range(300):
        streams.listener.send(b"slow", b"%d" % n, [bytes(30_000)], now=True)
    streams.listener.send(b"quick", b"hello", now=True)
    await answers.until(1)
    assert streams.listener._streams.peers[b"slow"].unsent
    slow.close()
    await until(lambda: b"slow" not in streams.listener._streams.peers)


async def test_messages_to_a_slow_peer_arrive_in_order_and_whole(streams: World) -> None:
    link, _ = streams.link()
    sent = []
    for n in range(400):
        parts = [bytes([n % 251]) * size for size in (3, 20_000 + n, 70_000)[: n % 4]]
        link.send(b"%d" % n, parts, now=n % 2 == 0)
        sent.append((b"me", b"%d" % n, parts))
    await streams.heard.until(400)
    assert streams.heard.messages == sent
    assert not link._connection.unsent


async def test_thousands_of_large_parts_fit_into_one_message(streams: World) -> None:
    link, _ = streams.link()
    parts = [bytes([n % 251]) * framing.BIG for n in range(2500)]
    link.send(b"many", parts)
    await streams.heard.until(1)
    assert streams.heard.messages[0][2] == parts


async def test_close_sends_what_waits_within_the_linger_time(streams: World) -> None:
    slow = streams.stranger(b"slow")
    await until(lambda: b"slow" in streams.listener._streams.peers)
    for _ in range(50):
        streams.listener.send(b"slow", b"x", [bytes(100_000)])
    reading = asyncio.create_task(asyncio.to_thread(read_all, slow))
    await asyncio.to_thread(lambda: None)
    streams.listener.close(5000)
    assert await reading > 5_000_000


async def test_close_does_not_hold_the_lock_while_it_waits(streams: World, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(
        stream_socket, "send_rest", lambda *_: held.append(streams.listener._streams._lock.locked()), raising=True
    )
    streams.listener.close(10)
    assert held == [False]


def read_all(stream: socket.socket) -> int:
    stream.setblocking(True)
    total = 0
    while data := stream.recv(1 << 20):
        total += len(data)
    stream.close()
    return total


# --- descriptors ---


async def test_descriptor_arrives_with_its_message(streams: World) -> None:
    got: list = []
    listener = streams.network.listener(lambda peer, header, parts: got.append((header, parts)))
    listener.bind(streams.endpoint + "2")
    link = streams.network.link(streams.endpoint + "2", b"me", net_kit.Inbox(), LinkOptions(to="g:0"))
    before = descriptors()
    read, write = os.pipe()
    link.send(b"first", [b"a"])
    link.send(b"it", [b"", part_of(os.dup(write)), b"b"])
    link.send(b"last")
    await until(lambda: len(got) == 3)
    header, parts = got[1]
    assert (header, bytes(parts[0]), bytes(parts[2])) == (b"it", b"", b"b")
    passed = descriptor_of(parts[1]).take()
    assert os.get_inheritable(passed) is False
    os.write(passed, b"through it")
    assert os.read(read, 100) == b"through it"
    for fd in (read, write, passed):
        os.close(fd)
    got.clear()
    del parts
    await asyncio.sleep(0)
    assert len(descriptors() - before) <= 2, "the connection's own"
    link.close()
    listener.close()


async def test_descriptor_that_nobody_takes_is_closed(streams: World) -> None:
    link, _ = streams.link()
    link.send(b"x")
    await streams.heard.until(1)
    before = descriptors()
    for _ in range(20):
        link.send(b"it", [part_of(os.open("/dev/null", os.O_RDONLY))], now=True)
    await streams.heard.until(21)
    assert not descriptors() - before  # those of the handshake may go meanwhile


async def test_receiver_without_descriptors_finds_an_empty_part(streams: World) -> None:
    got: list = []
    streams.network.listener(lambda peer, header, parts: got.append(parts)).bind(streams.endpoint + "2")
    link = streams.network.link(streams.endpoint + "2", b"me", net_kit.Inbox(), LinkOptions(to="g:0"))
    link.send(b"x", [b"y"])
    await until(lambda: got)
    part = part_of(os.open("/dev/null", os.O_RDONLY))
    with descriptors_left(0):
        link.send(b"it", [part])
        await until(lambda: len(got) == 2)
    assert descriptor_of(got[1][0]) is None
    assert len(got[1][0]) == 0


# --- forks ---


async def test_forked_child_never_writes_and_keeps_no_connection(streams: World) -> None:
    link, answers = streams.link()
    link.send(b"1")
    await streams.heard.until(1)
    pid = os.fork()
    if not pid:
        link.send(b"of the child", now=True)
        streams.listener.send(b"me", b"of the child", now=True)
        os._exit(0 if forks.generation == 1 and link._connection.socket.fileno() < 0 else 1)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert status == 0
    link.send(b"2", now=True)
    await streams.heard.until(2)
    assert (streams.heard.headers, answers.headers) == ([b"1", b"2"], [])


async def test_descriptors_are_not_inherited_by_programs(streams: World) -> None:
    link, _ = streams.link()
    link.send(b"1")
    await streams.heard.until(1)
    server = streams.listener._streams
    sockets = [link._connection.socket, server.peers[b"me"].socket, server._listening[0][0]]
    assert not any(os.get_inheritable(stream.fileno()) for stream in sockets)


# --- many threads ---


@pytest.mark.parametrize("another", [False, True])
async def test_long_message_right_behind_a_join_waits_until_the_loop_has_admitted_its_sender(
    streams: World, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """A thread that waits reads both, while the loop stands still: it alone admits. The sender is read on although
    *another* message waits for the loop then.
    """
    monkeypatch.setattr(reading, "threads_read", True)
    network, endpoint, heard = streams.network, streams.endpoint + "joins", net_kit.Inbox()

    def on_loop(peer: bytes, header: bytes, parts: list) -> None:
        if header == net_kit.JOIN:
            listener.admit(peer)
        else:
            heard(peer, header, parts)

    listener = network.listener(on_loop, on_any_thread=lambda *message: False)
    listener.bind(endpoint)
    again = network.reading.again

    def read_behind_another(read: Any) -> None:
        monkeypatch.setattr(network.reading, "again", again)
        listener._streams._for_loop.append(lambda: None)
        read(True)

    if another:
        monkeypatch.setattr(network.reading, "again", read_behind_another)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stream:
        stream.connect(path_of(endpoint))
        stream.sendall(chunk(HELLO + b"me"))
        await until(lambda: b"me" in listener._streams.peers)
        data = b""
        for header, parts in ((net_kit.JOIN, []), (b"long", [b"x" * STRANGER]), (b"last", [])):
            records, big, _ = pack([(header, parts)], 0)
            data += prefix(records, big) + records + b"".join(big)

        def read() -> None:
            assert network.reading.take(read)
            stream.sendall(data)
            network.reading.wait(lambda: bool(listener._streams._for_loop.waiting), 10)
            network.reading.leave(read)

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(10)  # the loop stands still
        await heard.until(2)
    assert heard.headers == [b"long", b"last"]
    listener.close()


async def test_who_has_joined_is_read_on_although_some_message_always_waits_for_the_loop(
    streams: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "threads_read", True)
    network, endpoint, heard = streams.network, streams.endpoint + "flood", net_kit.Inbox()

    def on_loop(peer: bytes, header: bytes, parts: list) -> None:
        if header == net_kit.JOIN:
            listener.admit(peer)
        else:
            heard(peer, header, parts)

    listener = network.listener(on_loop, on_any_thread=lambda *message: False)
    listener.bind(endpoint)
    waiting = listener._streams._for_loop

    def flood() -> None:
        if not heard.messages:
            waiting.append(flood)

    waiting.append(flood)
    link = network.link(endpoint, b"me", net_kit.Inbox(), LinkOptions(to="g:0"))
    link.send(net_kit.JOIN, now=True)
    link.send(b"first")
    await heard.until(1)
    assert heard.headers == [b"first"]
    listener.close()


@pytest.mark.parametrize("seed", range(4))
async def test_threads_send_in_order_whoever_reads(streams: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread's messages arrive whole and in its order, however full the streams are."""
    monkeypatch.setattr(reading, "threads_read", True)
    choose = random.Random(seed)
    got: dict[bytes, list[int]] = {}

    def anywhere(peer: bytes, header: bytes, parts: list) -> bool:
        if header[:1] == b"l" and threading.current_thread() is not threading.main_thread():
            return False  # as a message that only the loop may handle
        got.setdefault(header.partition(b" ")[0], []).append(int(header.partition(b" ")[2]))
        assert all(part == bytes([len(part) % 251]) * len(part) for part in parts)
        return True

    def on_loop(peer: bytes, header: bytes, parts: list) -> None:
        if header != net_kit.JOIN:
            anywhere(peer, header, parts)
        listener.admit(peer)

    network, endpoint, count = streams.network, streams.endpoint + "many", 300
    listener = network.listener(on_loop)
    listener.bind(endpoint)
    links = [
        network.link(endpoint, b"%d" % n, anywhere, LinkOptions(to="g:0", on_any_thread=anywhere)) for n in range(2)
    ]
    for link in links:
        link.send(net_kit.JOIN, now=True)
    await until(lambda: all(b"%d" % n in listener._streams.peers for n in range(2)))
    plans = [[(choose.choice((0, 10, 20_000, 90_000)), choose.random() < 0.5) for _ in range(count)] for _ in range(6)]

    def send(name: int) -> None:
        for n, (size, now) in enumerate(plans[name]):
            header, parts = b"%c%d %d" % (b"la"[name % 2], name, n), [bytes([size % 251]) * size]
            if name < 4:
                links[name % 2].send(header, parts, now=now)
            else:
                listener.send(b"%d" % (name % 2), header, parts, now=now)

    def read() -> None:
        """Read in place of the loop, now and then."""
        while not done.is_set():
            assert network.reading.take(read)
            network.reading.wait(lambda: False, 0.003)
            network.reading.leave(read)

    done = threading.Event()
    threads = [threading.Thread(target=send, args=(name,)) for name in range(6)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    try:
        await until(lambda: sum(map(len, got.values())) == 6 * count)
    finally:
        done.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert all(numbers == list(range(count)) for numbers in got.values())
    assert len(got) == 6


async def test_flush_that_finds_a_thread_sending_leaves_the_rest_to_it(streams: World, monkeypatch) -> None:
    link, _ = streams.link()
    turns: list[Callable[[], object]] = []
    write = link._write

    def sending(peer: bytes, messages: list) -> None:
        if messages[0][0] == b"1":
            link.send(b"2")  # another thread, while this one sends
            turns.pop()()  # the flush on the loop
        write(peer, messages)

    monkeypatch.setattr(link, "_wake", turns.append)
    monkeypatch.setattr(link, "_write", sending)
    link.send(b"1", [bytes(framing.BIG)], now=True)
    turns.pop()()
    await streams.heard.until(2)
    assert streams.heard.headers == [b"1", b"2"]
    assert not turns


async def test_thread_that_reads_leaves_its_answers_to_a_loop_that_sends(streams: World, monkeypatch) -> None:
    """What a handler queues while the loop sends the rest of a large message leaves afterwards."""
    monkeypatch.setattr(reading, "threads_read", True)
    network, endpoint = streams.network, streams.endpoint + "busy"
    waiting: list[threading.Thread] = []
    flushed = threading.Event()

    def answer(peer: bytes, header: bytes, parts: list) -> bool:
        listener.admit(peer)
        if threading.current_thread() in waiting:
            listener.send(peer, b"answer")
            return True
        return False

    listener, answers = network.listener(answer, on_any_thread=answer), net_kit.Inbox()
    listener.bind(endpoint)
    server = listener._streams
    link = network.link(endpoint, b"me", answers, LinkOptions(to="g:0"))
    link.send(net_kit.JOIN, now=True)
    await until(lambda: b"me" in server.peers and server.peers[b"me"].joined)

    def read() -> None:
        assert network.reading.take(read)
        network.reading.wait(flushed.is_set, 5)
        network.reading.leave(read)

    flush, rest = server._flush, server.peers[b"me"].flush

    def sending() -> bool:
        if not waiting:
            waiting.append(threading.Thread(target=read))
            waiting[0].start()
            link.send(b"ask", now=True)
            assert flushed.wait(5)
        return rest()

    def flushing() -> None:
        flush()
        if threading.current_thread() in waiting:
            flushed.set()
            network.reading.ring()

    monkeypatch.setattr(server.peers[b"me"], "flush", sending)
    monkeypatch.setattr(server, "_flush", flushing)
    server._start_writing(server.peers[b"me"])  # the kernel's buffer was full, and has room now
    await answers.until(1)
    assert answers.headers == [b"answer"]
    await asyncio.to_thread(waiting[0].join)


@pytest.mark.parametrize("by_threads", [False, True])
async def test_message_and_end_that_one_event_tells_are_both_found(streams: World, monkeypatch, by_threads) -> None:
    """As of a process that sends its last message and dies while the reader is late."""
    monkeypatch.setattr(reading, "threads_read", by_threads)
    heard, ended = net_kit.Inbox(), asyncio.Event()
    listener = streams.network.listener(heard, on_any_thread=lambda *_: False)
    listener.bind(streams.endpoint + "last")
    listener.on_ended = lambda _peer: ended.set()
    with unix_stream.connected(path_of(streams.endpoint + "last")) as stream:
        stream.send(chunk(HELLO + b"me") + stream_framing.small(net_kit.JOIN, ()))
        await heard.until(1)
        listener.admit(b"me")
        stream.send(stream_framing.small(b"last", ()))
    await asyncio.wait_for(ended.wait(), 10)  # the loop has not looked since
    assert heard.headers == [net_kit.JOIN, b"last"]


async def test_end_of_a_stream_is_told_behind_its_last_message(streams: World, monkeypatch) -> None:
    monkeypatch.setattr(reading, "threads_read", True)
    network, endpoint, count = streams.network, streams.endpoint + "end", 3 * reading_queues.TURN
    told: list[object] = []

    def handle(peer: bytes, header: bytes, parts: list) -> None:
        listener.admit(peer)
        told.append(header)

    listener = network.listener(handle, on_any_thread=lambda *_: False)  # all of it is for the loop
    listener.on_ended = lambda peer: told.append("the end")
    listener.bind(endpoint)
    link = network.link(endpoint, b"me", net_kit.Inbox(), LinkOptions(to="g:0"))
    link.send(net_kit.JOIN, now=True)
    await until(lambda: told)

    def read() -> None:
        assert network.reading.take(read)
        network.reading.wait(lambda: b"me" not in sources(), 5)
        network.reading.leave(read)

    def sources() -> dict[bytes, object]:
        return {c.identity: c for c in listener._streams._connections if c.fd in network.reading._sources}

    thread = threading.Thread(target=read)
    link.send(b"0")
    for n in range(1, count):
        link.send(b"%d" % n)
    link._connection.end()
    thread.start()
    thread.join(10)  # the loop stands still: that thread has read all
    await until(lambda: "the end" in told)
    assert told == [net_kit.JOIN, *(b"%d" % n for n in range(count)), "the end"]


async def test_end_of_a_closed_connection_stops_no_other(streams: World) -> None:
    """A thread finds the end of a stream that the loop has closed meanwhile: its number may be another stream's."""
    streams.link()
    server = streams.listener._streams
    await until(lambda: b"me" in server.peers and server.peers[b"me"].joined)
    before = server.peers[b"me"]
    stopped: list[object] = []
    stop = server._stop_reading
    server._stop_reading = lambda connection: (stopped.append(connection), stop(connection))
    server._close(before)
    server._end(before)
    assert stopped == [before]
