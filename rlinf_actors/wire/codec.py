"""Control messages to bytes and back. Pure: no sockets, no time.

Size is limited before decoding; msgspec validates every field and bounds the nesting (Python's
recursion limit, raised as RecursionError). Anything wrong is a RemoteWireError, nothing else.
"""

from __future__ import annotations

import msgspec

from rlinf_actors.errors import RemoteWireError, UsageError
from rlinf_actors.wire.bounds import MAX_CONTROL_BYTES
from rlinf_actors.wire.malformed import MALFORMED
from rlinf_actors.wire.messages import Envelope

_SHORTER = {
    "Launch": "environment variables (env_vars) count once for each worker: pass large data as arguments, which go "
    "straight to the workers, or launch fewer workers at a time",
    "AgentHello": "it tells of every worker of this node, with its environment variables: shorten those (env_vars)",
    "Handles": "it tells of every worker that this process has a handle of: shut down groups that are not needed",
    "Status": "ask for one namespace",
}
"""What to do about messages that grow with what users do."""


class TooLongError(UsageError):
    """A control message is longer than its receiver takes: it was not sent."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope, limit: int = MAX_CONTROL_BYTES) -> bytes:
    """One envelope as bytes.

    Raises:
        TooLongError: they are more than *limit*; says of what, and what to do.
    """
    data = _encoder.encode(envelope)
    if len(data) > limit:
        kind = type(getattr(envelope, "body", envelope)).__name__
        hint = f": {_SHORTER[kind]}" if kind in _SHORTER else ""
        raise TooLongError(f"a {kind} of {len(data):,} bytes is not sent: the limit is {limit:,}{hint}")
    return data


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
