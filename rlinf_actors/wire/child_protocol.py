"""Packets between a worker and its child members: a struct in each packet of a unix SOCK_SEQPACKET socket.

The child sends Enter, the worker Granted or Denied; the child listens, sends Listening, and receives Registered. After
that the connection carries nothing; its end shows the end of either side. The worker checks the peer's process before
it reads anything (`worker.children`).
"""

from __future__ import annotations

from typing import Annotated, TypeVar, Union

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire.protocol import MALFORMED, ChildPath, ControlMessage, Size, WorkerId
from rlinf_actors.wire.template_protocol import WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec

MAX_PACKET = 1 << 16
"""Bytes of a packet from a child, and of one from its worker: what unix sockets take without being asked for more."""


class Enter(ControlMessage, frozen=True):
    """I am the child at `path` (ranks below the worker's own) of worker `parent` ("group:rank"), one of `siblings`."""

    parent: Annotated[str, msgspec.Meta(max_length=1000)]
    path: ChildPath
    siblings: Size


class Granted(ControlMessage, frozen=True):
    """You may be. `spec` and `place` are the worker's, the job's token among them, with the child's own id and the
    number of its siblings for the world size; `parent` is the worker's id. With it goes a file: the parts (a list) of
    what the group's owner sent along with the class.
    """

    parent: WorkerId
    spec: WorkerSpec
    place: WorkerPlace


class Denied(ControlMessage, frozen=True):
    """You may not be, and why."""

    text: str


class Listening(ControlMessage, frozen=True):
    """Others reach me there."""

    endpoint: Endpoint


class Registered(ControlMessage, frozen=True):
    """Others find you."""


Answer = Union[Granted, Denied, Registered]
"""What the worker says."""

M = TypeVar("M", Enter, Listening)

_encoder = msgspec.msgpack.Encoder()
_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def socket_path(run_dir: str, worker_id: str) -> str:
    """Return where the children of a worker connect; agentd removes all that begins so when the worker has ended."""
    return f"{run_dir}/w/{worker_id}_"


def encode(packet: Enter | Listening | Answer) -> bytes:
    """One packet as bytes."""
    return _encoder.encode(packet)


def decode(data: bytes, kind: type[M]) -> M:
    """Return the packet of a child. Raises RemoteWireError if *data* is none of this kind."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        raise RemoteWireError(f"not what a child says now: {error}") from None


def decode_answer(data: bytes) -> Answer:
    """Return the packet of a worker. Raises RemoteWireError if *data* is none."""
    try:
        return _answer.decode(data)
    except MALFORMED as error:
        raise RemoteWireError(f"not an answer to a child: {error}") from None
