"""The bytes of bulk streams: handshake, keys, pieces, and how a message's large parts are laid out in them. Pure.

`net.bulk` describes bulk streams as a whole. A stream is a TCP connection that carries *pieces* in both directions. A
piece is a header, up to PIECE bytes of one region of one transfer and, if the job has keys, an authentication tag. The
header is authenticated with the bytes, and the nonce is the number of the piece in its direction of its connection.
So a piece that was changed, repeated, reordered or left out, or that is of another connection, does not decrypt.

Each direction of each connection has a key of its own, made from the secret of the session and from random bytes of
both ends. So no nonce is ever used twice with one key.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlinf_actors.errors import RemoteWireError

PIECE = 1 << 20
"""Most bytes of a piece. Pieces of 1 MiB stay in the processor's cache between two steps (measured)."""
TAG = 16
"""Bytes of AES-GCM's authentication tag."""
NONCE = 16
"""Bytes of the random numbers that both ends of a connection contribute."""
SECRET = 32
"""Bytes of a session's secret."""
SESSION = 16
"""Bytes of a session's id."""
MAGIC = b"RAB1"
"""First bytes that a connecting process sends."""
ALIGN = 64
"""The parts that share a region begin at multiples of this many bytes, as numpy and torch want them."""

_HEADER = struct.Struct("<QIIQ")
_HELLO = struct.Struct("<4s16s16s32s")  # MAGIC, SESSION, NONCE, PROOF
HEADER = _HEADER.size
HELLO = _HELLO.size
PROOF = 32
"""Bytes of the proof by which the listening process answers a Hello."""


class PieceHeader(NamedTuple):
    """Says where the bytes of a piece belong.

    Attributes:
        transfer: number of the transfer on its link and in its direction.
        region: number of the region in the transfer (`regions_of`).
        size: number of bytes, at most PIECE.
        offset: place of the first byte in the region.
    """

    transfer: int
    region: int
    size: int
    offset: int

    def encode(self) -> bytes:
        return _HEADER.pack(*self)


def decode_header(data: bytes | bytearray | memoryview) -> PieceHeader:
    """Return the header in *data*. Raises RemoteWireError if the header announces no bytes, or more than PIECE."""
    header = PieceHeader(*_HEADER.unpack(data))
    if not 0 < header.size <= PIECE:
        raise RemoteWireError(f"a piece of {header.size} bytes")
    return header


# --- the layout of a transfer ---


@dataclass(frozen=True)
class Region:
    """Contiguous memory of the receiver, for one large part or for several small ones.

    Attributes:
        size: size in bytes.
        parts: (index of the part, offset in the region, size in bytes) of each part.
    """

    size: int
    parts: tuple[tuple[int, int, int], ...]


def regions_of(sizes: Sequence[int]) -> list[Region]:
    """Return the regions of a transfer of parts with these sizes. Sender and receiver compute the same.

    A part of PIECE bytes or more has a region of its own. Smaller parts share regions of at most PIECE bytes, so that
    hundreds of small tensors travel in few pieces, and a tensor that is kept keeps little more than its own memory.
    """
    regions: list[Region] = []
    shared: list[tuple[int, int, int]] = []
    end = 0
    for index, size in enumerate(sizes):
        if size >= PIECE:
            regions.append(Region(size, ((index, 0, size),)))
            continue
        start = -(-end // ALIGN) * ALIGN
        if shared and start + size > PIECE:
            regions.append(Region(end, tuple(shared)))
            shared, start = [], 0
        shared.append((index, start, size))
        end = start + size
    if shared and end:
        regions.append(Region(end, tuple(shared)))
    return regions


def pieces_of(transfer: int, regions: Sequence[Region]) -> Iterator[PieceHeader]:
    """Return the headers of all pieces of a transfer with these regions, in order."""
    for number, region in enumerate(regions):
        for offset in range(0, region.size, PIECE):
            yield PieceHeader(transfer, number, min(PIECE, region.size - offset), offset)


class Received:
    """Keeps account of the pieces of one transfer that have arrived. Not thread-safe."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        # a byte for each piece: a short message may announce as many pieces as the machine's memory has
        self._missing = [bytearray(b"\1") * -(-region.size // PIECE) for region in regions]
        self._left = sum(map(len, self._missing))

    @property
    def complete(self) -> bool:
        return not self._left

    def check(self, header: PieceHeader) -> None:
        """Raise RemoteWireError unless *header* is that of a piece that is still missing."""
        number, rest = divmod(header.offset, PIECE)
        missing = self._missing[header.region] if header.region < len(self._missing) else b""
        if rest or number >= len(missing) or not missing[number]:
            raise RemoteWireError(f"a piece that came before, or that is outside its transfer: {header}")
        size = self._regions[header.region].size
        if header.size != min(PIECE, size - header.offset):
            raise RemoteWireError(f"a piece of the wrong size: {header}")

    def add(self, header: PieceHeader) -> None:
        """Note that the piece has arrived. Raises RemoteWireError if it has arrived before."""
        self.check(header)
        self._missing[header.region][header.offset // PIECE] = 0
        self._left -= 1


# --- the handshake ---


class BulkHandshake(NamedTuple):
    """The values that both ends of one connection know before the first piece.

    Attributes:
        session: id of the session.
        secret: secret of the session, which only its two processes know.
        accepting: random bytes of the process that listens.
        connecting: random bytes of the process that connects.
    """

    session: bytes
    secret: bytes
    accepting: bytes
    connecting: bytes

    def _derive(self, label: bytes) -> bytes:
        values = self.session + self.accepting + self.connecting
        return hmac.digest(self.secret, b"\0".join((MAGIC, label, values)), hashlib.sha256)

    def hello(self) -> bytes:
        """Return the bytes by which the connecting process proves that it knows the secret."""
        return _HELLO.pack(MAGIC, self.session, self.connecting, self._derive(b"connecting"))

    def proof(self) -> bytes:
        """Return the bytes by which the listening process proves that it knows the secret."""
        return self._derive(b"accepting")

    def keys(self) -> tuple[bytes, bytes]:
        """Return the key of the pieces that the connecting process sends, and of those that the listening one sends."""
        return self._derive(b"key of connecting"), self._derive(b"key of accepting")


def session_of(hello: bytes) -> bytes:
    """Return the id of the session that the sender of *hello* claims. Raises RemoteWireError if it is no Hello."""
    magic, session, _, _ = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise RemoteWireError("the peer speaks another protocol")
    return bytes(session)


def accept(hello: bytes, secret: bytes, accepting: bytes) -> BulkHandshake:
    """Return the handshake of a connection whose peer has sent *hello*.

    *accepting* are the random bytes that were sent to the peer before. Raises RemoteWireError if the peer does not
    know *secret*.
    """
    _, session, connecting, _ = _HELLO.unpack(hello)
    handshake = BulkHandshake(session, secret, accepting, connecting)
    if not hmac.compare_digest(handshake.hello(), bytes(hello)):
        raise RemoteWireError("the peer does not know the secret of its session")
    return handshake


# --- encryption ---


class Cipher:
    """Encrypts or decrypts the pieces of one direction of one connection, in order, with AES-256-GCM.

    One thread at a time. The nonce is the number of the piece; a Cipher is never copied or reset.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher: Any = AESGCM(key)
        self._number = 0

    def _nonce(self) -> bytes:
        number, self._number = self._number, self._number + 1
        return number.to_bytes(12, "big")

    def seal(self, header: bytes, data: Any, out: memoryview) -> None:
        """Encrypt the bytes of a piece into *out*, which has the size of *data* and TAG bytes more."""
        self._cipher.encrypt_into(self._nonce(), data, header, out)

    def open(self, header: bytes, sealed: memoryview, out: memoryview) -> None:
        """Decrypt a piece into *out*. Raises RemoteWireError if the piece is not the next one that the peer sealed."""
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(self._nonce(), sealed, header, out)
        except InvalidTag:
            raise RemoteWireError("a piece was changed, repeated, reordered or left out on its way") from None
