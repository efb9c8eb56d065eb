"""Buffer: bytes that travel without being interpreted."""

from __future__ import annotations

from typing import Union

Buffer = Union[bytes, bytearray, memoryview]


def keepable(part: Buffer) -> Buffer:
    """Return *part* in a form that its receiver may keep and change.

    Small parts arrive as bytes, from which arrays would be read-only. A view of shared memory whose owner has
    little room left (its exporter has a true ``crowded``) becomes memory of this process.
    """
    if type(part) is bytes or (type(part) is memoryview and getattr(part.obj, "crowded", False)):
        return bytearray(part)
    return part


def lent(part: Buffer) -> bool:
    """True if *part* is a view of memory shared with the process that sent it."""
    return type(part) is memoryview and hasattr(part.obj, "crowded")
