"""Packets between a worker and its child members: a struct in each packet of a unix SOCK_SEQPACKET socket.

The child sends Enter, the worker answers with Granted or Denied. The child then listens, sends Listening, and receives
Registered. After that the worker passes on each NodeRegistered of its agentd, and the child sends nothing; the end of
the connection reports the end of the other process. The worker checks the peer's process before it reads a packet
(`worker.children`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, Union

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire.bounds import Path, Text
from rlinf_actors.wire.protocol import MALFORMED, ChildPath, ControlMessage, Size, WorkerId, checked
from rlinf_actors.wire.template_protocol import NodeRegistered, WorkerPlace
from rlinf_actors.wire.values import Endpoint, WorkerSpec

MAX_PACKET = 1 << 16
"""Largest packet in bytes. Unix sockets accept this size without a larger buffer."""


class Enter(ControlMessage, frozen=True):
    """Request of a child to become a member.

    `parent` is the worker's address ("group:rank"), `path` the ranks below the worker that lead to the child,
    `siblings` the number of children among which the child has its rank.
    """

    parent: Path
    path: ChildPath
    siblings: Size


class Granted(ControlMessage, frozen=True):
    """Admission of a child. A file descriptor is passed along with the packet.

    The file holds a list: the parts of the user's data that the group's owner sent along with the class.

    Attributes:
        parent: the worker's id.
        spec: the worker's spec with the job's token, changed to the child's id and to `siblings` as world size.
        place: the worker's place.
    """

    parent: WorkerId
    spec: WorkerSpec
    place: WorkerPlace


class Denied(ControlMessage, frozen=True):
    """Rejection of a child. `text` is the reason."""

    text: Text


class Listening(ControlMessage, frozen=True):
    """Packet of a child: other members reach it at `endpoint`."""

    endpoint: Endpoint


class Registered(ControlMessage, frozen=True):
    """Packet of the worker: other members can now find the child."""


Answer = Union[Granted, Denied, Registered, NodeRegistered]
"""Packets that the worker sends."""

M = TypeVar("M", Enter, Listening)

encode: Callable[[Enter | Listening | Answer], bytes] = msgspec.msgpack.Encoder().encode
decode_answer: Callable[[bytes | memoryview], Answer] = checked(Answer, "an answer to a child")


def socket_path(run_dir: str, worker_id: str) -> str:
    """Return the path of the socket on which a worker's children connect to it.

    agentd removes every file that begins with this path when the worker has ended.
    """
    return f"{run_dir}/w/{worker_id}_"


def decode(data: bytes, kind: type[M]) -> M:
    """Return the packet in *data*, which a child sent to its worker.

    Raises:
        RemoteWireError: *data* is not a packet of class *kind*.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        raise RemoteWireError(f"not what a child says now: {error}") from None
