"""Lending between the two ends of a connection, with a queue instead of the connection."""

from __future__ import annotations

import sys

import msgspec
import pytest
from msgspec.structs import replace

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.buffer_lending import MARK, Lending
from rlinf_actors.net.shared_memory import SHARED_FROM, Arena
from rlinf_actors.wire import frames

LARGE = bytes(range(256)) * (SHARED_FROM // 256)


class Pair:
    """Two ends, and the frames on their way between them."""

    def __init__(self, near: Arena | None, far: Arena | None) -> None:
        self.soon: list = []
        self.said: list = []
        self.near = Lending(near, self.soon.append, lambda frame, parts=(): self._say("near", frame), "far")
        self.far = Lending(far, self.soon.append, lambda frame, parts=(): self._say("far", frame), "near")

    def _say(self, end, frame):
        self.said.append((end, frame))

    def settle(self):
        while self.soon or self.said:
            while self.soon:
                self.soon.pop(0)()
            for end, frame in self.said[:]:
                self.said.remove((end, frame))
                to = self.far if end == "near" else self.near
                to.heard(frame) if isinstance(frame, frames.Memory) else to.dropped(frame)


@pytest.fixture
def arenas():
    made = [Arena(8 << 20), Arena(8 << 20)]
    yield made
    for arena in made:
        arena.close()


@pytest.fixture
def pair(arenas):
    made = Pair(*arenas)
    made.near.offer()
    made.settle()
    return made


def test_large_parts_are_lent_and_small_ones_sent(pair):
    header, sent = pair.near.pack(b"header", [b"small", LARGE, b"other"])
    assert header[:1] == MARK
    assert sent == [b"small", b"", b"other"]
    received = list(sent)
    assert pair.far.unpack(header, received) == b"header"
    assert [bytes(part) for part in received] == [b"small", LARGE, b"other"]


def test_both_ends_lend(pair):
    header, sent = pair.far.pack(b"header", [b"", LARGE])
    received = list(sent)
    assert pair.near.unpack(header, received) == b"header"
    assert bytes(received[1]) == LARGE


def test_the_lease_ends_with_the_last_view(pair, arenas):
    header, sent = pair.near.pack(b"header", [b"", LARGE])
    received = list(sent)
    pair.far.unpack(header, received)
    view = received.pop()[100:200]
    pair.settle()
    assert pair.near.lent_bytes == len(LARGE)
    del view
    pair.settle()
    assert pair.near.lent_bytes == 0
    assert arenas[0].used == 0


def test_a_block_is_lent_without_a_copy(pair, arenas):
    block = arenas[0].store(LARGE)
    for _ in range(3):
        pair.near.pack(b"header", [b"", block], alone=False)
    assert arenas[0].used == len(LARGE)


def test_borrowed_parts_are_copied_before_they_are_lent_on(pair, arenas):
    header, sent = pair.near.pack(b"header", [b"", LARGE])
    received = list(sent)
    pair.far.unpack(header, received)
    header, back = pair.far.pack(b"header", received)
    assert back == [b"", b""]
    assert arenas[1].used == len(LARGE)


def test_parts_are_sent_until_the_other_end_has_opened_the_memory(arenas):
    pair = Pair(*arenas)
    assert pair.near.pack(b"header", [b"", LARGE]) == (b"header", [b"", LARGE])
    pair.near.offer()
    assert pair.near.pack(b"header", [b"", LARGE]) == (b"header", [b"", LARGE])


def test_part_is_sent_if_the_arena_is_full(pair, arenas):
    rest = [arenas[0].store(bytes(1 << 20)) for _ in range(8)]
    assert pair.near.pack(b"header", [b"", LARGE]) == (b"header", [b"", LARGE])
    rest.pop()
    header, sent = pair.near.pack(b"header", [b"", LARGE, bytes(2 << 20)])
    assert header[:1] == MARK
    assert [len(part) for part in sent] == [0, 0, 2 << 20]


@pytest.mark.parametrize("missing", ["near", "far"])
def test_without_an_arena_at_one_end_all_parts_are_sent(arenas, missing):
    pair = Pair(None if missing == "near" else arenas[0], None if missing == "far" else arenas[1])
    pair.near.offer()
    pair.settle()
    for end in (pair.near, pair.far):
        assert end.pack(b"header", [b"", LARGE]) == (b"header", [b"", LARGE])


@pytest.mark.parametrize("whose", ["near", "far", "both"])
def test_memory_that_cannot_be_opened_is_requested_once(arenas, whose):
    for arena, name in zip(arenas, ("near", "far"), strict=True):
        if whose in (name, "both"):
            arena.offer = replace(arena.offer, fd=987654)
    pair = Pair(*arenas)
    pair.near.offer()
    pair.settle()  # ends: no end repeats its request
    lends = [end.pack(b"header", [b"", LARGE])[0] != b"header" for end in (pair.near, pair.far)]
    assert lends == [whose == "far", whose == "near"]


def test_close_frees_the_blocks_lent_to_the_other_end(pair, arenas):
    pair.near.pack(b"header", [b"", LARGE])
    pair.near.close()
    assert arenas[0].used == 0
    assert pair.near.pack(b"header", [b"", LARGE]) == (b"header", [b"", LARGE])


def test_blocks_lent_on_a_lost_connection_are_kept_until_the_borrower_has_ended(pair, arenas):
    header, sent = pair.near.pack(b"header", [b"", LARGE])
    received = list(sent)
    pair.far.unpack(header, received)
    earlier = pair.near
    for _ in range(2):  # the second one's connection is lost too
        later = Lending(arenas[0], pair.soon.append, lambda *_: None, "far")
        earlier.close(lost=True)
        later.succeed(earlier)
        earlier = later
    while arenas[0].store(bytes(len(LARGE))) is not None and arenas[0].stores < 100:
        pass
    assert bytes(received[1]) == LARGE
    assert arenas[0].used == len(LARGE)
    earlier.borrower_gone()
    assert arenas[0].used == 0
    received.clear()


def test_views_outlive_the_connection(pair):
    header, sent = pair.near.pack(b"header", [b"", LARGE])
    received = list(sent)
    pair.far.unpack(header, received)
    pair.far.close()
    pair.near.close()
    assert bytes(received[1]) == LARGE
    received.clear()
    pair.settle()


@pytest.mark.parametrize(
    "rows",
    [[(5, 1, 0, 10)], [(0, 1, 1 << 40, 10)], [(0, 1, -5, 10)], [(0, 1, 0, 0)], "nothing of the kind", [(0, "a", 0, 1)]],
)
def test_malformed_leases_are_refused(pair, rows):
    header = MARK + msgspec.msgpack.encode((True, False, rows, b"header"))
    with pytest.raises(RemoteWireError, match="lent parts"):
        pair.far.unpack(header, [b""])


def test_leases_of_memory_that_was_never_opened_are_refused(arenas):
    pair = Pair(*arenas)
    header = MARK + msgspec.msgpack.encode((True, False, [(0, 1, 0, 10)], b"header"))
    with pytest.raises(RemoteWireError, match="never opened"):
        pair.far.unpack(header, [b""])


def test_headers_without_leases_pass_unchanged(pair):
    assert pair.far.unpack(b"\x93abc", []) == b"\x93abc"
    assert pair.far.unpack(b"", []) == b""


def test_a_connection_that_lends_nothing_keeps_little(arenas):
    """A driver has one for each of 10,000 ranks, most of them on other machines."""
    before = sys.getallocatedblocks()
    made = [Lending(arenas[0], print, print, "far") for _ in range(1000)]
    assert sys.getallocatedblocks() - before < 8 * len(made)
