"""A large tensor that its sender still writes: every order of its pieces, its receive and the sender's end."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from message_kit import World, settle

from rlinf_actors.errors import CallTimeoutError, ConnectionLostError, PeerDiedError
from rlinf_actors.messaging import pieces
from rlinf_actors.messaging.outbox import Outbox, OutgoingMessage
from rlinf_actors.messaging.pieces import PIECE, ArrivingPart
from rlinf_actors.messaging.tensor_transfer import DetachedTensors
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.runtime.future import AsyncWork
from rlinf_actors.wire import arrays, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SIZE = 3 * PIECE + 5
SOURCE = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
LINK = b"worker:a#1"


# --- the sender ---


def test_each_piece_is_reported_after_it_is_written():
    block, part, reports = memoryview(bytearray(SIZE)), memoryview(arrays.bytes_of(SOURCE)), []

    def tell(size):
        reports.append(size)
        assert block[:size] == part[:size]
        assert bytes(block[size : size + 9]) == bytes(min(9, SIZE - size))

    assert pieces.write(block, part, tell) is None
    assert reports == [PIECE, 2 * PIECE, 3 * PIECE, SIZE]


def test_a_signal_handler_that_raises_does_not_stop_the_pieces():
    block, part, reports = memoryview(bytearray(SIZE)), arrays.bytes_of(SOURCE), []

    def tell(size):
        reports.append(size)
        if len(reports) == 2:
            raise KeyboardInterrupt

    assert isinstance(pieces.write(block, part, tell), KeyboardInterrupt)
    assert reports == [PIECE, 2 * PIECE, 2 * PIECE, 3 * PIECE, SIZE]
    assert block == part


def test_the_receiver_learns_that_a_part_cannot_be_written():
    reports = []

    def tell(size):
        reports.append(size)
        if size > PIECE:
            raise MemoryError

    with pytest.raises(MemoryError):
        pieces.write(memoryview(bytearray(SIZE)), arrays.bytes_of(SOURCE), tell)
    assert reports == [PIECE, 2 * PIECE, 2 * PIECE, 2 * PIECE, 0]


class InterruptedPeer:
    """A receiver that can borrow. A signal handler of the sender raises right after a message was announced to it."""

    name, worker_id = "b:0", "b"

    def __init__(self):
        self.sent, self.lending, self.block = [], self, None

    def listen(self, *_args, **_how):
        return 1

    def on_gone(self, _callback):
        pass

    def allocate(self, size):
        self.block = memoryview(bytearray(size))
        return self.block

    def send(self, frame, _parts=(), **_how):
        self.sent.append(frame)

    def post(self, header, _parts=(), **_how):
        self.sent.append(frames.decode(header))
        raise KeyboardInterrupt


def test_a_signal_handler_that_raises_before_the_first_piece_does_not_stop_the_pieces():
    peer, part = InterruptedPeer(), arrays.bytes_of(SOURCE)
    message = OutgoingMessage("", [b"head", part], True, AsyncWork("send()"), DetachedTensors(), in_pieces=True)
    with pytest.raises(KeyboardInterrupt):
        Outbox(peer, "a:0", "a", 1 << 30).post(message)
    assert peer.block == part
    assert [frame.size for frame in peer.sent[1:]] == [PIECE, 2 * PIECE, 3 * PIECE, SIZE]
    assert message.work.done()


# --- the receiver ---


class Arriving:
    """A message that worker a is writing into shared memory that b sees."""

    def __init__(self, a, b, number=1):
        self.a, self.b, self.number = a, b, number
        head, part = payload.encode(SOURCE, copy=None)
        self.block, self.part = memoryview(bytearray(SIZE)), part
        frame = frames.UserMessage(7, number, a.name, a.id, "", SIZE, None, SIZE)
        b.messenger.arrived(LINK, frame, AuthenticatedParts([head, self.block]))

    def write(self, size):
        self.block[:size] = memoryview(self.part)[:size]
        self.b.messenger.arriving.written(LINK, frames.Written(7, self.number, size), AuthenticatedParts())


@pytest.fixture
async def pair():
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    await a.send("b:0", "meet")
    assert await b.recv("a:0") == "meet"
    return a, b


def receive_into(b):
    target = torch.zeros(SIZE, dtype=torch.uint8)
    return target, b.messenger.receive_into(WorkerAddress("a", 0), target)


async def until(condition):
    while not condition():  # noqa: ASYNC110 - another thread makes it true
        await asyncio.sleep(0)


@pytest.mark.parametrize("posted", ["before", "during", "after"])
async def test_a_receive_into_a_tensor_has_all_pieces(pair, posted):
    a, b = pair
    if posted == "before":
        target, work = receive_into(b)
        waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))
    arriving = Arriving(a, b)
    arriving.write(PIECE)
    if posted == "during":
        target, work = receive_into(b)
        waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))
    if posted != "after":
        await until(lambda: bytes(target[PIECE - 9 : PIECE]) == bytes(SOURCE[PIECE - 9 : PIECE]))  # before it is whole
        assert not work.done()
    arriving.write(SIZE)
    if posted == "after":
        target, work = receive_into(b)
        waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))
    assert await waiting is None
    assert torch.equal(target, SOURCE)
    assert not b.messenger.arriving


async def test_any_other_receive_waits_until_the_message_is_whole(pair):
    a, b = pair
    work = b.recv("a:0")
    arriving = Arriving(a, b)
    arriving.write(SIZE - 1)
    await settle()
    assert not work.done()
    arriving.write(SIZE)
    assert torch.equal(await work, SOURCE)


async def test_an_unwritten_message_does_not_let_later_ones_overtake_it(pair):
    a, b = pair
    arriving = Arriving(a, b)
    await a.send("b:0", "second")
    first, second = b.recv("a:0"), b.recv("a:0")
    assert await second == "second"
    assert not first.done()
    arriving.write(SIZE)
    assert torch.equal(await first, SOURCE)


async def test_a_receive_that_times_out_between_pieces_gives_the_message_back(pair):
    a, b = pair
    arriving = Arriving(a, b)
    arriving.write(PIECE)
    _, work = receive_into(b)
    with pytest.raises(CallTimeoutError):
        await asyncio.to_thread(b.messenger.wait, work, 0.05)
    arriving.write(SIZE)
    target, work = receive_into(b)
    await asyncio.to_thread(work.wait)
    assert torch.equal(target, SOURCE)


async def test_a_tensor_that_does_not_fit_is_refused_and_the_target_unchanged(pair):
    a, b = pair
    target = torch.zeros(SIZE, dtype=torch.int8)
    work = b.messenger.receive_into(WorkerAddress("a", 0), target)
    waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))
    arriving = Arriving(a, b)
    arriving.write(PIECE)
    arriving.write(SIZE)
    with pytest.raises(ValueError, match=r"a:0 sent a tensor of .* torch.uint8"):
        await waiting
    assert not target.any()


@pytest.mark.parametrize("kind", ["into", "object", "later"])
async def test_a_sender_that_dies_between_pieces_fails_the_receive(pair, kind):
    a, b = pair
    arriving = Arriving(a, b)
    arriving.write(PIECE)
    if kind == "into":
        _, work = receive_into(b)
    elif kind == "object":
        work = b.recv("a:0")
    a.world.die(a)
    await settle()
    if kind == "later":
        work = b.recv("a:0")
    with pytest.raises(PeerDiedError):
        await asyncio.to_thread(work.wait, 5)
    assert not b.messenger.arriving


async def test_what_a_sender_has_written_is_received_after_the_news_of_its_death(pair):
    a, b = pair
    link = stream(a, b)
    arriving = Arriving(a, b)
    arriving.write(PIECE)
    a.world.die(a)
    await settle()
    arriving.write(SIZE)  # was in the stream
    b.server._listener.end(link)
    assert torch.equal(await asyncio.wait_for(b.recv("a:0"), 5), SOURCE)


async def test_the_end_of_the_stream_fails_what_a_dead_sender_has_not_written(pair):
    a, b = pair
    link = stream(a, b)
    Arriving(a, b).write(PIECE)
    work = b.recv("a:0")
    a.world.die(a)
    await settle()
    assert not work.done()
    b.server._listener.end(link)
    with pytest.raises(PeerDiedError):
        await work
    assert not b.messenger.arriving


def stream(a, b):
    """Let the link from a to b be a stream whose end b notices, and return it."""
    link = a.known["b"].peers[0].link_identity
    b.server._listener.streams.add(link)
    return link


async def test_a_lost_connection_fails_what_it_was_carrying(pair):
    a, b = pair
    work = b.recv("a:0")
    Arriving(a, b).write(PIECE)
    b.messenger.link_lost(LINK, a.id)
    with pytest.raises(PeerDiedError):
        await work


async def test_a_sender_that_cannot_write_fails_the_receive(pair):
    a, b = pair
    work = b.recv("a:0")
    Arriving(a, b).write(0)
    with pytest.raises(ConnectionLostError, match="a:0"):
        await work


async def test_the_end_of_a_link_fails_what_it_was_carrying_even_if_the_head_is_silent(pair):
    a, b = pair
    work = b.recv("a:0")
    Arriving(a, b).write(PIECE)
    b.messenger.link_forgotten(LINK)
    with pytest.raises(PeerDiedError):
        await work


def test_reports_that_are_late_or_repeated_change_nothing():
    part, seen = ArrivingPart("x", "w", AuthenticatedParts([b"P", memoryview(bytearray(10))])), []
    part.written(4)
    part.follow(seen.append)
    part.written(2)
    part.written(4)
    part.written(99)
    part.written(10)
    assert part.done()
    assert seen[:4] == [4, 4, 4, 10]
    assert -1 in seen[4:]


@pytest.mark.parametrize("seed", range(40))
async def test_any_schedule_delivers_each_message_once(pair, seed):
    """Receives that time out, are repeated and meet the pieces at any moment: no message is lost, none comes twice."""
    a, b = pair
    chance = random.Random(seed)
    count, got, stop = 4, [], threading.Event()

    def take():
        while len(got) < count and not stop.is_set():
            target = torch.zeros(SIZE, dtype=torch.uint8)
            work = b.messenger.receive_into(WorkerAddress("a", 0), target)
            try:
                b.messenger.wait(work, chance.choice([0.0001, 0.001, 0.01, 5]))
            except CallTimeoutError:
                continue
            got.append(torch.equal(target, SOURCE))

    taking = asyncio.ensure_future(asyncio.to_thread(take))
    try:
        for number in range(1, count + 1):
            arriving = Arriving(a, b, number)
            for size in sorted(chance.sample(range(1, SIZE), 3)):
                await asyncio.sleep(chance.choice([0, 0, 0.001]))
                arriving.write(size)
            arriving.write(SIZE)
        await asyncio.wait_for(taking, 20)
    finally:
        stop.set()
    assert got == [True] * count
