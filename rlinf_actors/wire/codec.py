"""Control messages to bytes and back. Pure: no sockets, no time.

Size is limited before decoding; msgspec validates every field and bounds the nesting (Python's
recursion limit, raised as RecursionError). Anything wrong is a RemoteWireError, nothing else.
"""

from __future__ import annotations

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire.malformed import MALFORMED
from rlinf_actors.wire.messages import Envelope

MAX_CONTROL_BYTES = 16 << 20
"""A launch of 10,000 workers with 1 KiB of environment each is 10 MiB."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """One envelope as bytes."""
    return _encoder.encode(envelope)


def decode(data: bytes | memoryview) -> Envelope:
    """The envelope in *data*.

    Raises:
        RemoteWireError: *data* is too long, not MessagePack, or not a known message.
    """
    if len(data) > MAX_CONTROL_BYTES:
        raise RemoteWireError(f"a control message of {len(data)} bytes; the limit is {MAX_CONTROL_BYTES}")
    try:
        return _decoder.decode(data)
    except MALFORMED as error:
        raise RemoteWireError(f"not a control message: {error}") from None
