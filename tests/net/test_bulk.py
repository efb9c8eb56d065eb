"""Large parts by bulk streams: contents, order, failures of streams and links, memory; both ends on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import tracemalloc

import pytest
from bulk_kit import MIB, End, Pair, array, eventually

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net import bulk, bulk_handshake, bulk_streams, bulk_transfers
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk_framing import PieceHeader
from rlinf_actors.net.bulk_transfers import GivenMemory, Incoming, _Writing
from rlinf_actors.net.receive_memory import ReceiveMemory


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


async def test_no_thread_of_the_streams_keeps_memory_that_was_delivered(pair, monkeypatch):
    goes_on, soon = threading.Event(), pair.far.transport.soon

    def halt(function):
        soon(function)
        if threading.current_thread() is not threading.main_thread():
            goes_on.wait(20)

    monkeypatch.setattr(pair.far.transport, "soon", halt)
    try:
        pair.near.send(b"x", array(4 * MIB))
        await pair.far.until(1)
        pair.far.arrived.clear()
        assert pair.far.transport.memory.kept == 4 * MIB
    finally:
        goes_on.set()


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


async def test_a_message_that_another_thread_has_overtaken_arrives(pair):
    one, two = array(2 * MIB), array(3 * MIB)
    first = pair.near.bulk.pack(b"one", [one])
    pair.near.send(b"two", two)
    pair.near._link(*first)
    await pair.far.until(2)
    same(pair.far.arrived[0], b"two", two)
    same(pair.far.arrived[1], b"one", one)


async def test_a_message_that_was_overtaken_arrives_though_its_streams_broke(pair):
    pair.near.send(b"zero", array(MIB))
    await pair.far.until(1)
    first = pair.near.bulk.pack(b"one", [array(2 * MIB)])
    pair.near.send(b"two", array(MIB))
    break_streams(pair.near)
    await eventually(lambda: not pair.near.bulk._outgoing)  # all goes by the link
    pair.near._link(*first)
    await pair.far.until(3)
    assert [header for header, _ in pair.far.arrived] == [b"zero", b"two", b"one"]


async def test_a_number_far_ahead_is_refused(pair, caplog):
    rows = [(0, 8)]
    pair.far.receive(bulk.MARK + bulk._encode(bulk.Announce(1 << 60, rows, b"x")), [b""])
    assert "dropped a message about bulk streams" in caplog.text
    pair.near.send(b"one", array(MIB))
    await pair.far.until(1)


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


# --- into memory that a receive has given ---


def give(end: End, size: int) -> GivenMemory:
    """Let the next transfer arrive in memory that is returned; the second one in memory of its own."""
    given = GivenMemory(memoryview(bytearray(size)))
    waiting = [given]
    end.bulk._target_for = lambda header, parts, size, again: waiting.pop() if waiting else None
    return given


async def test_a_part_is_received_into_the_given_memory(pair):
    given = give(pair.far, 5 * MIB + 3)
    data = [array(5 * MIB + 3), array(3 * MIB)]
    pair.near.send(b"first", b"small", data[0])
    pair.near.send(b"second", b"small", data[1])
    first, second = await pair.far.until(2)
    same(first, b"first", b"small", data[0])
    same(second, b"second", b"small", data[1])
    assert first[1][1] is given.memory
    assert given.given


class Receives:
    """Receives of a stream at *pair*.far, each of which gives its memory only after the message before it came.

    Until a receive has given its memory, the sender's streams carry the first piece of its message alone.

    Attributes:
        given: the memory of each receive that was asked for it in time.
    """

    def __init__(self, pair, size: int) -> None:
        self.pair, self.size = pair, size
        self.given: list[GivenMemory] = []
        self.asked = 0
        pair.far.bulk._target_for = self.target_for
        self._next, pair.near.bulk.next_piece = pair.near.bulk.next_piece, self.next_piece

    def next_piece(self, stream):
        header = self.pair.near.bulk._next
        free = header is not None and (not header.offset or header.transfer <= len(self.given))
        return self._next(stream) if free else None

    def target_for(self, _header, _parts, size, again):
        self.asked += 1
        if self.asked % 2:  # no receive waits yet
            self.pair.far.loop.call_later(0.002, again)
            return None
        assert size == self.size
        self.given.append(GivenMemory(memoryview(bytearray(size))))
        self.pair.far.loop.call_soon(self.go_on)
        return self.given[-1]

    def go_on(self) -> None:
        for stream in self.pair.near.bulk._streams:
            stream.kick()


async def test_a_stream_of_parts_arrives_in_place_though_each_receive_is_late(pair):
    """Only the pieces that began to arrive before the receive are copied."""
    size, count = 4 * MIB + 3, 20
    receives, data = Receives(pair, size), [array(size) for _ in range(count)]
    for one in data:
        pair.near.send(b"m", b"small", one)
    arrived = await pair.far.until(count)
    assert len(receives.given) == count
    for one, (_, parts), given in zip(data, arrived, receives.given, strict=True):
        assert parts[1] is given.memory
        assert parts[1] == one


async def test_a_part_most_of_which_has_arrived_stays_where_it_is(pair, monkeypatch):
    monkeypatch.setattr(bulk_transfers, "LATE_PIECES", 0)
    asks = []
    pair.far.bulk._target_for = lambda header, parts, size, again: asks.append(again)
    held, pair.near.bulk.next_piece = pair.near.bulk.next_piece, lambda stream: None
    data = array(3 * MIB)
    pair.near.send(b"m", b"small", data)
    await eventually(lambda: bool(asks))
    taken = []
    pair.near.bulk.next_piece = lambda stream: taken.append(held(stream)) or taken[-1] if not taken else None
    await eventually(lambda: bool(pair.near.bulk._streams))
    pair.near.bulk._streams[0].kick()
    await eventually(lambda: pair.far.bulk._incoming[1].pieces._left == 2)
    asks[0]()
    assert len(asks) == 1  # no receive is asked any more
    pair.near.bulk.next_piece = held
    for stream in pair.near.bulk._streams:
        stream.kick()
    same((await pair.far.until(1))[0], b"m", b"small", data)


async def test_memory_that_is_taken_back_is_written_no_more(pair):
    """At any time: before the first piece, between two of them, and afterwards."""
    size = 8 * MIB
    for seed in range(12):
        given = give(pair.far, size)
        target, data = given.memory, array(size)
        pair.near.send(b"m", b"small", data)
        await asyncio.to_thread(threading.Event().wait, seed / 2000)
        await asyncio.to_thread(given.take_back)
        seen = bytes(target)
        await eventually(lambda: len(pair.far.arrived) == 1)
        ((_, parts),) = pair.far.arrived
        pair.far.arrived.clear()
        assert bytes(target) == seen
        assert parts[1] == data or given.memory == data  # the second if it had been delivered before


async def test_two_parts_or_a_message_behind_another_get_memory_of_their_own(pair):
    given = give(pair.far, 2 * MIB)
    data = array(2 * MIB)
    pair.near.send(b"m", data, data)
    same((await pair.far.until(1))[0], b"m", data, data)
    assert given.memory == bytes(2 * MIB)


async def test_a_part_that_comes_by_the_link_after_all_leaves_the_given_memory_alone(pair):
    pair.near.send(b"open", array(2 * MIB))
    await pair.far.until(1)
    given, data = give(pair.far, 4 * MIB), array(4 * MIB)
    target = given.memory
    pair.near.bulk.next_piece = lambda stream: None
    pair.near.send(b"m", b"small", data)
    await eventually(lambda: bool(pair.far.bulk._incoming))
    pair.far.bulk.end("the test ends it", pair.far.bulk._session)
    same((await pair.far.until(2))[1], b"m", b"small", data)
    assert not given.given
    assert target == bytes(4 * MIB)


class Piece(threading.Thread):
    """Writes to given memory until told to stop, as a stream does."""

    def __init__(self, given: GivenMemory) -> None:
        super().__init__(daemon=True)
        self.given, self.inside, self.go_on = given, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with _Writing(self.given, PieceHeader(1, 0, 4, 0)) as memory:
            self.inside.set()
            self.go_on.wait(10)
            memory[:] = b"late"


def test_taking_back_waits_for_a_piece_that_is_being_written():
    given = GivenMemory(memoryview(bytearray(8)))
    target, piece = given.memory, Piece(given)
    assert piece.inside.wait(10)
    taking = threading.Thread(target=given.take_back, daemon=True)
    taking.start()
    taking.join(0.05)
    assert taking.is_alive()
    piece.go_on.set()
    taking.join(10)
    assert bytes(target) == bytes(given.memory) == b"late\0\0\0\0"
    with _Writing(given, PieceHeader(1, 0, 4, 4)) as memory:
        memory[:] = b"more"
    assert bytes(target) == b"late\0\0\0\0"
    assert bytes(given.memory) == b"latemore"


def test_nothing_writes_to_a_part_that_is_complete():
    given = GivenMemory(memoryview(bytearray(8)))
    given.finish()
    with pytest.raises(RemoteWireError, match="complete"):
        _Writing(given, PieceHeader(1, 0, 4, 0)).__enter__()


async def test_taking_memory_back_after_a_death_copies_nothing(pair, monkeypatch):
    given = give(pair.far, 4 * MIB)
    before = given.memory
    incoming = Incoming([(1, 4 * MIB)], ReceiveMemory(), given)
    pair.far.bulk._incoming[1] = incoming
    pair.far.bulk.close()
    given.take_back()
    assert given.memory is before
    assert not given.given
    with pytest.raises(RemoteWireError), incoming.place(PieceHeader(1, 0, 0, MIB)):
        raise AssertionError("it is written to no more")


async def test_without_memory_to_move_to_the_rest_is_refused(pair, monkeypatch):
    """The user's tensor is not written to afterwards, and the sender sends the message by the link."""
    part = array(24 * MIB)
    given = give(pair.far, part.nbytes)

    def exhausted(_memory):
        raise MemoryError

    place, took = Incoming.place, []

    def placing(incoming, header):
        if header.offset >= 8 * MIB and not took:
            monkeypatch.setattr(bulk_transfers, "bytearray", exhausted, raising=False)
            given.take_back()
            took.append(bytes(user))
        return place(incoming, header)

    user = given.memory
    monkeypatch.setattr(Incoming, "place", placing)
    pair.near.send(b"x", b"small", part)
    same((await pair.far.until(1))[0], b"x", b"small", part)
    assert bytes(user) == took[0]
