"""Encode an object as the parts of a message, and check objects and tensors before and after they are sent."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.shared_memory import SHARED_FROM
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts

LARGE = SHARED_FROM
"""Size in bytes from which a part is not copied when it is sent: the link reads the sender's own memory."""

_FAILED = b"!"
"""First byte of a broadcast message that holds an error instead of an object. No pickle begins with this byte."""


def check_contiguous(value: Any, what: str = "object") -> None:
    """Raise ValueError if *value*, or a direct entry of a list, dict or dataclass, is a tensor that is not contiguous.

    Tensors deeper in the object are made contiguous when they are sent. *what* names the object in the error text.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return
    tensor, strided = torch.Tensor, torch.strided
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, tensor):
        parts = (("", value),)
    elif isinstance(value, list):
        parts = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = [(f".{name}", getattr(value, name)) for name in names]
    for key, part in parts:  # every object that is sent: no call for each entry
        if isinstance(part, tensor) and part.layout is strided and not part.is_contiguous() and not part.is_nested:
            place = f"{what}[{key!r}]" if isinstance(value, (list, dict)) else f"{what}{key}"
            raise ValueError(
                f"{place} is a tensor of shape {tuple(part.shape)} and strides {part.stride()}, which is not "
                f"contiguous: send {place}.contiguous()"
            )


def check_tensor(tensor: Any, what: str) -> None:
    """Raise TypeError unless *tensor* is a torch tensor. *what* names the caller's function in the error text."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} takes a torch.Tensor, not {type(tensor).__name__}; send() takes any object")


def encode(value: Any, piggyback: Any = None, taker: payload.Taker | None = None) -> tuple[list[Buffer], bool]:
    """Return the message parts of an object, and True if a part is the sender's own memory instead of a copy.

    Args:
        value: the object.
        piggyback: second object to send in the same message; None for none.
        taker: detaches the tensors that travel beside the message.

    Raises:
        SerializationError: a part of the object cannot be pickled; the text names the part's path in the object.
    """
    if piggyback is not None:
        parts = payload.encode((value, piggyback), "(object, piggyback_payload)", copy=None, taker=taker)
    elif isinstance(value, BaseException):
        parts = failure.encode_exception(value)
    else:
        parts = payload.encode(value, "object", copy=None, taker=taker)
    return copy_small(parts)


def encode_failure(error: BaseException) -> tuple[list[Buffer], bool]:
    """Encode *error* as the message that a broadcast's source sends instead of its object. `failure_in` decodes it.

    Return the message parts, and True if a part is the sender's own memory instead of a copy.
    """
    raised, parts = failure.encode(0, error)
    return copy_small([_FAILED + frames.encode(raised), *parts])


def failure_in(parts: AuthenticatedParts, source: WorkerAddress, node: str) -> Exception | None:
    """Return the error in *parts* as a WorkerError of *source* on *node*; None if *parts* hold an object.

    May unpickle the error: do not call it on the loop thread.
    """
    if not parts or bytes(parts[0][:1]) != _FAILED:
        return None
    raised = frames.decode(bytes(parts[0][1:]))
    assert isinstance(raised, frames.Raised)
    return failure.decode(raised, parts.cut(1), worker=source.get_name(), rank=source.rank, node=node)


def copy_small(parts: Sequence[Buffer]) -> tuple[list[Buffer], bool]:
    """Return *parts* with every part below `LARGE` bytes copied, and True if at least one part was not copied."""
    kept: list[Buffer] = []
    large = False
    for part in parts:
        if type(part) is bytes:
            kept.append(part)
        elif memoryview(part).nbytes < LARGE:
            kept.append(bytes(part))
        else:
            kept.append(part)
            large = True
    return kept, large


def size_of(parts: Sequence[Buffer]) -> int:
    size = 0
    for part in parts:
        size += len(part) if type(part) is bytes else memoryview(part).nbytes
    return size


def check_into(target: Any, received: Any, sender: str) -> None:
    """Check that *received* is a tensor like the tensor *target*. *sender* is named in error texts.

    Raises:
        TypeError: *received* is not a tensor.
        ValueError: shape or dtype differ.
    """
    import torch

    if not isinstance(received, torch.Tensor):
        raise TypeError(f"recv_tensor() got a {type(received).__name__} from {sender}: it was sent by send()?")
    if received.shape != target.shape or received.dtype != target.dtype:
        raise ValueError(
            f"{sender} sent a tensor of shape {tuple(received.shape)} and {received.dtype}, and recv_tensor() was "
            f"given one of shape {tuple(target.shape)} and {target.dtype}"
        )


def is_plain(tensor: Any) -> bool:
    """Return True if the memory of *tensor* holds its values in order, on the CPU."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() and not lazy)


def copy_into(target: Any, received: Any, sender: str) -> None:
    """Copy the tensor *received* into the tensor *target*, for Worker.recv_tensor.

    Raises the errors of `check_into`; *target* is then unchanged.
    """
    import torch

    check_into(target, received, sender)
    if is_plain(target) and is_plain(received):
        # not torch's copy, whose several threads wait for one another on busy cores; memmove also frees the GIL
        ctypes.memmove(target.data_ptr(), received.data_ptr(), received.numel() * received.element_size())
        return
    with torch.no_grad():
        target.copy_(received)
