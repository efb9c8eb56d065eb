"""Large parts by bulk streams: contents, order, failures of streams and links, memory; both ends on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tracemalloc

import pytest
from bulk_kit import MIB, End, Pair, array, eventually

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net import bulk, bulk_handshake, bulk_streams
from rlinf_actors.net import bulk_framing as framing


@pytest.fixture(params=[False, True], ids=["plain", "keyed"])
async def pair(request, rlinf_leak_check):
    if request.param:
        pytest.importorskip("cryptography")
    made = Pair(request.param)
    yield made
    await made.close()


def same(message: tuple[bytes, list], header: bytes, *parts) -> None:
    assert message[0] == header
    assert [bytes(part) for part in message[1]] == [bytes(part) for part in parts]


@pytest.mark.parametrize("size", [MIB, MIB + 1, 5 * MIB - 3, 40 * MIB])
async def test_large_parts_arrive_both_ways(pair, size):
    one, other = array(size), array(size)
    pair.near.send(b"call", b"pickle", one)
    pair.far.send(b"answer", other, b"small")
    same((await pair.far.until(1))[0], b"call", b"pickle", one)
    same((await pair.near.until(1))[0], b"answer", other, b"small")
    inline = sum(memoryview(part).nbytes for end in (pair.near, pair.far) for _, parts in end.sent for part in parts)
    assert inline < 100, "the parts must not go by the link too"


async def test_the_listening_end_may_have_the_first_transfer(pair):
    part = array(3 * MIB)
    pair.far.send(b"answer", b"", part)
    same((await pair.near.until(1))[0], b"answer", b"", part)


async def test_hundreds_of_mixed_tensors_need_few_pieces(pair):
    sizes = [(n * 7919) % (300 << 10) + 1 for n in range(390)] + [6 * MIB, 0, 2 * MIB, 1]
    parts = [array(size) for size in sizes]
    pieces = []
    received = pair.far.bulk.received
    pair.far.bulk.received = lambda header: (pieces.append(header), received(header))
    pair.near.send(b"weights", *parts)
    same((await pair.far.until(1))[0], b"weights", *parts)
    assert len(pair.near.bulk_messages) == 2  # Open and Announce
    assert len(pieces) <= sum(sizes) // MIB * 1.25 + 2


async def test_messages_keep_their_order(pair):
    part = array(4 * MIB)
    for n in range(5):
        pair.near.send(b"large%d" % n, part)
        pair.near.send(b"small%d" % n, b"x")
    arrived = await pair.far.until(10)
    assert [header for header, _ in arrived] == [b"%s%d" % (kind, n) for n in range(5) for kind in (b"large", b"small")]


async def test_small_messages_do_not_use_the_streams(pair):
    pair.near.send(b"small", b"x" * 1000, b"y" * (MIB // 2))
    await pair.far.until(1)
    assert not pair.near.bulk_messages
    assert not pair.near.transport.engine._threads


async def test_the_sender_forgets_parts_when_the_receiver_has_them(pair):
    pair.near.send(b"x", array(2 * MIB))
    await pair.far.until(1)
    await eventually(lambda: not (pair.near.bulk._outgoing))


async def test_memory_for_receives_is_used_again_and_given_back(pair, monkeypatch):
    part = array(4 * MIB)
    for n in range(1, 9):
        pair.near.send(b"x", part)
        await pair.far.until(n)
        pair.far.arrived[n - 1] = (b"x", [])
    memory = pair.far.transport.memory
    assert memory.takes == 8
    assert memory.kept <= 2 * 4 * MIB
    pair.far.transport._trim(memory.takes)
    assert memory.kept == 0


# --- failures ---


def break_streams(end: End) -> None:
    for stream in list(end.bulk._streams):
        with contextlib.suppress(OSError):
            stream.sock.shutdown(socket.SHUT_RDWR)


async def test_a_broken_stream_loses_nothing(pair):
    part = array(64 * MIB)
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    pair.near.send(b"second", part)
    pair.far.send(b"third", part)
    break_streams(pair.near)
    same((await pair.far.until(2))[1], b"second", part)
    same((await pair.near.until(1))[0], b"third", part)
    assert pair.near.bulk._session == b""
    pair.near.send(b"inline", part)
    same((await pair.far.until(3))[2], b"inline", part)
    assert pair.near.sent[-1][0] == b"inline"  # the link carries it


async def test_streams_are_tried_again_after_a_while(pair, monkeypatch):
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    break_streams(pair.far)
    await eventually(lambda: not (pair.near.bulk._session or pair.far.bulk._session))
    monkeypatch.setattr(bulk, "RETRY_S", 0.0)
    part = array(2 * MIB)
    pair.near.send(b"second", part)
    same((await pair.far.until(2))[1], b"second", part)
    assert pair.near.bulk._session


@pytest.mark.parametrize("who", ["near", "far"])
async def test_a_port_that_does_not_answer_delays_and_loses_nothing(pair, who, monkeypatch):
    monkeypatch.setattr(bulk_handshake, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        pair.near.bulk._address = mute.getsockname()
        part = array(2 * MIB)
        sender, receiver = (pair.near, pair.far) if who == "near" else (pair.far, pair.near)
        sender.send(b"x", part)
        same((await receiver.until(1))[0], b"x", part)
        sender.send(b"y", part)
        assert sender.sent[-1][0] == b"y"


async def test_a_port_that_is_closed_delays_and_loses_nothing(pair):
    with socket.create_server(("127.0.0.1", 0)) as other:
        pair.near.bulk._address = other.getsockname()
    part = array(2 * MIB)
    pair.far.send(b"x", part)
    same((await pair.near.until(1))[0], b"x", part)


async def test_a_piece_whose_message_is_lost_ends_the_session(pair, monkeypatch):
    monkeypatch.setattr(bulk, "PLACE_S", 0.2)
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    pair.near.cut = True
    pair.near.send(b"lost", array(MIB))
    pair.near.cut = False
    part = array(3 * MIB)
    pair.near.send(b"next", part)
    same((await pair.far.until(2))[1], b"next", part)


async def test_a_receiver_that_does_not_read_holds_no_more_than_the_sender_gave(pair):
    """The far engine stands still: the sender keeps its own parts, and goes on when the receiver does."""
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    gate = asyncio.Event()
    place = pair.far.bulk.place
    pair.far.bulk.place = lambda header: place(header) if gate.is_set() else None
    part = array(32 * MIB)
    pair.near.send(b"x", part)
    await asyncio.sleep(0.2)
    assert len(pair.far.arrived) == 1
    gate.set()
    for stream in pair.far.bulk._streams:
        stream.kick()
    same((await pair.far.until(2))[1], b"x", part)


async def test_a_closed_link_ends_its_transfers_and_streams(pair):
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    streams = [*pair.near.bulk._streams, *pair.far.bulk._streams]
    pair.near.send(b"x", array(64 * MIB))
    pair.near.bulk.close()
    pair.far.bulk.close()
    await eventually(lambda: not (any(stream.sock.fileno() >= 0 for stream in streams)))
    assert not pair.near.bulk._outgoing
    assert not pair.far.bulk._incoming
    await eventually(lambda: not pair.far.transport._expected)


async def test_the_end_of_the_receiver_frees_the_senders_parts(pair):
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    pair.far.bulk.place = lambda header: None
    pair.near.send(b"x", array(64 * MIB))
    pair.near.bulk.forget_outgoing()
    assert not pair.near.bulk._outgoing
    assert not pair.near.bulk._queue


async def test_an_error_of_a_handler_reaches_the_policy_and_the_next_message_arrives(pair, caplog):
    pair.far.raises = ValueError("a bug")
    failed = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    pair.near.send(b"one", array(MIB))
    pair.near.send(b"two", b"x")
    await pair.far.until(2)
    assert [header for header, _ in pair.far.arrived] == [b"one", b"two"]


async def test_a_duplicate_of_a_message_is_dropped(pair, caplog):
    pair.near.send(b"one", array(MIB))
    await pair.far.until(1)
    announce = next(header for header in reversed(pair.near.bulk_messages))
    pair.far.receive(announce, [b""])
    pair.near.send(b"two", b"x")
    await pair.far.until(2)
    assert "dropped a message about bulk streams" in caplog.text


async def test_parts_larger_than_the_machine_are_refused(pair, caplog):
    rows = [(0, bulk.MEMORY + 1)]
    pair.far.receive(bulk.MARK + bulk._encode(bulk.Announce(1, rows, b"x")), [b""])
    assert "dropped a message about bulk streams" in caplog.text
    assert not pair.far.bulk._incoming


async def test_threads_and_streams_are_bounded(pair):
    for _ in range(20):
        pair.near.send(b"x", array(2 * MIB))
        pair.far.send(b"y", array(2 * MIB))
    await pair.far.until(20)
    await pair.near.until(20)
    assert len(pair.near.bulk._streams) <= bulk_streams.STREAMS
    assert len(pair.near.transport.engine._threads) <= bulk_streams.STREAMS


async def test_the_end_of_a_peer_that_left_nothing_open_is_no_warning(pair, caplog):
    pair.near.send(b"x", array(2 * MIB))
    await pair.far.until(1)
    await eventually(lambda: not pair.near.bulk._outgoing)
    pair.far.bulk.close()
    await eventually(lambda: not pair.near.bulk._session)
    assert "slower link" not in caplog.text


async def test_what_is_fast_by_the_link_does_not_use_the_streams():
    loop = asyncio.get_running_loop()
    for keyed, size in ((True, bulk.KEYED_FROM), (False, bulk.PLAIN_FROM)):
        transport = bulk_handshake.BulkTransport(loop, keyed)
        assert transport.bulk_from == size
        await transport.close()


async def test_a_stream_of_an_ended_session_takes_no_piece(pair):
    """Its thread may still be writing when the session ends and the next one has pieces."""
    pair.near.send(b"first", array(MIB))
    await pair.far.until(1)
    old = pair.near.bulk._streams[0]
    pair.near.bulk.end("a test", pair.near.bulk._session)
    pair.near.bulk._failed_at = None
    pair.near.bulk._open = lambda: True
    pair.near.bulk.pack(b"second", [array(MIB)])
    assert pair.near.bulk.has_pieces()
    assert pair.near.bulk.next_piece(old) is None


async def test_transfers_that_together_exceed_the_machines_memory_are_refused(pair, caplog, monkeypatch):
    monkeypatch.setattr(bulk, "MEMORY", 3 * MIB)
    pair.far.bulk.place = lambda header: None
    for number in range(1, 5):
        pair.far.receive(bulk.MARK + bulk._encode(bulk.Announce(number, [(0, MIB)], b"x")), [b""])
    assert len(pair.far.bulk._incoming) == 3
    assert "dropped a message about bulk streams" in caplog.text


def test_the_account_of_a_transfer_of_a_tebibyte_is_small():
    region = framing.Region(1 << 40, ((0, 0, 1 << 40),))
    tracemalloc.start(1)
    try:
        received = framing.Received([region])
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    last = framing.PieceHeader(1, 0, framing.PIECE, (1 << 40) - framing.PIECE)
    received.add(last)
    with pytest.raises(RemoteWireError, match="before"):
        received.add(last)


# --- idle sessions ---


async def until_idle(pair):
    await eventually(lambda: not (pair.near.bulk._session or pair.far.bulk._session))


@pytest.mark.parametrize("who", ["near", "far"])
async def test_idle_streams_are_closed_and_opened_again(pair, who, monkeypatch, caplog):
    monkeypatch.setattr(bulk, "IDLE_S", 0.1)
    sender, receiver = (pair.near, pair.far) if who == "near" else (pair.far, pair.near)
    for n in range(1, 4):
        part = array(2 * MIB)
        sender.send(b"x", part)
        same((await receiver.until(n))[-1], b"x", part)
        streams = [*pair.near.bulk._streams, *pair.far.bulk._streams]
        await until_idle(pair)
        await eventually(lambda streams=streams: not any(stream.sock.fileno() >= 0 for stream in streams))
        assert (pair.near.bulk._failed_at, pair.far.bulk._failed_at) == (None, None)
    opened = [header for header in pair.near.bulk_messages if header[2:3] == b"\x01"]
    assert len(opened) == 3
    assert "slower link" not in caplog.text


async def test_a_session_that_is_used_is_not_idle(pair):
    pair.near.send(b"x", array(MIB))
    await pair.far.until(1)
    session = pair.near.bulk._session
    pair.near.bulk._end_if_idle(session, (0, 0))
    assert pair.near.bulk._session == session
    pair.far.bulk.place = lambda header: None
    pair.near.send(b"y", array(MIB))
    pair.near.bulk._end_if_idle(session, (2, 0))
    assert pair.near.bulk._session == session


async def test_a_transfer_that_meets_the_idle_end_is_not_lost(pair):
    pair.near.send(b"x", array(MIB))
    await pair.far.until(1)
    await eventually(lambda: not pair.near.bulk._outgoing)
    part = array(8 * MIB)
    pair.far.send(b"y", part)  # the near end does not know it yet
    pair.near.bulk._end_if_idle(pair.near.bulk._session, (1, 0))
    same((await pair.near.until(1))[0], b"y", part)
    pair.far.send(b"z", part)
    same((await pair.near.until(2))[1], b"z", part)
