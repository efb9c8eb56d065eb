"""Buffer, the type of bytes that are sent and received without interpretation, and functions for received buffers."""

from __future__ import annotations

from typing import Union

Buffer = Union[bytes, bytearray, memoryview]


def keepable(part: Buffer) -> Buffer:
    """Return a received buffer, or a copy of it, so that its receiver may change it and keep it for long.

    ``bytes`` are copied because arrays over them would be read-only. A view of the sender's shared memory is copied if
    that memory is nearly full (``crowded`` of the view's exporter is true), so that the sender gets its memory back.
    """
    if type(part) is bytes or (type(part) is memoryview and getattr(part.obj, "crowded", False)):
        return bytearray(part)
    return part


def lent(part: Buffer) -> bool:
    """Return True if *part* is a view of memory that its sender shares with this process."""
    return type(part) is memoryview and hasattr(part.obj, "crowded")
