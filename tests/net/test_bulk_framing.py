"""The bytes of bulk streams: layout, account of pieces, handshake, keys and nonces, and each kind of tampering."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk_framing import PIECE, TAG, BulkHandshake, Cipher, PieceHeader, Received

SESSION, SECRET = os.urandom(framing.SESSION), os.urandom(framing.SECRET)
A, B = os.urandom(framing.NONCE), os.urandom(framing.NONCE)


@given(st.lists(st.integers(0, 3 * PIECE), max_size=60))
def test_every_byte_of_every_part_is_in_one_piece(sizes):
    regions = framing.regions_of(sizes)
    placed = {index: size for region in regions for index, _, size in region.parts}
    assert {index: size for index, size in placed.items() if size} == {n: size for n, size in enumerate(sizes) if size}
    for region in regions:
        ends = 0
        for _, start, size in region.parts:
            assert start >= ends
            assert start % framing.ALIGN == 0
            ends = start + size
        assert ends == region.size
        assert region.size <= PIECE or len(region.parts) == 1
    pieces = list(framing.pieces_of(1, regions))
    assert sum(piece.size for piece in pieces) == sum(region.size for region in regions)
    assert all(0 < piece.size <= PIECE for piece in pieces)


@given(st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=8), st.randoms())
def test_pieces_in_any_order_complete_a_transfer_once(sizes, random):
    regions = framing.regions_of(sizes)
    pieces = list(framing.pieces_of(7, regions))
    random.shuffle(pieces)
    received = Received(regions)
    for piece in pieces:
        assert not received.complete
        received.add(piece)
        with pytest.raises(RemoteWireError):
            received.add(piece)
    assert received.complete


@pytest.mark.parametrize(
    "header",
    [
        PieceHeader(1, 1, 10, 0),
        PieceHeader(1, 0, PIECE, 5),
        PieceHeader(1, 0, PIECE, 4 * PIECE),
        PieceHeader(1, 0, PIECE - 1, 0),
        PieceHeader(1, 0, PIECE, PIECE),
    ],
)
def test_a_piece_outside_its_transfer_is_refused(header):
    with pytest.raises(RemoteWireError):
        Received(framing.regions_of([PIECE + 10])).check(header)


def test_a_header_announces_at_most_one_piece():
    for size in (0, PIECE + 1, 2**32 - 1):
        with pytest.raises(RemoteWireError):
            framing.decode_header(PieceHeader(1, 0, size, 0).encode())
    assert framing.decode_header(PieceHeader(1, 2, 3, 4).encode()) == (1, 2, 3, 4)


# --- the handshake ---


def test_both_ends_derive_the_same_keys_and_proofs():
    mine = BulkHandshake(SESSION, SECRET, A, B)
    assert framing.session_of(mine.hello()) == SESSION
    theirs = framing.accept(mine.hello(), SECRET, A)
    assert theirs.keys() == mine.keys()
    assert theirs.proof() == mine.proof()


def test_every_direction_and_connection_has_a_key_of_its_own():
    shakes = [
        BulkHandshake(SESSION, SECRET, A, B),
        BulkHandshake(SESSION, SECRET, B, A),
        BulkHandshake(SESSION, SECRET, A, os.urandom(framing.NONCE)),
        BulkHandshake(os.urandom(framing.SESSION), SECRET, A, B),
        BulkHandshake(SESSION, os.urandom(framing.SECRET), A, B),
    ]
    made = [value for shake in shakes for value in (*shake.keys(), shake.proof(), shake.hello())]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("at", range(framing.HELLO))
def test_a_hello_that_differs_in_one_byte_is_refused(at):
    hello = bytearray(BulkHandshake(SESSION, SECRET, A, B).hello())
    hello[at] ^= 1
    with pytest.raises(RemoteWireError):
        framing.accept(bytes(hello), SECRET, A)
    if at < len(framing.MAGIC):
        with pytest.raises(RemoteWireError):
            framing.session_of(bytes(hello))


def test_a_hello_of_another_connection_is_refused():
    with pytest.raises(RemoteWireError):
        framing.accept(BulkHandshake(SESSION, SECRET, A, B).hello(), SECRET, B)


# --- encryption ---


encrypted = pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="needs cryptography")


def sealed(cipher: Cipher, header: PieceHeader, data: bytes) -> bytearray:
    out = bytearray(len(data) + TAG)
    cipher.seal(header.encode(), data, memoryview(out))
    return out


def opened(cipher: Cipher, header: PieceHeader, data: bytearray) -> bytes:
    out = bytearray(len(data) - TAG)
    cipher.open(header.encode(), memoryview(data), memoryview(out))
    return bytes(out)


HEADERS = [PieceHeader(1, 0, 100, 0), PieceHeader(1, 1, 100, 0), PieceHeader(2, 0, 100, 0)]


def both() -> tuple[Cipher, Cipher]:
    key, _ = BulkHandshake(SESSION, SECRET, A, B).keys()
    return Cipher(key), Cipher(key)


@encrypted
def test_pieces_in_order_are_opened():
    mine, theirs = both()
    for header in HEADERS:
        data = os.urandom(100)
        piece = sealed(mine, header, data)
        assert data not in piece
        assert opened(theirs, header, piece) == data


@pytest.mark.parametrize("field", PieceHeader._fields)
@encrypted
def test_a_changed_header_field_is_noticed(field):
    mine, theirs = both()
    piece = sealed(mine, HEADERS[0], bytes(100))
    with pytest.raises(RemoteWireError):
        opened(theirs, HEADERS[0]._replace(**{field: getattr(HEADERS[0], field) + 1}), piece)


@pytest.mark.parametrize("at", [0, 50, 99, 100, 115])
@encrypted
def test_changed_bytes_and_tags_are_noticed(at):
    mine, theirs = both()
    piece = sealed(mine, HEADERS[0], bytes(100))
    piece[at] ^= 1
    with pytest.raises(RemoteWireError):
        opened(theirs, HEADERS[0], piece)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (0, 1, 0)], ids=["replay", "reorder", "left out", "old"])
@encrypted
def test_replay_reorder_and_truncation_are_noticed(order):
    mine, theirs = both()
    pieces = [sealed(mine, header, bytes(100)) for header in HEADERS]
    *before, last = order
    for number in before:
        opened(theirs, HEADERS[number], pieces[number])
    with pytest.raises(RemoteWireError):
        opened(theirs, HEADERS[last], pieces[last])


@encrypted
def test_a_piece_of_the_other_direction_or_connection_is_noticed():
    ours, theirs = BulkHandshake(SESSION, SECRET, A, B).keys()
    other, _ = BulkHandshake(SESSION, SECRET, A, os.urandom(framing.NONCE)).keys()
    for key in (theirs, other):
        with pytest.raises(RemoteWireError):
            opened(Cipher(ours), HEADERS[0], sealed(Cipher(key), HEADERS[0], bytes(100)))


@encrypted
def test_nonces_never_repeat():
    class Recorder:
        def __init__(self) -> None:
            self.nonces: list[bytes] = []

        def encrypt_into(self, nonce, data, header, out):
            self.nonces.append(nonce)

    cipher, recorder = Cipher(os.urandom(32)), Recorder()
    cipher._cipher = recorder
    for _ in range(1000):
        sealed(cipher, HEADERS[0], b"")
    assert len(set(recorder.nonces)) == 1000
    assert {len(nonce) for nonce in recorder.nonces} == {12}
