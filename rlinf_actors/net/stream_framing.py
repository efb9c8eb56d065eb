"""Chunks (`net.framing`) on a stream of bytes. Pure.

A chunk is a prefix, the lengths of its big frames, its records, and its big frames.

A descriptor that travels beside the bytes (`net.descriptors`) is a big frame of length 0. No other big frame is empty.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterable, Iterator, Sequence

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.framing import BIG, encode

_PREFIX = struct.Struct("<BII")  # MARK, length of the records, number of big frames
MARK = 0xC5
"""First byte of each chunk, so that bytes which are none are soon noticed."""

Chunk = tuple[Buffer, list[Buffer]]
"""Records and big frames of a chunk."""


def prefix(records: bytes, big: Sequence[memoryview]) -> bytes:
    """Return the bytes that go before *records* and the big frames, which are one-dimensional."""
    if not big:
        return _PREFIX.pack(MARK, len(records), 0)
    return _PREFIX.pack(MARK, len(records), len(big)) + struct.pack(f"<{len(big)}Q", *map(len, big))


def small(header: bytes, parts: Sequence[Buffer]) -> bytes | None:
    """Return the chunk with one message alone, if all of its parts are small bytes; else None. The usual case, fast."""
    size = len(header)
    for part in parts:
        if type(part) is not bytes:
            return None
        size += len(part)
    if size >= BIG:
        return None
    records = encode([[header, *parts]])
    return _PREFIX.pack(MARK, len(records), 0) + records


class ChunkReader:
    """Finds the chunks in the bytes that arrive on one stream.

    Large frames are allocated one after the other, when their first byte can arrive, and received in place (`place`,
    `filled`). What has arrived of anything else is kept until it is complete.

    Args:
        most: most bytes of a chunk. May be changed; it counts for the chunks whose prefix has not been read.

    Attributes:
        place: where the next bytes of the stream belong. None if they go to `feed`. Only this class changes it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = bytearray()
        self._needed = 0  # bytes to hold before it can go on
        self._records: Buffer = b""
        self._frames: list[Buffer] | None = None  # of the chunk that is being received
        self._lengths: collections.deque[int] = collections.deque()
        self.place: memoryview | None = None

    @property
    def held(self) -> int:
        """Number of bytes that wait for the rest of their chunk."""
        return len(self._held)

    def filled(self, size: int) -> Iterable[Chunk]:
        """Note that *size* bytes were received into `place`. Return the chunk that they complete, if they do."""
        place = self.place
        assert place is not None
        self.place = place[size:] if size < len(place) else None
        return self.feed(b"")

    def feed(self, data: bytes) -> Iterable[Chunk]:
        """Return the chunks that *data*, the next bytes of the stream, completes.

        They must be used up. A chunk's successor is read when the chunk has been handled, under `most` as it is
        then.

        Raises:
            RemoteWireError: the bytes are no chunk, or one of more than `most` bytes. The stream is of no further use.
        """
        if not self._held and self._frames is None and len(data) > _PREFIX.size:
            mark, length, count = _PREFIX.unpack_from(data)
            if mark == MARK and not count and len(data) == _PREFIX.size + length <= self.most:
                return ((data[_PREFIX.size :], []),)  # one small chunk, as is usual
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[Chunk]:
        stream: Buffer = data
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return
            stream, self._held = self._held, bytearray()
        at, end = 0, len(stream)
        while True:
            if self._frames is not None:
                at = self._fill(stream, at)
                if self.place is not None:
                    return
                records, frames, self._records, self._frames = self._records, self._frames, b"", None
                yield records, frames
            if end - at < _PREFIX.size:
                self._needed = _PREFIX.size
                break
            mark, length, count = _PREFIX.unpack_from(stream, at)
            body = at + _PREFIX.size + 8 * count
            if mark != MARK or body - at + length > self.most:
                raise RemoteWireError(
                    f"{bytes(stream[at : at + 9]).hex()} begins no chunk of at most {self.most} bytes"
                )
            if end < body + length:
                self._needed = body + length - at
                break
            records = stream[body : body + length]
            if not count:
                at = body + length
                yield records, []
                continue
            lengths = struct.unpack_from(f"<{count}Q", stream, at + _PREFIX.size)
            if body - at + length + sum(lengths) > self.most:
                raise RemoteWireError(f"a chunk of {sum(lengths)} bytes is longer than {self.most} bytes")
            self._records, self._frames, self._lengths = records, [], collections.deque(lengths)
            at = body + length
        if at < end:
            self._held += stream[at:]

    def _fill(self, stream: Buffer, at: int) -> int:
        """Copy bytes of *stream* from the index *at* into the big frames. Return the index of the rest."""
        frames, view = self._frames, memoryview(stream)
        assert frames is not None
        while self.place is not None or self._lengths:
            if self.place is None:
                self.place = memoryview(bytearray(self._lengths.popleft()))
                frames.append(self.place)
            size = min(len(self.place), len(view) - at)
            self.place[:size] = view[at : at + size]
            at += size
            if size < len(self.place):
                self.place = self.place[size:]
                break
            self.place = None
        return at
