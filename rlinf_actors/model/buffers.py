"""Buffer: bytes that are sent and received without interpretation."""

from __future__ import annotations

from typing import Union

Buffer = Union[bytes, bytearray, memoryview]


def keepable(part: Buffer) -> Buffer:
    """Return *part*, copied if necessary, so that its receiver may keep and change it.

    Bytes are copied because arrays over them would be read-only. A view of shared memory whose owner has little room
    left (the view's exporter has a true ``crowded``) is copied so that the owner gets its memory back.
    """
    if type(part) is bytes or (type(part) is memoryview and getattr(part.obj, "crowded", False)):
        return bytearray(part)
    return part


def lent(part: Buffer) -> bool:
    """True if *part* is a view of memory that is shared with the process that sent it."""
    return type(part) is memoryview and hasattr(part.obj, "crowded")
