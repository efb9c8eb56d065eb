"""Framing: several messages for one peer become one ZeroMQ message, a chunk. Pure.

A chunk is [records, big frame, big frame, ...]. *records* is a MessagePack array with one [header, part, ...] for each
message. A small part is there as its bytes; a large part is a big frame, and its index is there instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

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

_encode = msgspec.msgpack.Encoder().encode
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
            length = len(part) if type(part) is bytes else memoryview(part).nbytes
            if length >= BIG or (not length and descriptor_of(part) is not None):
                row.append(len(big))
                big.append(part)
            else:
                row.append(part)
                size += length
        rows.append(row)
        if size >= FULL:
            break
    return _encode(rows), big, start + len(rows)


def unpack(records: Buffer, big: Sequence[Buffer]) -> list[tuple[bytes, list[Buffer]]]:
    """Return the messages of a received chunk in order, each as its header and parts.

    Raises:
        RemoteWireError: the chunk is malformed.
    """
    try:
        rows = _decode(records)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteWireError(f"{len(records)} bytes are not a chunk: {error}") from None
    messages: list[tuple[bytes, list[Buffer]]] = []
    for row in rows:
        header = row[0] if row else 0
        if type(header) is not bytes:
            raise RemoteWireError("a message of a chunk has no header")
        parts: list[Buffer] = row[1:]
        for n, part in enumerate(parts):
            if type(part) is not bytes:
                if not 0 <= part < len(big):  # type: ignore[operator]
                    raise RemoteWireError("a message of a chunk names frames that it does not have")
                parts[n] = big[part]  # type: ignore[call-overload]
        messages.append((header, parts))
    return messages
