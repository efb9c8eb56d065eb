"""Framing: several messages for one peer become one ZeroMQ message, a chunk. Pure.

A chunk is [records, big frame, big frame, ...]. *records* is a MessagePack array with one [header, part, ...] for each
message. A small part is there as its bytes; a large part is a big frame, and its index is there instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.descriptors import descriptor_of

BIG = 16 << 10
"""Size in bytes from which a part travels as a frame of its own, without a copy (measured: faster from 16 KiB on)."""
FULL = 1 << 20
"""Bytes of records after which a chunk takes no further message, so that no chunk is longer than the receiving socket
accepts."""
MESSAGES = 1 << 16
"""Most messages in a chunk. An empty message takes 1 to 3 bytes on the wire, and a hundred in the receiver's memory."""

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Annotated[list[list[bytes | int]], msgspec.Meta(max_length=MESSAGES)]).decode


def pack(messages: Sequence[tuple[bytes, Sequence[Buffer]]], start: int = 0) -> tuple[bytes, list[Buffer], int]:
    """Pack messages, each a header and its parts, into one chunk.

    Args:
        messages: the messages to one peer, in order.
        start: index of the first message to pack.

    Returns:
        The records, the big frames, and the index of the first message that did not fit into the chunk.
    """
    big: list[Buffer] = []
    rows: list[list[Buffer | int]] = []
    size = 0
    for header, parts in messages[start : start + MESSAGES] if start or len(messages) > MESSAGES else messages:
        row: list[Buffer | int] = [header]
        size += len(header)
        for part in parts:
            plain = type(part) is bytes
            length = len(part) if plain else memoryview(part).nbytes
            if length >= BIG or (not length and not plain and descriptor_of(part) is not None):
                row.append(len(big))
                big.append(part)
            else:
                row.append(part)
                size += length
        rows.append(row)
        if size >= FULL:
            break
    return encode(rows), big, start + len(rows)


def unpack(records: Buffer, big: Sequence[Buffer]) -> list[tuple[bytes, list[Buffer]]]:
    """Return the messages of a received chunk in order, each as its header and parts.

    Raises:
        RemoteWireError: the chunk is malformed.
    """
    try:
        rows: list[list[Any]] = _decode(records)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteWireError(f"{len(records)} bytes are not a chunk: {error}") from None
    messages: list[tuple[bytes, list[Buffer]]] = []
    for row in rows:
        header = row.pop(0) if row else 0
        if type(header) is not bytes:
            raise RemoteWireError("a message of a chunk has no header")
        for n, part in enumerate(row):
            if type(part) is not bytes:
                if not 0 <= part < len(big):
                    raise RemoteWireError("a message of a chunk names frames that it does not have")
                row[n] = big[part]
        messages.append((header, row))
    return messages


def headers(records: bytes | memoryview) -> Iterator[bytes | memoryview]:
    """Return the messages of a chunk one after the other, if they have no parts, as those of the control plane.

    A message is read when it is taken: a chunk of 65,536 messages takes 30 ms, and its messages a hundred times the
    bytes of the chunk. Those of a memoryview are views of it, so a message of 8 MiB is not copied before its turn.

    Raises:
        RemoteWireError: the chunk is malformed from here on, or a message has parts.
    """
    count, at = _array(records)
    if count > MESSAGES:
        raise RemoteWireError(f"a chunk of {count} messages; the limit is {MESSAGES}")
    for _ in range(count):
        if records[at : at + 1] != b"\x91":
            raise RemoteWireError("a message of a chunk is not one header")
        width = _LENGTHS.get(records[at + 1] if at + 1 < len(records) else 0, 0)
        start = at + 2 + width
        at = start + int.from_bytes(records[at + 2 : start], "big")
        if not width or at > len(records):
            raise RemoteWireError("a message of a chunk is cut, or has no header")
        yield records[start:at]
    if at != len(records):
        raise RemoteWireError("bytes follow the messages of a chunk")


def only_header(records: bytes) -> bytes | None:
    """Return the message of a chunk that has one short message without parts; None for any other chunk."""
    if records[:3] == b"\x91\x91\xc4" and len(records) > 3 and len(records) == 4 + records[3]:
        return records[4:]
    return None


_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""Bytes of the length, by MessagePack's formats of binary data."""
_ARRAYS = {0xDC: 2, 0xDD: 4}


def _array(records: bytes | memoryview) -> tuple[int, int]:
    """Return the length of the array at the begin of *records*, and where its first element begins."""
    first = records[0] if len(records) else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F, 1
    end = 1 + _ARRAYS.get(first, 0)
    if first not in _ARRAYS or end > len(records):
        raise RemoteWireError(f"{len(records)} bytes are not a chunk")
    return int.from_bytes(records[1:end], "big"), end
