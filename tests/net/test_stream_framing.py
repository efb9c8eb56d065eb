"""Chunks on a stream of bytes, however the bytes are cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net.stream_framing import MARK, ChunkReader, prefix

MOST = 1 << 22


def stream(chunks: list[tuple[bytes, list[bytes]]]) -> bytes:
    return b"".join(prefix(records, list(map(memoryview, big))) + records + b"".join(big) for records, big in chunks)


def received(reader: ChunkReader, data: bytes, sizes) -> list[tuple[bytes, list[bytes]]]:
    """The chunks in *data*, which arrives in pieces of *sizes*; into a large frame as a socket does it."""
    found, at = [], 0
    while at < len(data):
        size = next(sizes)
        place = reader.place
        if place is not None:
            size = min(size, len(place), len(data) - at)
            place[:size] = data[at : at + size]
            chunks = reader.filled(size)
        else:
            chunks = reader.feed(data[at : at + size])
        at += size
        found += [(bytes(records), [bytes(part) for part in big]) for records, big in chunks]
    return found


CHUNKS = [(b"one", []), (b"", []), (b"two", [b"x" * 40_000, b"", b"y" * 20_000]), (b"r" * 100_000, [b"z"]), (b"e", [])]
SHORT = [(b"one", []), (b"", []), (b"two", [b"x" * 4_000, b"", b"y" * 2_000]), (b"e", [])]
"""For pieces of some bytes each."""


@given(seed=st.integers(0, 1 << 32), largest=st.sampled_from([1, 7, 100, 5_000, 1 << 20]))
def test_any_cut_gives_the_same_chunks(seed: int, largest: int) -> None:
    choose = random.Random(seed)
    sizes = iter(lambda: choose.randint(1, largest), 0)
    chunks = CHUNKS[2:] if largest > 7 else SHORT
    assert received(ChunkReader(MOST), stream(chunks), sizes) == chunks


def test_large_frames_are_received_in_place() -> None:
    reader = ChunkReader(MOST)
    assert list(reader.feed(stream([(b"h", [bytes(100_000)])])[:500])) == []
    place = reader.place
    assert place is not None
    assert len(place) > 99_000
    (chunk,) = reader.filled(len(place))
    assert len(chunk[1][0]) == 100_000
    assert reader.place is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        bytes(9),
        bytes([MARK]) + (1 << 31).to_bytes(4, "little") + bytes(4),
        bytes([MARK]) + bytes(4) + (1 << 31).to_bytes(4, "little"),
        bytes([MARK]) + bytes(4) + (1).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little"),
        prefix(b"", [memoryview(b"x")] * 2)[:9] + ((1 << 64) - 1).to_bytes(8, "little") * 2,
    ],
    ids=["HTTP", "zeros", "2 GiB of records", "2^31 frames", "a frame of 2^62 bytes", "lengths that overflow"],
)
def test_bytes_that_are_no_chunk_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteWireError):
        list(ChunkReader(MOST).feed(data))


def test_limit_counts_from_the_next_chunk() -> None:
    reader = ChunkReader(100)
    chunks = reader.feed(stream([(b"join", []), (b"x" * 1000, [])]))
    assert next(chunks)[0] == b"join"
    reader.most = MOST  # as the handler of the first may do
    assert len(next(chunks)[0]) == 1000
    assert list(chunks) == []


def test_records_of_many_reads_are_joined_once() -> None:
    """Not at each read, which would copy a long header again and again."""
    reader, data = ChunkReader(1 << 30), stream([(bytes(1 << 24), [])])
    for at in range(0, len(data) - 4096, 4096):
        assert list(reader.feed(data[at : at + 4096])) == []
        assert reader.held == at + 4096
