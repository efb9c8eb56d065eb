"""Buffer: what travels without being looked into."""

from __future__ import annotations

from typing import Union

Buffer = Union[bytes, bytearray, memoryview]


def keepable(part: Buffer) -> Buffer:
    """*part* as its receiver may keep and change it.

    Small parts arrive as bytes, from which arrays would be read-only. A view of shared memory whose owner has
    little room left (its exporter says so by a true ``crowded``) becomes memory of this process.
    """
    if type(part) is bytes or (type(part) is memoryview and getattr(part.obj, "crowded", False)):
        return bytearray(part)
    return part


def lent(part: Buffer) -> bool:
    """Whether *part* is a view of memory that it shares with the process that sent it."""
    return type(part) is memoryview and hasattr(part.obj, "crowded")
