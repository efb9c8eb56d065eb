"""Headers of the messages that workers send each other by send, recv and broadcast; part of `wire.frames`.

UserMessage carries the object, or describes tensors that travel beside it. The other frames acknowledge messages,
return the room that they took, and agree on how tensors travel.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.wire.bounds import Address, Few, Handle, Name, Report, Some, Tensors, Text
from rlinf_actors.wire.frame import Frame


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

    dtype: Name
    shape: Few[int]
    requires_grad: bool
    kind: Name
    path: Name
    handle: Handle = b""
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
        store: HOST:PORT of its torch.distributed store. Port 0: its keys travel as LaneKey frames.
        options: options with which its process group is made.
        event: handle of a CUDA event that the receiver waits for before it reads a tensor with the path "ipc".
    """

    sender: int
    n: int
    tensors: Tensors[TensorHeader]
    lane: int = 0
    backend: Name = ""
    store: Address = ""
    options: Few[Union[int, bool, None]] = []
    event: Handle = b""


class UserMessage(Frame, frozen=True, tag=20):
    """One message of a worker by `send` or `broadcast`. The parts of the object follow it.

    Attributes:
        id: id of the sender's outbox on this link.
        n: number of the message in that outbox; the receiver answers with Held. 0 if the sender needs no Held.
        src: name of the sending worker.
        src_id: id of the sending worker.
        stream: "" for `send`; for a broadcast, the name of its tree (messaging.addressing.stream_name), which all its
            members compute. Messages of one sender and stream stay in order.
        size: bytes of the sender's window that the receiver gives back by Returned when user code has the message:
            those of this message, or of earlier ones too, or none (messaging.flow_control).
        transfer: the tensors that travel beside the message, None without tensors.
        unwritten: size of the last part in bytes if the sender still writes it (Written); 0 if all parts are complete.
            The receiver does not answer such a message with Held.
        flow: number of the message's arrow in the trace of the job, 0 if the sender records none.
    """

    id: int
    n: int
    src: Name
    src_id: Name
    stream: Name
    size: int
    transfer: Union[TensorTransfer, None] = None
    unwritten: int = 0
    flow: int = 0


class Held(Frame, frozen=True, tag=21):
    """Acknowledgement: the receiver's runtime has message `n` of outbox `id`, so the sender may reuse its buffers."""

    id: int
    n: int


class Returned(Frame, frozen=True, tag=22):
    """Credit for outbox `id`: messages of `size` bytes were consumed, and the sender may send as much again."""

    id: int
    size: int


class Written(Frame, frozen=True, tag=23):
    """Notice: the first `size` bytes of the last part of message `n` of outbox `id` are written.

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
    device: Name = ""
    memory: Handle = b""
    event: Handle = b""


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
    """

    id: int
    host: Name
    accelerator: Name
    devices: Some[Name]
    backends: Few[Name]
    ipc: bool
    ccl_version: Name = ""
    model: Name = ""
    parent: Name = ""


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
    src_id: Name
    text: Report


class LaneKey(Frame, frozen=True, tag=35):
    """A key that one end of lane `lane` of tensor sender `id` has set in the lane's store, for the other end."""

    id: int
    lane: int
    key: Name
    value: Handle


class BroadcastFailed(Frame, frozen=True, tag=34):
    """Report of member `src` of a broadcast tree to all others: the tree cannot go on. `text` is the reason.

    Attributes:
        stream: names the tree.
        group: number of the process group of the tree that has failed; 0 if the tree itself has failed.
        lost: name of the member with which `src` can exchange no messages; "" if that is not the reason.
    """

    stream: Name
    group: int
    src: Name
    text: Report
    lost: Text = ""
