"""Encode and decode all control messages and their envelopes. Pure: no sockets, no time.

`wire.agent_messages` holds the messages of agentds and of sessions, `wire.node_questions` the questions that the head
forwards, `wire.client_messages` the others. A `Notice` has no reply; a `Request` has exactly one `Reply` or `Failed`.

House rules: a message is a frozen struct in one of these files and never carries user data. The size is limited before
decoding; msgspec validates every field and limits the nesting (by Python's recursion limit). Every fault is a
RemoteWireError, and a decoded message is well formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

import msgspec

from rlinf_actors.errors import RemoteWireError, UsageError
from rlinf_actors.wire.agent_messages import AgentMessage
from rlinf_actors.wire.bounds import Name, OfCluster, Text, too_long
from rlinf_actors.wire.client_messages import ClientMessage
from rlinf_actors.wire.node_questions import QuestionMessage
from rlinf_actors.wire.protocol import MALFORMED, MAX_CONTROL_BYTES, ControlMessage, checked

Body = Union[AgentMessage, ClientMessage, QuestionMessage]
"""Every control message."""


class Request(ControlMessage, frozen=True, tag="req"):
    id: int
    body: Body


class Reply(ControlMessage, frozen=True, tag="rep"):
    id: int
    body: Body


class Failed(ControlMessage, frozen=True, tag="err"):
    """Reply to a request that was refused or failed. `kind` decides the error class at the client (net.rpc.refusal).

    Attributes:
        kind: hello (send the hello first, then repeat the request), config, placement, timeout, name_in_use,
            hardware_in_use, not_found, unreachable, authentication, protocol, usage, node_lost, emergency_stop, or
            parts (send all parts of the launch again).
        text: what happened and what to do, for people.
        missing_ranks: for timeout, the ranks that no node has.
        path: for config, the place of the fault, such as the name of a variable.
    """

    id: int
    kind: Name
    text: Text
    missing_ranks: OfCluster[int] = []
    path: Text = ""


class Notice(ControlMessage, frozen=True, tag="not"):
    body: Body


Envelope = Union[Request, Reply, Failed, Notice]

_SHORTER = {
    "Launch": "environment variables (env_vars) count once for each worker: pass large data as arguments, which go "
    "straight to the workers, or launch fewer workers at a time",
    "AgentHello": "it tells of every worker of this node, with its environment variables: shorten those (env_vars)",
    "Handles": "it tells of every worker that this process has a handle of: shut down groups that are not needed",
    "Status": "ask for one job",
}
"""Advice, by message name, for messages whose length depends on the user's program."""


class TooLongError(UsageError):
    """A control message was not sent because it is longer than its receiver accepts."""


class BoundError(RemoteWireError):
    """A control message has a value that is longer than its bound in wire.bounds, or has too many bytes.

    Attributes:
        message: name of the message.
        request: number of the request, None for another message.
    """

    def __init__(self, text: str, message: str, request: int | None) -> None:
        super().__init__(text)
        self.message = message
        self.request = request


class _Tag(msgspec.Struct):
    type: Name = ""


class _Outline(msgspec.Struct):
    """What is read of a message that was not decoded."""

    type: Name = ""
    id: Union[int, None] = None
    body: msgspec.Raw = msgspec.Raw()


_encoder = msgspec.msgpack.Encoder()
_outline = msgspec.msgpack.Decoder(_Outline).decode
_tag = msgspec.msgpack.Decoder(_Tag).decode
_decode: Callable[[bytes | memoryview], Envelope] = checked(Envelope, "a control message")


def encode(envelope: Envelope, limit: int = MAX_CONTROL_BYTES) -> bytes:
    """Return an envelope as bytes.

    Raises:
        TooLongError: the result has more than *limit* bytes. The text says what to do.
    """
    data = _encoder.encode(envelope)
    if len(data) > limit:
        kind = type(getattr(envelope, "body", envelope)).__name__
        hint = f": {_SHORTER[kind]}" if kind in _SHORTER else ""
        raise TooLongError(f"a {kind} of {len(data):,} bytes is not sent: the limit is {limit:,}{hint}")
    return data


def decode(data: bytes | memoryview) -> Envelope:
    """Return the envelope in *data*.

    Raises:
        BoundError: a value or the whole message is too long. The sender can be told so.
        RemoteWireError: *data* is not a valid message.
    """
    if len(data) > MAX_CONTROL_BYTES:
        raise RemoteWireError(f"a control message of {len(data)} bytes; the limit is {MAX_CONTROL_BYTES}")
    try:
        return _decode(data)
    except RemoteWireError as error:
        _raise_if_bound(data, str(error))
        raise


def _raise_if_bound(data: bytes | memoryview, error: str) -> None:
    """Raise BoundError if the decoder's *error* about *data* says that a value is too long."""
    if " of length <= " not in error:
        return
    try:
        outline = _outline(data)
        message = _tag(outline.body).type if outline.body else outline.type
    except MALFORMED:
        return
    text = too_long(message or "message", error)
    if text is not None:
        raise BoundError(text, message, outline.id if outline.type == "req" else None) from None


def verb_of(data: bytes) -> bytes:
    """Return the tag of the message in an envelope that `encode` has made; b"" if there is none. Nothing is decoded."""
    at = data.find(_BODY, 0, _BEFORE_BODY)
    if at < 0 or len(data) <= at + 12 or data[at + 6 : at + 11] != _TYPE:
        return b""
    return data[at + 12 : at + 12 + (data[at + 11] & 0x1F)]


_BODY, _TYPE = b"\xa4body", b"\xa4type"
_BEFORE_BODY = 40
"""Bytes of an envelope in which `body` begins: its tag and number have at most 32."""


def number_of(data: bytes | memoryview) -> int | None:
    """Return the number of the request in *data*, None if *data* is not a request. Its body is not read.

    *data* is an envelope that `encode` has made, which has the body last.
    """
    head = bytes(data[: _BEFORE_BODY + len(_BODY)])
    at = head.find(_BODY)
    if at < 1:
        return None
    try:
        outline = _outline(bytes([head[0] - 1]) + head[1:at])  # a map with one entry less
    except (*MALFORMED, ValueError):
        return None
    return outline.id if outline.type == "req" else None
