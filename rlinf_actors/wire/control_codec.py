"""Encode and decode all control messages and their envelopes. Pure: no sockets, no time.

`wire.agent_messages` holds the messages of agentds and of sessions, `wire.client_messages` the others. A `Notice` has
no reply; a `Request` has exactly one `Reply` or `Failed`.

House rules: a message is a frozen struct in one of these files and never carries user data. The size is limited before
decoding; msgspec validates every field and limits the nesting (by Python's recursion limit). Every fault is a
RemoteWireError, and a decoded message is well formed.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.errors import RemoteWireError, UsageError
from rlinf_actors.wire.agent_messages import AgentMessage
from rlinf_actors.wire.client_messages import ClientMessage
from rlinf_actors.wire.protocol import MAX_CONTROL_BYTES, ControlMessage, checked

Body = Union[AgentMessage, ClientMessage]
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
    kind: str
    text: str
    missing_ranks: list[int] = []
    path: str = ""


class Notice(ControlMessage, frozen=True, tag="not"):
    body: Body


Envelope = Union[Request, Reply, Failed, Notice]

_SHORTER = {
    "Launch": "environment variables (env_vars) count once for each worker: pass large data as arguments, which go "
    "straight to the workers, or launch fewer workers at a time",
    "AgentHello": "it tells of every worker of this node, with its environment variables: shorten those (env_vars)",
    "Handles": "it tells of every worker that this process has a handle of: shut down groups that are not needed",
    "Status": "ask for one namespace",
}
"""Advice, by message name, for messages whose length depends on the user's program."""


class TooLongError(UsageError):
    """A control message was not sent because it is longer than its receiver accepts."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
_decode = checked(_decoder, "a control message")


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
    """Return the envelope in *data*. Raises RemoteWireError if *data* is too long or is not a valid message."""
    if len(data) > MAX_CONTROL_BYTES:
        raise RemoteWireError(f"a control message of {len(data)} bytes; the limit is {MAX_CONTROL_BYTES}")
    return _decode(data)
