"""Buffer, the type of bytes that are sent and received without interpretation, and functions for buffers."""

from __future__ import annotations

from typing import Any, Union

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


def constant(part: memoryview) -> bool:
    """Return True if *part* is read-only, and so is everything that it is a view of."""
    owner: Any = part
    while owner is not None and not isinstance(owner, bytes):
        try:
            if not memoryview(owner).readonly:
                return False
        except (TypeError, ValueError, BufferError):  # it does not tell
            return False
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return True
