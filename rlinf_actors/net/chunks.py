"""What leaves a ZeroMQ socket for one peer at one time: several messages in one. Pure.

A chunk is [records, big frame, big frame, ...]; records is a MessagePack array with one
[header, part, ...] per message, a part being its bytes or the index of a big frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import msgspec

from rlinf_actors.model.buffers import Buffer

log = logging.getLogger(__name__)

BIG = 16 << 10
"""Parts of this size and more travel as frames of their own, without a copy (measured: pays from 16 KiB)."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[list[bytes | int]]).decode


def pack(messages: Sequence[tuple[bytes, Sequence[Buffer]]]) -> tuple[bytes, list[Buffer]]:
    """The records and the big frames of *messages*, which are headers with their parts."""
    big: list[Buffer] = []
    rows: list[list[Buffer | int]] = []
    for header, parts in messages:
        row: list[Buffer | int] = [header]
        for part in parts:
            if len(part) >= BIG if type(part) is bytes else memoryview(part).nbytes >= BIG:
                row.append(len(big))
                big.append(part)
            else:
                row.append(part)
        rows.append(row)
    return _encode(rows), big


def unpack(peer: bytes, records: bytes, big: list[Buffer]) -> Iterator[tuple[bytes, list[Buffer]]]:
    """The messages of a chunk that *peer* sent, in order. What is none is dropped, with a line in the log."""
    try:
        rows = _decode(records)
    except (msgspec.DecodeError, RecursionError):
        log.warning("dropped %d bytes from %r that are not a chunk", len(records), peer)
        return
    for row in rows:
        try:
            header = row[0]
            parts: list[Buffer] = [big[p] if type(p) is int else p for p in row[1:]]  # type: ignore[misc]
        except IndexError:
            log.warning("dropped a message from %r that names frames it does not have", peer)
            continue
        if type(header) is not bytes:
            log.warning("dropped a message from %r without a header", peer)
            continue
        yield header, parts
