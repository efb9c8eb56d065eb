"""Headers of the messages that processes of one job send directly to each other. User data follows a header.

A header is a MessagePack array with a numeric tag, because every call carries one. The first message of a link is a
Join; the receiver ignores everything else from that peer until it has accepted the Join.

Both ends of a link must have the same byte order, which Join names: a tensor's bytes travel as they are in memory.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta

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
from rlinf_actors.wire.protocol import ChildPath, Number, Pid, WorkerId, checked
from rlinf_actors.wire.values import Endpoint, ExitReport, Extension

__all__ = [  # of other modules; callers name all frames `frames.X`
    "ChannelAccepted", "ChannelAck", "ChannelBatch", "ChannelCancel", "ChannelClose", "ChannelFrame",
    "ChannelGet", "ChannelGets", "ChannelItems", "ChannelLook", "ChannelPut", "ChannelPuts", "ChannelRelease",
    "ChannelShow", "ChannelWhere", "Frame",
]  # fmt: skip

MAX_SIBLINGS = 1024
"""Most workers to which a worker passes the arguments of a call on."""


class Join(Frame, frozen=True, tag=0):
    """First message of every link, from the process that connects.

    Attributes:
        protocol: the oldest protocol that the sender speaks.
        version: the sender's version of rlinf-actors, for people.
        python: the sender's Python version, such as "3.11".
        name: name of the sender, such as "trainer:0".
        token: membership token of the job.
        worker_id: id of the worker that the sender means to reach. Another worker at a reused address rejects the Join.
        succeeds: identities of the sender's earlier links to this worker whose connections were lost.
        worker: the sender's own worker id, "" for a driver.
        newest: the newest protocol that the sender speaks; 0 if it is `protocol`.
        byte_order: byte order of the sender's machine, "little" or "big".
        place: in a job that emulates a network, the sender's ``group:rank`` or ``driver``, "@" and its node's rank.
        bulk: True if this link may use bulk streams (net.bulk).
    """

    protocol: int
    version: str
    python: str
    name: str
    token: str
    worker_id: str
    succeeds: list[bytes] = []
    worker: str = ""
    newest: int = 0
    byte_order: str = "little"
    place: str = ""
    bulk: bool = False


class Rejected(Frame, frozen=True, tag=1):
    """Reply to a Join that the receiver does not accept.

    `kind` decides the error class at the sender of the Join, with the same values as in control_codec.Failed. `text` is
    the reason, for people.
    """

    kind: str
    text: str


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
    cls: str
    env: dict[str, str]
    max_concurrency: int = 0
    extensions: list[Extension] = []


class Call(Frame, frozen=True, tag=3):
    """Run a method; the payload is the arguments. Answered by Ok or Raised.

    `deadline_s` is the caller's remaining time in seconds, 0 for no limit.
    """

    id: int
    method: str
    deadline_s: Number = 0.0


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    """A worker on the node of the receiver: its name, worker id, process id and endpoint."""

    name: str
    worker_id: WorkerId
    pid: Pid
    endpoint: Endpoint


class SharedCall(Frame, frozen=True, tag=70):
    """A Call whose payload has the first part only: the others come as ShareParts or SharedParts. Since protocol 7."""

    id: int
    method: str
    deadline_s: Number = 0.0


class ShareParts(Frame, frozen=True, tag=71):
    """The parts of SharedCall `id` of the sender, which the receiver passes on to the workers `to`."""

    id: int
    to: Annotated[list[Sibling], Meta(max_length=MAX_SIBLINGS)]


class SharedParts(Frame, frozen=True, tag=72):
    """The parts of SharedCall `id` of the client with incarnation `origin`, "" for the sender itself."""

    origin: str
    id: int


class WantParts(Frame, frozen=True, tag=73):
    """The worker waits for the parts of SharedCall `id`: answered by SharedParts."""

    id: int


class Stream(Frame, frozen=True, tag=4):
    """Run an async generator method; the payload is the arguments. Answered by Items, then by Ok or Raised.

    At most `window` items may be unconsumed at a time; Credit permits more.
    """

    id: int
    method: str
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
    kind: str
    error: str
    text: str
    traceback: str = ""


class WhatRuns(Frame, frozen=True, tag=12):
    """Ask which method the receiver runs. Answered with Runs by the receiver's I/O thread. Since protocol 6.

    An older worker does not answer, so the sender uses a short timeout. If `constructed` is True (since protocol 7),
    the worker answers once its class is constructed, or with Raised if that fails; an older worker answers at once.
    """

    id: int
    constructed: bool = False


class Runs(Frame, frozen=True, tag=13):
    """Reply to WhatRuns.

    Attributes:
        method: the method that has been running longest, "" for none.
        seconds: its running time so far.
        waiting: number of queued calls.
        protocol: the newest protocol that the worker speaks. A worker of protocol 6 omits it.
    """

    id: int
    method: str
    seconds: Number = 0.0
    waiting: int = 0
    protocol: int = 6


class Memory(Frame, frozen=True, tag=10):
    """Offer of the sender's shared memory to the receiver.

    Attributes:
        pid: the sender's process, 0 if the sender offers no memory. The receiver opens ``/proc/PID/fd/FD``.
        fd: the file descriptor in that process.
        device, inode: device number and inode number of the file, to verify the opened file.
        size: size of the memory in bytes.
        opened: True if the sender has opened the receiver's memory, so that messages may refer to blocks in it.
        pieces: True if the sender accepts messages whose last part is still being written (UserMessage.unwritten).
    """

    pid: Pid = 0
    fd: int = 0
    device: int = 0
    inode: int = 0
    size: int = 0
    opened: bool = False
    pieces: bool = False


class Dropped(Frame, frozen=True, tag=11):
    """Release of blocks of the receiver's shared memory, by their numbers `leases`: the sender no longer reads them."""

    leases: list[int]


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


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """Description of one tensor whose bytes are not among the parts of its message.

    Attributes:
        dtype: name of the tensor's dtype in torch, such as "bfloat16".
        shape: the tensor's shape.
        requires_grad: the tensor's requires_grad.
        kind: torch's type of the tensor's device, such as "cuda".
        path: place of the bytes: "lane" (next on the transfer's lane), "staged" (the next of the parts at the end of
            the message), "ipc" (at `offset` of the memory that `handle` opens), "local" (in the same process), "" (no
            bytes).
        handle: handle of the device memory, for "ipc".
        offset: offset in that memory in bytes, for "ipc".
    """

    dtype: str
    shape: list[int]
    requires_grad: bool
    kind: str
    path: str
    handle: bytes = b""
    offset: int = 0


class TensorTransfer(msgspec.Struct, array_like=True):
    """The tensors that travel beside a message. Later answers name the transfer by `sender` and `n`.

    Attributes:
        sender: id of the tensor sender.
        n: number of the transfer at that sender.
        tensors: the tensors by number.
        lane: number of the lane that carries the tensors with the path "lane", or of a broadcast's process group, which
            carries those with the path "group".
        backend: torch.distributed back-end of the lane or group.
        store: HOST:PORT of its torch.distributed store.
        options: options with which its process group is made.
        event: handle of a CUDA event that the receiver waits for before it reads a tensor with the path "ipc".
    """

    sender: int
    n: int
    tensors: list[TensorHeader]
    lane: int = 0
    backend: str = ""
    store: str = ""
    options: list[Union[int, bool, None]] = []
    event: bytes = b""


class UserMessage(Frame, frozen=True, tag=20):
    """One message of a worker by `send` or `broadcast`. The parts of the object follow it.

    Attributes:
        id: id of the sender's outbox on this link.
        n: number of the message in that outbox; the receiver answers with Held. 0 if the sender needs no Held.
        src: name of the sending worker.
        src_id: id of the sending worker.
        stream: "" for `send`; for a broadcast, the name of its tree (messaging.addressing.stream_name), which all its
            members compute. Messages of one sender and stream stay in order.
        size: bytes that the message takes of the sender's window; the receiver gives them back by Returned.
        transfer: the tensors that travel beside the message, None without tensors.
        unwritten: size of the last part in bytes if the sender still writes it (Written); 0 if all parts are complete.
            Only for receivers whose Memory has `pieces`. The receiver does not answer such a message with Held.
    """

    id: int
    n: int
    src: str
    src_id: str
    stream: str
    size: int
    transfer: Union[TensorTransfer, None] = None
    unwritten: int = 0


class Held(Frame, frozen=True, tag=21):
    """Acknowledgement: the receiver's runtime has message `n` of outbox `id`, so the sender may reuse its buffers."""

    id: int
    n: int


class Returned(Frame, frozen=True, tag=22):
    """Credit for outbox `id`: messages of `size` bytes were consumed, and the sender may send as much again."""

    id: int
    size: int


class Written(Frame, frozen=True, tag=23):
    """Notice: the first `size` bytes of the last part of message `n` of outbox `id` are written. Since protocol 7.

    The part lies in the sender's shared memory. 0 if the sender cannot write the part: the message is lost.
    """

    id: int
    n: int
    size: int


class Ask(Frame, frozen=True, tag=30):
    """Ask which tensor paths the receiver can use. Answered by Facts. `id` is the sender's number for the question.

    `memory` and `event` are handles of CUDA memory and of a CUDA event on device `device` (a UUID), which the receiver
    tries to open; empty without handles.
    """

    id: int
    device: str = ""
    memory: bytes = b""
    event: bytes = b""


class Facts(Frame, frozen=True, tag=31):
    """Reply to Ask: the tensor paths that a worker can use.

    Attributes:
        id: the number in the Ask.
        host: host key of the worker's machine.
        accelerator: type of the worker's accelerators.
        devices: UUIDs of the worker's own accelerators.
        backends: torch.distributed back-ends that the worker can use.
        ipc: True if the worker could open the handles in the Ask.
        ccl_version, model, parent: version of the worker's CCL, and model and PCI address of the accelerator on which
            tensors arrive; "" for unknown.
        groups: True if the worker can join the process group of a broadcast.
    """

    id: int
    host: str
    accelerator: str
    devices: list[str]
    backends: list[str]
    ipc: bool
    ccl_version: str = ""
    model: str = ""
    parent: str = ""
    groups: bool = False


class Released(Frame, frozen=True, tag=32):
    """Release of transfer `n` of tensor sender `id`: the receiver no longer reads the transfer's memory."""

    id: int
    n: int


class LaneEnded(Frame, frozen=True, tag=33):
    """The sending side has closed lane `lane` of tensor sender `id`. `text` is the reason.

    Each side sends it once. The answer of the other side proves that its process is alive. `src_id` is the worker id of
    the process that sends this header.
    """

    id: int
    lane: int
    src_id: str
    text: str


class WhereIs(Frame, frozen=True, tag=60):
    """Ask for the endpoint of the receiver's child at `path` (ranks below the receiver's own). Since protocol 7.

    Answered by ChildIs or ChildEnded, once such a child has registered. Sent only to workers that speak protocol 7.
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
    worker_id: str
    exit: ExitReport


class Resized(Frame, frozen=True, tag=14):
    """Notice of a group's owner to its workers: the group has `world_size` ranks now. Since protocol 7."""

    world_size: int


AnyFrame = Union[
    Join, Rejected, Create, Call, Stream, Credit, Cancel, Ok, Item, Raised, WhatRuns, Runs, Memory, Dropped, Shown,
    Opened, Hidden, UserMessage, Held, Returned, Written, Ask, Facts, Released, LaneEnded, ChannelFrame,
    ChannelAccepted, ChannelItems, WhereIs, ChildIs, ChildEnded, Resized, SharedCall, ShareParts, SharedParts,
    WantParts,
]  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
"""Return a header as bytes."""

_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
decode = checked(_decoder, "a header")
"""Return the header in the given bytes. Raises RemoteWireError if the bytes are no header."""
