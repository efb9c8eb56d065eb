"""Headers of the messages that processes of one job send directly to each other. User data follows a header.

A header is a MessagePack array with a numeric tag, because every call carries one. The first message of a link is a
Join; the receiver ignores everything else from that peer until it has accepted the Join.

Both ends of a link must have the same byte order, which Join names: a tensor's bytes travel as they are in memory.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.wire.protocol import ChildPath, Number, Pid, WorkerId, checked
from rlinf_actors.wire.values import Endpoint, ExitReport, Extension


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of the headers of all messages that processes of one job send directly to each other."""


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
    """

    pid: Pid = 0
    fd: int = 0
    device: int = 0
    inode: int = 0
    size: int = 0
    opened: bool = False


class Dropped(Frame, frozen=True, tag=11):
    """Release of blocks of the receiver's shared memory, by their numbers `leases`: the sender no longer reads them."""

    leases: list[int]


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
        lane: number of the lane that carries the tensors with the path "lane".
        backend: torch.distributed back-end of the lane.
        store: HOST:PORT of the lane's torch.distributed store.
        options: options with which the lane's process group is made.
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
    """

    id: int
    n: int
    src: str
    src_id: str
    stream: str
    size: int
    transfer: Union[TensorTransfer, None] = None


class Held(Frame, frozen=True, tag=21):
    """Acknowledgement: the receiver's runtime has message `n` of outbox `id`, so the sender may reuse its buffers."""

    id: int
    n: int


class Returned(Frame, frozen=True, tag=22):
    """Credit for outbox `id`: messages of `size` bytes were consumed, and the sender may send as much again."""

    id: int
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
    """

    id: int
    host: str
    accelerator: str
    devices: list[str]
    backends: list[str]
    ipc: bool


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


class ChannelPut(Frame, frozen=True, tag=40):
    """Append the item that follows this header to the queue of `key`.

    Answered by Ok once the channel has the item, or by Raised(kind: full, closed, cancelled). `weight` is the item's
    weight, by which ChannelBatch counts. `nowait`: True to answer with "full" instead of waiting for room. `many`: True
    if the sender reads ChannelAccepted, with which the host then answers instead of Ok.
    """

    id: int
    key: bytes
    weight: Union[int, Number]
    nowait: bool
    many: bool = False


class ChannelGet(Frame, frozen=True, tag=41):
    """Remove the first item of a key. Answered by Ok, or by Raised(kind: empty, closed, cancelled).

    Ok is followed by a list with one entry, then by the item's parts. The entry is (number of parts, weight of the
    item, True if a consumer may have received the item before). `nowait`: True to answer with "empty" instead of
    waiting for an item.

    If `taker` (the consumer's name, for people) is set, the request is a take: the host keeps the item as "in
    processing" until a ChannelRelease names this request. The entry then also contains the number of this delivery; a
    host of protocol 6 does not know takes and omits the number. A take may also be answered by Raised(kind:
    undeliverable), followed by the number of deliveries, the last consumer, and the reason for which its delivery
    failed.

    `many`: True if the sender reads ChannelItems, with which the host may then answer a get instead of Ok.
    """

    id: int
    key: bytes
    nowait: bool
    taker: str = ""
    many: bool = False


class ChannelBatch(Frame, frozen=True, tag=42):
    """Remove the first items of a key until their weights add up to `target`.

    Answered like ChannelGet, with one entry for each item in the list that follows Ok.
    """

    id: int
    key: bytes
    target: Union[int, Number]


class ChannelAck(Frame, frozen=True, tag=43):
    """Acknowledgement: the items that answered the ChannelGets and ChannelBatches `ids` have reached the user's code.

    The host then forgets these items.
    """

    ids: list[int]


class ChannelCancel(Frame, frozen=True, tag=44):
    """Cancel the put, get or batch with the number `id`.

    If `back` is True, items that are already on their way to the sender return to the queue.
    """

    id: int
    back: bool


class ChannelLook(Frame, frozen=True, tag=45):
    """Ask for the size of a key's queue. Answered by Ok with [number of items, True if the queue is full]."""

    id: int
    key: bytes


class ChannelShow(Frame, frozen=True, tag=46):
    """Ask for the waiting items, to show them. Answered by Ok with [closed, a row for each key]; small items follow.

    Since protocol 7 `what` can be "counts", "list" or "drain"; a host of protocol 6 ignores it. "counts" adds the
    number of undeliverable items of each key to the answer. "list" and "drain" return the undeliverable items of `key`,
    after [None, descriptions of the items]; "drain" also removes the items, and is acknowledged like a get.
    """

    id: int
    what: str = ""
    key: bytes = b""


class ChannelClose(Frame, frozen=True, tag=47):
    """Close the channel: it accepts no more puts. Answered by Ok."""

    id: int


class ChannelWhere(Frame, frozen=True, tag=48):
    """Ask replica 0 of a distributed channel which replica has a key. Answered by Ok with that replica's rank.

    If no replica has the key yet, replica `rank` gets the key. It is the replica on the sender's node, if there is one.
    """

    id: int
    key: bytes
    rank: int


class ChannelRelease(Frame, frozen=True, tag=49):
    """End the take `take` (the id of its ChannelGet). Sent only to hosts that have answered a take. Since protocol 7.

    `error` says why the item was not processed, None if it was. Answered by Ok, or by Raised(kind: gone) if the host no
    longer waits for this release; not answered if `id` is 0.
    """

    id: int
    take: int
    error: Union[str, None] = None


class ChannelPuts(Frame, frozen=True, tag=50):
    """Several ChannelPuts of one key, of items of one part each. Sent only to hosts that have sent ChannelAccepted.

    Part n is the item of put `ids[n]`, whose weight is `weights[n]`, or 0 if `weights` is empty.
    """

    ids: list[int]
    key: bytes
    weights: list[Union[int, Number]] = []


class ChannelGets(Frame, frozen=True, tag=51):
    """Several ChannelGets of one key. Sent only to hosts that have sent ChannelItems or ChannelAccepted."""

    ids: list[int]
    key: bytes


class ChannelAccepted(Frame, frozen=True, tag=52):
    """Reply to the puts `ids`: the channel has their items. Sent to processes that set `many`."""

    ids: list[int]


class ChannelItems(Frame, frozen=True, tag=53):
    """Reply to the gets `ids`: part n is the item for get `ids[n]`. Sent to processes that set `many`.

    No consumer has received these items before, and each has one part. All other items are sent by Ok.
    """

    ids: list[int]


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


ChannelFrame = Union[
    ChannelPut, ChannelGet, ChannelBatch, ChannelAck, ChannelCancel, ChannelLook, ChannelShow, ChannelClose,
    ChannelWhere, ChannelRelease, ChannelPuts, ChannelGets,
]  # fmt: skip
"""Headers that a channel's host receives."""

AnyFrame = Union[
    Join, Rejected, Create, Call, Stream, Credit, Cancel, Ok, Item, Raised, WhatRuns, Runs, Memory, Dropped,
    UserMessage, Held, Returned, Ask, Facts, Released, LaneEnded, ChannelFrame, ChannelAccepted, ChannelItems, WhereIs,
    ChildIs, ChildEnded, Resized,
]  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
"""Return a header as bytes."""

_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)
decode = checked(_decoder, "a header")
"""Return the header in the given bytes. Raises RemoteWireError if the bytes are no header."""
