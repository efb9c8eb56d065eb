"""Headers of the messages that processes of one job send directly to each other. User data follows a header.

A header is a MessagePack array with a numeric tag, because every call carries one. The first message of a link is a
Join; the receiver ignores everything else from that peer until it has accepted the Join.

Both ends of a link must have the same byte order, which Join names: a tensor's bytes travel as they are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Union

import msgspec

from rlinf_actors.wire.bounds import Few, Handle, Ids, Name, OfNode, Report, Some, Text, Variables
from rlinf_actors.wire.channel_frames import (
    ChannelAccepted,
    ChannelAck,
    ChannelBatch,
    ChannelCancel,
    ChannelClose,
    ChannelFrame,
    ChannelGet,
    ChannelGets,
    ChannelItems,
    ChannelLook,
    ChannelPut,
    ChannelPuts,
    ChannelRelease,
    ChannelShow,
    ChannelWhere,
)
from rlinf_actors.wire.frame import Frame
from rlinf_actors.wire.message_frames import (
    Ask,
    BroadcastFailed,
    Facts,
    Held,
    LaneEnded,
    LaneKey,
    Released,
    Returned,
    TensorHeader,
    TensorTransfer,
    UserMessage,
    Written,
)
from rlinf_actors.wire.protocol import MALFORMED, ChildPath, Number, Pid, WorkerId, checked
from rlinf_actors.wire.relay_frames import Relayed, RelayedLink
from rlinf_actors.wire.stack_values import Wait, Waits
from rlinf_actors.wire.values import Endpoint, ExitReport, Extension

__all__ = [  # of other modules; callers name all frames `frames.X`
    "Ask", "BroadcastFailed", "ChannelAccepted", "ChannelAck", "ChannelBatch", "ChannelCancel", "ChannelClose",
    "ChannelFrame", "ChannelGet", "ChannelGets", "ChannelItems", "ChannelLook", "ChannelPut", "ChannelPuts",
    "ChannelRelease", "ChannelShow", "ChannelWhere", "Facts", "Frame", "Held", "LaneEnded", "LaneKey", "Relayed",
    "RelayedLink", "Released", "Returned",
    "TensorHeader", "TensorTransfer", "UserMessage", "Written",
]  # fmt: skip

MAX_TOGETHER = 1024
"""Most calls, or results, in one frame."""


class Join(Frame, frozen=True, tag=0):
    """First message of every link, from the process that connects.

    Attributes:
        protocol: the protocol that the sender speaks.
        version: the sender's version of rlinf-actors, for people.
        python: the sender's Python version, such as "3.11".
        name: name of the sender, such as "trainer:0".
        token: membership token of the job.
        worker_id: id of the worker that the sender means to reach. Another worker at a reused address rejects the Join.
        succeeds: identities of the sender's earlier links to this worker whose connections were lost.
        worker: the sender's own worker id, "" for a driver.
        byte_order: byte order of the sender's machine, "little" or "big".
        place: in a job that emulates a network, the sender's ``group:rank`` or ``driver``, "@" and its node's rank.
        bulk: True if this link may use bulk streams (net.bulk).
    """

    protocol: int
    version: Name
    python: Name
    name: Name
    token: Name
    worker_id: Name
    succeeds: OfNode[Handle] = []
    worker: Name = ""
    byte_order: Name = "little"
    place: Name = ""
    bulk: bool = False


class Rejected(Frame, frozen=True, tag=1):
    """Reply to a Join that the receiver does not accept.

    `kind` decides the error class at the sender of the Join, with the same values as in control_codec.Failed. `text` is
    the reason, for people.
    """

    kind: Name
    text: Text


class Create(Frame, frozen=True, tag=2):
    """Construct the worker's class. Payload: class or None, args, kwargs, further values. Answered by Ok or Raised.

    Attributes:
        cls: "module:qualname" if the worker imports the class, "" if the payload has the class by value.
        env: environment variables to set first.
        max_concurrency: number of threads for calls of a class without ``async def`` methods (0 or 1: the main thread),
            largest number of running coroutines of a class with ``async def`` methods (0: no limit).
        extensions: code that registers the types of the worker's hardware. The worker loads the code before it decodes
            the payload.
    """

    id: int
    cls: Name
    env: Variables
    max_concurrency: int = 0
    extensions: Some[Extension] = []


class Call(Frame, frozen=True, tag=3):
    """Run a method; the payload is the arguments. Answered by Ok or Raised.

    `deadline_s` is the caller's remaining time in seconds, 0 for no limit.
    """

    id: int
    method: Text
    deadline_s: Number = 0.0


class Calls(Frame, frozen=True, tag=74):
    """Several Calls of one method. Part n is the only part of call `ids[n]`; no parts if the calls have none.

    From then on, the worker may answer the sender with Oks.
    """

    ids: Ids[int]
    method: Text
    deadline_s: Number = 0.0


class Oks(Frame, frozen=True, tag=75):
    """Results of several calls; `seconds[n]` and part n, if there are parts, are those of call `ids[n]`."""

    ids: Ids[int]
    seconds: Ids[Number]


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A worker on the node of the receiver: its name, worker id, process id and endpoint."""

    name: Name
    worker_id: WorkerId
    pid: Pid
    endpoint: Endpoint


class SharedCall(Frame, frozen=True, tag=70):
    """A Call whose payload has the first part only: the others come as ShareParts or SharedParts."""

    id: int
    method: Text
    deadline_s: Number = 0.0


class ShareParts(Frame, frozen=True, tag=71):
    """The parts of SharedCall `id` of the sender, which the receiver passes on to the workers `to`."""

    id: int
    to: Some[Sibling]


class SharedParts(Frame, frozen=True, tag=72):
    """The parts of SharedCall `id` of the client with incarnation `origin`, "" for the sender itself."""

    origin: Name
    id: int


class WantParts(Frame, frozen=True, tag=73):
    """The worker waits for the parts of SharedCall `id`: answered by SharedParts."""

    id: int


class Stream(Frame, frozen=True, tag=4):
    """Run an async generator method; the payload is the arguments. Answered by Items, then by Ok or Raised.

    At most `window` items may be unconsumed at a time; Credit permits more.
    """

    id: int
    method: Text
    window: int


class Credit(Frame, frozen=True, tag=5):
    """Permission to send `n` more items of stream `id`."""

    id: int
    n: int


class Cancel(Frame, frozen=True, tag=6):
    """Cancel the call `id`.

    A queued call is dropped, and an async method is cancelled. A method that runs on a thread is not interrupted.
    """

    id: int


class Ok(Frame, frozen=True, tag=7):
    """Result of a call, or the end of a stream. `seconds` is the running time of the method."""

    id: int
    seconds: Number = 0.0


class Item(Frame, frozen=True, tag=8):
    """One item of a stream, as the payload."""

    id: int


class Raised(Frame, frozen=True, tag=9):
    """Failure of a call. The payload is the pickled exception, or nothing if it does not pickle.

    `kind` is one of raised (by the method), start (the worker could not start the call, for example because its class
    cannot be imported), expired, cancelled and usage. Answers to channel requests have kinds of their own. `error` is
    the name of the exception's class, `text` its message.
    """

    id: int
    kind: Name
    error: Text
    text: Report
    traceback: Report = ""


class WhatRuns(Frame, frozen=True, tag=12):
    """Ask which method the receiver runs. Answered with Runs by the receiver's I/O thread.

    If `constructed` is True, the worker answers once its class is constructed, or with Raised if that fails. If `waits`
    is True, the answer says what the worker waits for.
    """

    id: int
    constructed: bool = False
    waits: bool = False


class Runs(Frame, frozen=True, tag=13):
    """Reply to WhatRuns.

    Attributes:
        method: the method that has been running longest, "" for none.
        seconds: its running time so far.
        waiting: number of queued calls.
        waits: what the worker's threads and tasks wait for, if WhatRuns asks for that.
    """

    id: int
    method: Name
    seconds: Number = 0.0
    waiting: int = 0
    waits: Waits[Wait] = []


class Memory(Frame, frozen=True, tag=10):
    """Offer of the sender's shared memory to the receiver.

    Attributes:
        pid: the sender's process, 0 if the sender offers no memory. The receiver opens ``/proc/PID/fd/FD``.
        fd: the file descriptor in that process.
        device, inode: device number and inode number of the file, to verify the opened file.
        size: size of the memory in bytes.
        opened: True if the sender has opened the receiver's memory, so that messages may refer to blocks in it.
    """

    pid: Pid = 0
    fd: int = 0
    device: int = 0
    inode: int = 0
    size: int = 0
    opened: bool = False


class Dropped(Frame, frozen=True, tag=11):
    """Release of blocks of the receiver's shared memory, by their numbers `leases`: the sender no longer reads them."""

    leases: Ids[int]


class Shown(Frame, frozen=True, tag=15):
    """Offer of further shared memory: arena `number` of the sender. The other fields are those of Memory.

    `handed_over`: True if the sender hands blocks of the arena over: it will not write to a block, nor use it again,
    until the receiver releases the block, and not at all after this link was lost. The receiver may then offer the
    arena to others. Answered by Opened if the receiver has opened the arena.
    """

    number: int
    pid: Pid
    fd: int
    device: int
    inode: int
    size: int
    handed_over: bool = False


class Opened(Frame, frozen=True, tag=16):
    """Reply to Shown: the sender's messages may refer to blocks in its arena `number`."""

    number: int


class Hidden(Frame, frozen=True, tag=17):
    """End of what Shown began: no message will refer to the sender's arena `number` any more."""

    number: int


class WhereIs(Frame, frozen=True, tag=60):
    """Ask for the endpoint of the receiver's child at `path` (ranks below the receiver's own).

    Answered by ChildIs or ChildEnded, once such a child has registered.
    """

    id: int
    path: ChildPath


class ChildIs(Frame, frozen=True, tag=61):
    """Reply to WhereIs `id`: the child's worker id and endpoint. ChildEnded follows when the child ends."""

    id: int
    worker_id: WorkerId
    endpoint: Endpoint


class ChildEnded(Frame, frozen=True, tag=62):
    """Last reply to WhereIs `id`: the child has ended."""

    id: int
    worker_id: Name
    exit: ExitReport


class Resized(Frame, frozen=True, tag=14):
    """Notice of a group's owner to its workers: the group has `world_size` ranks now."""

    world_size: int


AnyFrame = Union[
    Join, Rejected, Create, Call, Stream, Credit, Cancel, Ok, Item, Raised, WhatRuns, Runs, Memory, Dropped, Shown,
    Opened, Hidden, UserMessage, Held, Returned, Written, Ask, Facts, Released, LaneEnded, LaneKey,
    BroadcastFailed,
    ChannelFrame, ChannelAccepted, ChannelItems, WhereIs, ChildIs, ChildEnded, Resized, SharedCall, ShareParts,
    SharedParts, WantParts, Relayed, Calls, Oks,
]  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
"""Return a header as bytes."""

decode: Callable[[bytes | memoryview], AnyFrame] = checked(AnyFrame, "a header")
"""Return the header in the given bytes. Raises RemoteWireError if the bytes are no header."""

_fields = msgspec.msgpack.Decoder(Few[msgspec.Raw]).decode
_number = msgspec.msgpack.Decoder(int).decode


def number_of(header: bytes | memoryview) -> int | None:
    """Return the number of the call to which a header belongs that `decode` refuses; None if it has none."""
    try:
        return _number(_fields(header)[1])
    except (*MALFORMED, IndexError):
        return None
