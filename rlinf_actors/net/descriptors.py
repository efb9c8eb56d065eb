"""File descriptors as parts of messages, between processes of one machine.

A `Descriptor` is an empty buffer. A unix stream passes the file descriptor along with the message, so the receiver
finds a Descriptor of its own in the same place. Every other transport sends an empty part.
"""

from __future__ import annotations

import ctypes
import os

from rlinf_actors.model.buffers import Buffer


class Descriptor(ctypes.Array):  # type: ignore[type-arg]
    """An empty buffer that owns a file descriptor, and closes it when it is collected."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    fd = -1

    def take(self) -> int:
        """Return the file descriptor, which the caller closes. -1 if it was taken before."""
        fd, self.fd = self.fd, -1
        return fd

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.take())


def part_of(fd: int) -> memoryview:
    """Return a part that owns *fd*."""
    descriptor = Descriptor()
    descriptor.fd = fd
    return memoryview(descriptor).cast("B")


def descriptor_of(part: Buffer) -> Descriptor | None:
    """Return the Descriptor of which *part* is a view, None if it is another part."""
    if type(part) is memoryview and part.nbytes == 0 and isinstance(part.obj, Descriptor):
        return part.obj
    return None
