"""Listeners and links, over ZeroMQ and the memory network."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from functools import partial

import msgspec
import net_kit
import pytest
import zmq

from rlinf_actors.errors import ConfigError
from rlinf_actors.net.framing import BIG
from rlinf_actors.net.message_socket import BATCH
from rlinf_actors.net.socket_security import Security, is_loopback
from rlinf_actors.net.zmq_network import ZmqNetwork

OPEN = Security(insecure_test_network=True)


@pytest.fixture
def fast_switches():
    """Threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


async def test_messages_pass_in_both_directions(wire):
    listener, endpoint, inbox = wire.listen()
    link, answers = wire.link(endpoint, b"driver:1")
    link.send(b"hello", [b"a", b"", b"c"])
    await inbox.until(1)
    assert inbox.messages == [(b"driver:1", b"hello", [b"a", b"", b"c"])]
    listener.send(b"driver:1", b"welcome", [b"d"])
    await answers.until(1)
    assert answers.messages == [(b"", b"welcome", [b"d"])]


async def test_order_is_kept_both_ways(wire):
    listener, endpoint, inbox = wire.listen()
    link, answers = wire.link(endpoint)
    sent = [str(n).encode() for n in range(2000)]
    for n, header in enumerate(sent):
        link.send(header)
        if n % 97 == 0:
            await asyncio.sleep(0)
    await inbox.until(len(sent))
    assert inbox.headers == sent
    for n, header in enumerate(sent):
        listener.send(b"me", header, now=n % 3 == 0)
    await answers.until(len(sent))
    assert answers.headers == sent


async def test_immediate_message_does_not_overtake_queued_ones(wire):
    listener, endpoint, inbox = wire.listen()
    link, answers = wire.link(endpoint)
    link.send(b"1", now=True)
    link.send(b"2")
    link.send(b"3", now=True)
    link.send(b"4", [b"x" * BIG])
    link.send(b"5", now=True)
    await inbox.until(5)
    assert inbox.headers == [b"1", b"2", b"3", b"4", b"5"]
    for n in range(6):
        listener.send(b"me", str(n).encode(), now=n % 2 == 1)
    await answers.until(6)
    assert answers.headers == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("wire", [kind for kind in net_kit.KINDS if kind != "memory"], indirect=True)
async def test_thread_that_sends_many_messages_does_not_wait_for_the_loop(wire, monkeypatch):
    """The loop has no turn while this test sends, as where its thread waits for the interpreter's lock."""
    listener, endpoint, inbox = wire.listen()
    link, answers = wire.link(endpoint)
    link.send(b"0", now=True)
    await inbox.until(1)
    for socket, send, far in ((link, link.send, inbox), (listener, partial(listener.send, b"me"), answers)):
        batches = net_kit.written(socket, monkeypatch)
        for n in range(3 * BATCH + 2):
            send(b"%d" % n)
        send(b"now", now=True)
        assert batches == [BATCH, BATCH, BATCH, 3]
        far.messages.clear()
        await far.until(3 * BATCH + 3)
        assert far.headers == [*(b"%d" % n for n in range(3 * BATCH + 2)), b"now"]
        assert batches == [BATCH, BATCH, BATCH, 3]


@pytest.mark.parametrize("wire", [kind for kind in net_kit.KINDS if kind != "memory"], indirect=True)
async def test_no_message_waits_for_the_next_one_of_its_thread(wire, fast_switches):
    """Threads and the loop send and flush at the same time. Each thread sends a burst, and blocks until it is there."""
    listener, endpoint, inbox = wire.listen()
    link, answers = wire.link(endpoint)
    link.send(b"0", now=True)
    await inbox.until(1)
    threads, late = 3, []
    arrived = [threading.Semaphore(0) for _ in range(threads)]
    answers.arrived = lambda header: arrived[int(header)].release()

    def send(number: int) -> None:
        bursts = random.Random(number)
        for burst in range(100):
            size = bursts.randrange(1, 3 * BATCH)
            for _ in range(size):
                listener.send(b"me", b"%d" % number, now=not bursts.randrange(20))
            if not all(arrived[number].acquire(timeout=10) for _ in range(size)):
                late.append((number, burst))
                break

    senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
    for sender in senders:
        sender.start()
    for sender in senders:
        await asyncio.to_thread(sender.join)
    assert not late


async def test_listener_distinguishes_its_links(wire):
    listener, endpoint, inbox = wire.listen()
    links = [wire.link(endpoint, f"peer{n}".encode()) for n in range(5)]
    for n, (link, _) in enumerate(links):
        link.send(str(n).encode())
    await inbox.until(5)
    assert sorted((peer, header) for peer, header, _ in inbox.messages) == [
        (f"peer{n}".encode(), str(n).encode()) for n in range(5)
    ]
    for n in range(5):
        listener.send(f"peer{n}".encode(), b"for " + str(n).encode())
    for n, (_, answers) in enumerate(links):
        await answers.until(1)
        assert answers.headers == [b"for " + str(n).encode()]


@pytest.mark.parametrize("sizes", [[BIG - 1], [BIG], [3, BIG, 5, BIG + 1, 0, 4 * BIG], [1 << 24]], ids=str)
async def test_frames_of_any_size_arrive_unchanged(wire, sizes):
    _, endpoint, inbox = wire.listen()
    link, _ = wire.link(endpoint)
    parts = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    link.send(b"before")
    link.send(b"big", parts)
    link.send(b"after", [b"small"])
    await inbox.until(3)
    assert inbox.messages == [(b"me", b"before", []), (b"me", b"big", parts), (b"me", b"after", [b"small"])]


async def test_parts_may_be_any_buffer(wire):
    _, endpoint, inbox = wire.listen()
    link, _ = wire.link(endpoint)
    wide = memoryview(bytearray(8 * BIG)).cast("d")
    link.send(b"h", [bytearray(b"ab"), memoryview(b"xcdx")[1:3], memoryview(bytearray(b"y" * BIG)), wide])
    await inbox.until(1)
    assert inbox.messages[0][2] == [b"ab", b"cd", b"y" * BIG, bytes(8 * BIG)]


async def test_a_message_to_an_unknown_peer_is_dropped(wire):
    listener, endpoint, inbox = wire.listen()
    listener.send(b"stranger", b"x")
    listener.send(b"stranger", b"x", now=True)
    link, _ = wire.link(endpoint)
    link.send(b"still works")
    await inbox.until(1)


async def test_a_listener_answers_from_its_callback(wire):
    listener = wire.network.listener(lambda peer, header, parts: listener.send(peer, b"re:" + header, parts, now=True))
    endpoint = listener.bind(wire.endpoint())
    link, answers = wire.link(endpoint, join=False)
    for n in range(300):
        link.send(str(n).encode(), [b"p"])
    await answers.until(300)
    assert answers.headers == [f"re:{n}".encode() for n in range(300)]


async def test_closed_ends_drop_messages_and_may_be_closed_again(wire):
    listener, endpoint, inbox = wire.listen()
    link, _ = wire.link(endpoint)
    link.send(b"one")
    await inbox.until(1)
    for _ in range(2):
        link.close()
        listener.close()
    link.send(b"two")
    listener.send(b"me", b"two")
    await asyncio.sleep(0)
    assert inbox.headers == [b"one"]


@pytest.mark.parametrize("wire", [kind for kind in net_kit.KINDS if kind != "memory"], indirect=True)
async def test_closed_ends_leave_the_loop_alone(wire, monkeypatch):
    listener, endpoint, inbox = wire.listen()
    link, _ = wire.link(endpoint)
    link.send(b"one", now=True)
    await inbox.until(1)
    link.close()
    listener.close()
    for socket, send in ((link, link.send), (listener, partial(listener.send, b"me"))):
        flushes = net_kit.flushes(socket, monkeypatch)
        send(b"two", now=True)
        send(b"three")
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(flushes) <= 1


class TestZeroMq:
    """Behaviour of ZeroMQ only."""

    async def test_messages_queued_at_close_are_sent(self, zmq_wire):
        _, endpoint, inbox = zmq_wire.listen()
        link, _ = zmq_wire.link(endpoint)
        link.send(b"first")
        await inbox.until(1)
        link.send(b"goodbye", [b"x" * BIG])
        link.close(linger_ms=5000)
        await inbox.until(2)
        assert inbox.headers == [b"first", b"goodbye"]

    async def test_messages_wait_for_a_listener_that_comes_later(self, zmq_wire):
        first = ZmqNetwork(asyncio.get_running_loop(), OPEN)
        endpoint = first.listener(net_kit.Inbox()).bind(zmq_wire.endpoint())
        first.close()  # the whole network, because a single socket frees its port later
        inbox = net_kit.Inbox()
        link, _ = zmq_wire.link(endpoint)
        link.send(b"early")
        second = zmq_wire.network.listener(inbox)
        second.bind(endpoint)
        await inbox.until(1)
        assert inbox.headers == [b"early"]

    async def test_a_link_finds_a_listener_that_was_restarted(self, zmq_wire):
        first, inbox = ZmqNetwork(asyncio.get_running_loop(), OPEN), net_kit.Inbox()
        endpoint = first.listener(inbox).bind(zmq_wire.endpoint())
        link, answers = zmq_wire.link(endpoint)
        link.send(b"one")
        await inbox.until(1)
        first.close()
        second = zmq_wire.network.listener(inbox)
        second.bind(endpoint)
        link.send(b"two")
        await inbox.until(2)
        second.send(b"me", b"welcome back")
        await answers.until(1)

    async def test_many_threads_send_on_one_link(self, zmq_wire):
        _, endpoint, inbox = zmq_wire.listen()
        link, _ = zmq_wire.link(endpoint)

        def send(thread: int) -> None:
            for n in range(300):
                link.send(f"{thread}:{n}".encode(), [b"z" * (BIG if n % 50 == 0 else 1)], now=n % 2 == 0)

        threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        await inbox.until(1200)
        for thread in threads:
            thread.join()
        for thread in range(4):
            mine = [header for header in inbox.headers if header.startswith(f"{thread}:".encode())]
            assert mine == [f"{thread}:{n}".encode() for n in range(300)]

    async def test_threads_answer_while_the_loop_receives(self, zmq_wire):
        """A send may consume the event that announced a message; that message must still be received."""
        listener, endpoint, inbox = zmq_wire.listen()
        link, answers = zmq_wire.link(endpoint)
        link.send(b"join")
        await inbox.until(1)

        def answer() -> None:
            for n in range(1000):
                listener.send(b"me", str(n).encode(), now=True)

        thread = threading.Thread(target=answer)
        thread.start()
        for n in range(1000):
            link.send(str(n).encode(), now=True)
            if n % 10 == 0:
                await asyncio.sleep(0)
        await inbox.until(1001)
        await answers.until(1000)
        thread.join()
        assert answers.headers == [str(n).encode() for n in range(1000)]

    async def test_one_loop_iteration_is_one_chunk(self, zmq_wire, monkeypatch):
        _, endpoint, inbox = zmq_wire.listen()
        link, _ = zmq_wire.link(endpoint)
        chunks = []
        socket = getattr(link, "_hub", link)
        monkeypatch.setattr(
            socket, "_write", lambda peer, rows, write=socket._write: (chunks.append(rows), write(peer, rows))
        )
        for n in range(BATCH):
            link.send(str(n).encode(), [b"a"])
        await inbox.until(BATCH)
        assert [len(rows) for rows in chunks] == [BATCH]

    async def test_answers_to_one_chunk_are_sent_as_one_chunk_in_the_same_turn(self, zmq_wire, monkeypatch):
        def answer(peer, header, parts):
            listener.send(peer, header)
            assert not chunks, "sent before the others were handled"
            if header == b"9":
                asyncio.get_running_loop().call_soon(chunks.append, "a turn of the loop")

        chunks = []
        listener = zmq_wire.network.listener(answer)
        monkeypatch.setattr(
            listener, "_write", lambda peer, rows, write=listener._write: (chunks.append(rows), write(peer, rows))
        )
        link, answers = zmq_wire.link(listener.bind(zmq_wire.endpoint()))
        for n in range(10):
            link.send(str(n).encode())
        await answers.until(10)
        assert [len(rows) for rows in chunks] == [10, len("a turn of the loop")]

    async def test_an_identity_that_returns_replaces_the_old_connection(self, zmq_wire):
        listener, endpoint, inbox = zmq_wire.listen()
        old, old_answers = zmq_wire.link(endpoint, b"same")
        old.send(b"old")
        await inbox.until(1)
        new, answers = zmq_wire.link(endpoint, b"same")
        new.send(b"new")
        await inbox.until(2)
        listener.send(b"same", b"for the new one")
        await answers.until(1)
        assert old_answers.messages == []

    async def test_frames_above_the_limit_end_the_connection_only(self, zmq_wire):
        inbox = net_kit.Inbox()
        listener = zmq_wire.network.listener(inbox, max_bytes=1 << 20)
        endpoint = listener.bind(zmq_wire.endpoint())
        bad, _ = zmq_wire.link(endpoint, b"bad")
        bad.send(b"x", [b"y" * (2 << 20)])
        good, _ = zmq_wire.link(endpoint, b"good")
        good.send(b"fine")
        await inbox.until(1)
        assert inbox.messages[0][:2] == (b"good", b"fine")
        bad.close()


GARBAGE = [
    [b""],
    [b"\xc1"],
    [b"random bytes"],
    [msgspec.msgpack.encode({"a": 1})],
    [msgspec.msgpack.encode([[]])],
    [msgspec.msgpack.encode([[b"h", 3]])],
    [msgspec.msgpack.encode([[b"h", -5]]), b"frame"],
    [msgspec.msgpack.encode([[0]]), b"frame"],
    [msgspec.msgpack.encode([["text"]])],
    [msgspec.msgpack.encode([[b"h", None]])],
    [b"\x91" * 100_000],
    [b"a", b"b", b"c"],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=[str(n) for n in range(len(GARBAGE))])
async def test_garbage_is_dropped_and_the_next_message_is_handled(short_dir, rlinf_leak_check, frames):
    async with net_kit.wire("ipc", short_dir) as wire:
        _, endpoint, inbox = wire.listen()
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(endpoint)
            stranger.send_multipart(frames)
            stranger.send(msgspec.msgpack.encode([[b"good", b"part"]]))
            await inbox.until(1)
        assert [message[1:] for message in inbox.messages] == [(b"good", [b"part"])]


class TestSecurity:
    @pytest.mark.parametrize(
        "endpoint",
        ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.0.0.1:5", "tcp://[::]:0", "tcp://host:1", "tcp://127.0.0.1:0"],
    )
    async def test_tcp_without_keys_is_refused(self, endpoint):
        network = ZmqNetwork(asyncio.get_running_loop())
        try:
            with pytest.raises(ConfigError, match=r"refusing to connect to .*--insecure-test-network"):
                network.link(endpoint, b"me", net_kit.Inbox())
            listener = network.listener(net_kit.Inbox())
            with pytest.raises(ConfigError, match="refusing to listen on"):
                listener.bind(endpoint)
        finally:
            network.close()

    async def test_insecure_test_network_allows_tcp_without_keys(self):
        network = ZmqNetwork(asyncio.get_running_loop(), Security(insecure_test_network=True))
        try:
            assert network.listener(net_kit.Inbox()).bind("tcp://0.0.0.0:0").startswith("tcp://0.0.0.0:")
        finally:
            network.close()

    @pytest.mark.parametrize(
        ("host", "inside"),
        [
            ("127.0.0.1", True),
            ("127.9.9.9", True),
            ("::1", True),
            ("localhost", True),
            ("0.0.0.0", False),
            ("gpu7", False),
        ],
    )
    def test_is_loopback_recognizes_loopback_hosts(self, host, inside):
        assert is_loopback(host) is inside

    async def test_error_names_an_address_in_use(self, short_dir, rlinf_leak_check):
        async with net_kit.wire("tcp", short_dir) as wire:
            _, endpoint, _ = wire.listen()
            other = wire.network.listener(net_kit.Inbox())
            with pytest.raises(OSError, match=f"cannot listen on {endpoint}: Address already in use"):
                other.bind(endpoint)
