"""A dense tensor's bytes as a buffer, without numpy: torch comes without it, and no tensor has the buffer protocol.

They are in the machine's byte order; see `frames.Join`.

Any thread.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from rlinf_actors.model.buffers import Buffer

_PINNED = 1 << 20
"""What comes from an accelerator is copied into page-locked memory from this size on; torch keeps that."""


class _Memory(ctypes.Array):  # type: ignore[type-arg]
    """A tensor's memory as an exporter of buffers: views of it keep the tensor, and with it the memory."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    tensor: Any = None
    private = False


@functools.lru_cache(maxsize=64)
def _kind(bits: int) -> Any:
    return type("_Memory", (_Memory,), {"_length_": 1 << bits})  # of powers of two: a type a length would be many


def bytes_of(tensor: Any) -> Buffer:
    """Return a dense tensor's bytes: a view of a contiguous one on the CPU, else of a copy; b"" if it is empty."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return b""
    raw = flat.view(torch.uint8)
    if tensor.device.type == "cpu":
        return _exported(raw, raw.data_ptr() != tensor.data_ptr())
    staged = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=raw.numel() >= _PINNED)
    staged.copy_(raw)
    return _exported(staged, True)


def _exported(raw: Any, private: bool) -> memoryview:
    size = raw.numel()
    memory = _kind((size - 1).bit_length()).from_address(raw.data_ptr())  # may reach too far: nothing reads beyond size
    memory.tensor, memory.private = raw, private
    return memoryview(memory).cast("B")[:size]


def is_private(part: memoryview) -> bool:
    """True if only *part* refers to its memory, a copy that `bytes_of` made: nobody can change it."""
    return isinstance(part.obj, _Memory) and part.obj.private
