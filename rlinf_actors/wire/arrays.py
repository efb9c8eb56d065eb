"""The memory of tensors and arrays as buffers, and messages that are one tensor or one array.

Such a message is not pickled: that would take longer than to copy a MiB. Its first part is the form, and a MessagePack
of what the array is; the second part is its bytes:

    T  [dtype, shape, requires_grad] of a torch tensor on the CPU      N  [dtype, shape] of a numpy array

`payload.decode` reads these forms. All else is pickled: objects that contain arrays, and arrays that are not
contiguous, or of other classes or dtypes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import msgspec

from rlinf_actors.model.buffers import Buffer, constant, keepable

_ADDED = 2
"""`isbuiltin` of the dtypes that other packages add to numpy (ml_dtypes' float8_e5m2): no name describes them."""
_PINNED = 1 << 20
"""Bytes from which a copy from an accelerator uses page-locked memory, which torch caches."""
_NUMBERS = frozenset("biufc")
"""Kinds of numpy's dtypes that a name describes wholly."""

_pack = msgspec.msgpack.Encoder().encode
_tensor_facts = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bool]).decode
_array_facts = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]]).decode


class TensorMemory(ctypes.Array):  # type: ignore[type-arg]
    """Buffer over the memory of a tensor, which has no buffer protocol, or of a read-only array: the owner.

    Views of it keep the owner alive.
    """

    _type_ = ctypes.c_ubyte
    _length_ = 0
    owner: Any = None
    private = False
    given: Any = None  # weak reference to the GivenMemory, if a receive has given this memory


@functools.lru_cache(maxsize=64)
def _kind(bits: int) -> Any:
    # of powers of two: a type for each length would be many
    return type("TensorMemory", (TensorMemory,), {"_length_": 1 << bits})


def bytes_of(tensor: Any) -> Buffer:
    """Return the bytes of a dense tensor; b"" if it is empty.

    The result is a view of the tensor's memory if the tensor is contiguous and on the CPU, otherwise a view of a copy.
    """
    import torch

    if not tensor.numel():
        return b""
    if tensor.device.type == "cpu":
        if tensor.is_contiguous():
            return _exported(tensor, private=False)
        return _exported(tensor.detach().contiguous(), private=True)
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    staged = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=raw.numel() >= _PINNED)
    staged.copy_(raw)
    return _exported(staged, private=True)


def unmarked(raw: memoryview, array: Any) -> memoryview:
    """Return the bytes *raw* of a read-only numpy array as a view that does not say that they are read-only.

    Pickle would pass that on, and the array would arrive read-only. Nothing may write to the view.
    """
    return _memory(array, array.__array_interface__["data"][0], raw.nbytes, private=constant(raw))


def _exported(tensor: Any, *, private: bool) -> memoryview:
    """Return a view of the memory of a tensor that is contiguous, on the CPU and not empty."""
    return _memory(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size(), private=private)


def _memory(owner: Any, address: int, size: int, *, private: bool) -> memoryview:
    memory = _kind((size - 1).bit_length()).from_address(address)  # may be too long: nothing reads beyond
    memory.owner, memory.private = owner, private
    return memoryview(memory).cast("B")[:size]


def is_private(part: memoryview) -> bool:
    """True if no code can change the memory of *part*, which is a copy that `bytes_of` made, or read-only."""
    owner = part.obj.obj if isinstance(part.obj, memoryview) else part.obj  # a PickleBuffer makes a view of the view
    return isinstance(owner, TensorMemory) and owner.private


def encode(value: Any) -> list[Buffer] | None:
    """Return a plain tensor or array as two parts, the second a view of its memory; None if *value* is anything else.

    None also for a tensor that is not on the CPU, or has no elements, or has attributes of its own.
    """
    kind = type(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and kind is getattr(torch, "Tensor", None):
        if not value.is_cpu or value.layout is not torch.strided or not value.is_contiguous() or not value.numel():
            return None
        if value.is_quantized or value.is_conj() or value.is_neg() or value.is_nested or value.__dict__:
            return None
        try:
            memory = _exported(value, private=False)
        except RuntimeError:  # no memory of its own, inside of a function that torch transforms: pickling says that
            return None
        name = str(value.dtype).removeprefix("torch.")
        return [b"T" + _pack((name, tuple(value.shape), value.requires_grad)), memory]
    if numpy is None or kind is not getattr(numpy, "ndarray", None):
        return None
    dtype = value.dtype
    if not value.flags.c_contiguous or not value.size or dtype.kind not in _NUMBERS or dtype.metadata is not None:
        return None
    if dtype.isbuiltin == _ADDED:
        return None
    return [b"N" + _pack((dtype.str, value.shape)), memoryview(value.reshape(-1).view(numpy.uint8))]


def tensor(head: Buffer, part: Buffer) -> Any:
    """Return the tensor of a message of form T, over the memory of *part* if that can be written to."""
    import torch

    name, shape, requires_grad = _tensor_facts(memoryview(head)[1:])
    kind = getattr(torch, name)
    flat = torch.frombuffer(keepable(part), dtype=kind)
    if kind is torch.complex128 and flat.data_ptr() % 16:
        flat = flat.clone()  # torch uses instructions that want 16 bytes; a ZeroMQ frame's data begins at any 8
    made = flat if len(shape) == 1 else flat.view(shape)
    return made.requires_grad_() if requires_grad else made


def array(head: Buffer, part: Buffer) -> Any:
    """Return the numpy array of a message of form N, over the memory of *part* if that can be written to."""
    import numpy

    dtype, shape = _array_facts(memoryview(head)[1:])
    flat = numpy.frombuffer(keepable(part), dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)
