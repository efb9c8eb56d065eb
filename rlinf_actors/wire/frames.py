"""Headers of what processes of one job say directly to one another; the user's data rides behind them.

Kept as MessagePack arrays with a numeric tag, since one goes with every call. A link's first
message is a Join; until it was accepted nothing else from that peer is looked at.

MessagePack and pickle have one byte order on all machines, and numpy's arrays say theirs. A tensor's
bytes travel as they lie in memory: so both ends of a link must have the same order, which Join names.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire.protocol import MALFORMED, ChildPath, Number, Pid, WorkerId
from rlinf_actors.wire.values import Endpoint, ExitReport, Extension


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of all headers."""


class Join(Frame, frozen=True, tag=0):
    """First on every link. `token` proves membership of the job; `python` is "3.11"; `worker_id`
    is whom the sender means to reach, so that a recycled address is noticed. `succeeds` are the identities of links
    of the same process whose connections were lost, `worker` is that process's own worker id, "" for a driver. The
    sender speaks `protocol` (the oldest) to `newest` (0: the same). `byte_order` is its machine's, "little" or "big".
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


class Rejected(Frame, frozen=True, tag=1):
    """The answer to a Join that is not accepted. `kind` as in messages.Failed."""

    kind: str
    text: str


class Create(Frame, frozen=True, tag=2):
    """Construct the worker's class: payload (class or None, args, kwargs, extras). `cls` is
    "module:qualname" where the class is imported, "" where it comes by value; `env` is set first, and `extensions`,
    which register the types of the worker's hardware, are loaded before anything is decoded.
    """

    id: int
    cls: str
    env: dict[str, str]
    max_concurrency: int = 0
    extensions: list[Extension] = []


class Call(Frame, frozen=True, tag=3):
    """Run a method; `deadline_s` is what is left of the caller's time in seconds, 0 for no limit."""

    id: int
    method: str
    deadline_s: Number = 0.0


class Stream(Frame, frozen=True, tag=4):
    """Run an async generator method; at most `window` items may be on their way at a time."""

    id: int
    method: str
    window: int


class Credit(Frame, frozen=True, tag=5):
    """`n` more items of the stream may be sent."""

    id: int
    n: int


class Cancel(Frame, frozen=True, tag=6):
    """Forget the call: dropped if queued, cancelled if async, left to finish if it blocks a thread."""

    id: int


class Ok(Frame, frozen=True, tag=7):
    """The call's result, or the end of a stream; `seconds` is how long the method ran."""

    id: int
    seconds: Number = 0.0


class Item(Frame, frozen=True, tag=8):
    """One item of a stream."""

    id: int


class Raised(Frame, frozen=True, tag=9):
    """The call failed. The payload is the pickled exception, or nothing if it does not pickle.
    `kind`: raised (by the method), start (class not importable, ...), expired, cancelled, usage.
    """

    id: int
    kind: str
    error: str
    text: str
    traceback: str = ""


class WhatRuns(Frame, frozen=True, tag=12):
    """What does the receiver's user code do? Answered by its I/O thread with Runs. Since protocol 6; a worker that
    does not know it answers nothing, and whoever asks does not wait for long.

    `constructed`: answered once the class is constructed, with Raised if it cannot be. Since protocol 7; an older
    worker answers at once.
    """

    id: int
    constructed: bool = False


class Runs(Frame, frozen=True, tag=13):
    """`method` has been running for `seconds`, the longest of those that run ("" if none does), and so many calls wait
    for their turn. The worker speaks `protocol` (one of protocol 6 does not say).
    """

    id: int
    method: str
    seconds: Number = 0.0
    waiting: int = 0
    protocol: int = 6


class Memory(Frame, frozen=True, tag=10):
    """The sender's shared memory, as ``/proc/pid/fd/fd`` with that device, inode and size in bytes; pid 0: none is
    offered. `opened`: whether the sender has opened the receiver's, and may be lent parts of it.
    """

    pid: Pid = 0
    fd: int = 0
    device: int = 0
    inode: int = 0
    size: int = 0
    opened: bool = False


class Dropped(Frame, frozen=True, tag=11):
    """Nobody here looks at these leases of the receiver's shared memory any more."""

    leases: list[int]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that is not among a message's parts. `kind` is torch's type of its device.

    `path` says where its bytes are: "lane" (next on the transfer's lane), "staged" (the next of the parts at
    the end), "ipc" (at `offset` of the memory that `handle` opens), "local" (in this very process), "" (none).
    """

    dtype: str
    shape: list[int]
    requires_grad: bool
    kind: str
    path: str
    handle: bytes = b""
    offset: int = 0


class TensorTransfer(msgspec.Struct, array_like=True):
    """The tensors that travel beside a message. Answers to the sender name them by `sender` and `n`.

    `lane` (its number), `backend` and `store` (HOST:PORT) say which process group carries the tensors with
    the path "lane", and `options` how it is made. `event` is a CUDA event to wait for before ipc is read.
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
    """One message from worker `src` (its id: `src_id`); the object's parts ride behind. `stream` is "" for
    send and recv, else which broadcast. `id` names the sender's outbox on this link; a Held with `n` is
    wanted unless that is 0; `size` is what is to be Returned; `transfer` describes the tensors that travel beside it.
    """

    id: int
    n: int
    src: str
    src_id: str
    stream: str
    size: int
    transfer: Union[TensorTransfer, None] = None


class Held(Frame, frozen=True, tag=21):
    """The receiver's runtime holds message `n` of outbox `id`: its buffers may change."""

    id: int
    n: int


class Returned(Frame, frozen=True, tag=22):
    """Messages of `size` bytes of outbox `id` were taken: as much may follow."""

    id: int
    size: int


class Ask(Frame, frozen=True, tag=30):
    """Which paths can you take? Answered by a Facts; `id` names who asks. `memory` and `event` are a CUDA memory's
    and a CUDA event's handles on device `device`, to try to open.
    """

    id: int
    device: str = ""
    memory: bytes = b""
    event: bytes = b""


class Facts(Frame, frozen=True, tag=31):
    """What a worker's end of a path can be. `host` is its host key, `accelerator` the type of its accelerators,
    `devices` the UUIDs of those that are its own, `backends` the torch.distributed back-ends it can use,
    `ipc` whether it could open what the Ask offered.
    """

    id: int
    host: str
    accelerator: str
    devices: list[str]
    backends: list[str]
    ipc: bool


class Released(Frame, frozen=True, tag=32):
    """The receiver does not use the memory of transfer `n` of tensor sender `id` any more."""

    id: int
    n: int


class LaneEnded(Frame, frozen=True, tag=33):
    """This side's end of lane `lane` of tensor sender `id` is closed, because of `text`. Each side says it once, so
    whoever hears it back knows that the other is alive. `src_id` is the sender's worker id.
    """

    id: int
    lane: int
    src_id: str
    text: str


class ChannelPut(Frame, frozen=True, tag=40):
    """Append the item behind it; answered by Ok once it is in, or Raised(kind: full, closed, cancelled)."""

    id: int
    key: bytes
    weight: Union[int, Number]
    nowait: bool


class ChannelGet(Frame, frozen=True, tag=41):
    """Take the head; answered by Ok with the item behind a list of its parts' numbers, or
    Raised(kind: empty, closed, cancelled).

    With `taker`, the consumer's name for people, it is a take: the item is out until a ChannelRelease names this
    request. The list says then, too, which delivery of the item this is; a host of protocol 6 does not know takes and
    leaves that out. Raised may be undeliverable then: behind it are the number of deliveries, and who had the last and
    how it ended.
    """

    id: int
    key: bytes
    nowait: bool
    taker: str = ""


class ChannelBatch(Frame, frozen=True, tag=42):
    """Take items up to a weight; answered like ChannelGet."""

    id: int
    key: bytes
    target: Union[int, Number]


class ChannelAck(Frame, frozen=True, tag=43):
    """What answered the gets and batches `ids` has reached the user's code."""

    ids: list[int]


class ChannelCancel(Frame, frozen=True, tag=44):
    """Nobody waits for `id`; `back`: if its items are on their way, nobody will look at them."""

    id: int
    back: bool


class ChannelLook(Frame, frozen=True, tag=45):
    """Answered by Ok with [size, full] of a key."""

    id: int
    key: bytes


class ChannelShow(Frame, frozen=True, tag=46):
    """Answered by Ok with what waits, for people: [closed, rows]; the small items ride behind.

    Since protocol 7 `what` may be "counts", which adds the number of undeliverable items of each key to the answer, or
    "list" or "drain": the undeliverable items of `key` behind [None, about them]. "drain" is acknowledged like a get. A
    host of protocol 6 takes no notice of `what`.
    """

    id: int
    what: str = ""
    key: bytes = b""


class ChannelClose(Frame, frozen=True, tag=47):
    """No more puts; answered by Ok."""

    id: int


class ChannelWhere(Frame, frozen=True, tag=48):
    """Which replica has this key; `rank` is where the asker would like it. Answered by Ok with the rank."""

    id: int
    key: bytes
    rank: int


class ChannelRelease(Frame, frozen=True, tag=49):
    """The item of `take` (the id of its ChannelGet) was processed; or was not, and `error` says why.

    Answered by Ok, or by Raised(kind: gone) if the item is not out any more; not answered if `id` is 0. Since protocol
    7: sent to a host that has answered a take.
    """

    id: int
    take: int
    error: Union[str, None] = None


class WhereIs(Frame, frozen=True, tag=60):
    """Where is the receiver's child at `path` (ranks below the receiver's own)? Answered by ChildIs or ChildEnded, at
    the latest when such a child registers. Since protocol 7; sent to workers whose Runs says that they speak it.
    """

    id: int
    path: ChildPath


class ChildIs(Frame, frozen=True, tag=61):
    """The answer to WhereIs `id`: the child's own id, and where it listens. A ChildEnded follows when it ends."""

    id: int
    worker_id: WorkerId
    endpoint: Endpoint


class ChildEnded(Frame, frozen=True, tag=62):
    """The child that WhereIs `id` asked for has ended; nothing more is said of that question."""

    id: int
    worker_id: str
    exit: ExitReport


ChannelFrame = Union[
    ChannelPut, ChannelGet, ChannelBatch, ChannelAck, ChannelCancel, ChannelLook, ChannelShow, ChannelClose,
    ChannelWhere, ChannelRelease,
]  # fmt: skip
"""What a channel's host takes."""

AnyFrame = Union[
    Join, Rejected, Create, Call, Stream, Credit, Cancel, Ok, Item, Raised, WhatRuns, Runs, Memory, Dropped,
    UserMessage, Held, Returned, Ask, Facts, Released, LaneEnded, ChannelFrame, WhereIs, ChildIs, ChildEnded,
]  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
"""A header as bytes."""

_decode = msgspec.msgpack.Decoder(AnyFrame).decode


def decode(data: bytes) -> AnyFrame:
    """The header in *data*.

    Raises:
        RemoteWireError: *data* is not one.
    """
    try:
        frame: AnyFrame = _decode(data)
    except MALFORMED as error:
        raise RemoteWireError(f"not a header: {error}") from None
    return frame
