"""The transfers of `net.bulk` at their two ends: where the bytes of each piece come from, and where they belong.

Not thread-safe: the link's lock protects them. The bytes of a piece are read and written without the lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk_framing import PieceHeader, Received
from rlinf_actors.net.receive_memory import ReceiveMemory

_ZEROS = bytes(framing.ALIGN)


class Outgoing:
    """A transfer that this process sends. It refers to the parts until the receiver has them all."""

    def __init__(self, number: int, parts: Sequence[Buffer]) -> None:
        self.parts = [memoryview(part).cast("B") for part in parts]
        self._regions = framing.regions_of([part.nbytes for part in self.parts])
        self.pieces = framing.pieces_of(number, self._regions)

    def buffers(self, header: PieceHeader) -> list[Buffer]:
        """Return the bytes of a piece, without a copy."""
        region = self._regions[header.region]
        if len(region.parts) == 1:
            return [self.parts[region.parts[0][0]][header.offset : header.offset + header.size]]
        found: list[Buffer] = []
        end = 0
        for index, start, size in region.parts:
            if start > end:
                found.append(_ZEROS[: start - end])
            found.append(self.parts[index])
            end = start + size
        return found


class Incoming:
    """A transfer that this process receives.

    Args:
        rows: index in the message and size in bytes of each part.
        memory: allocates the places of the parts.

    Attributes:
        size: size of all parts in bytes.
        complete: True if all parts are there.
    """

    def __init__(self, rows: Sequence[tuple[int, int]], memory: ReceiveMemory) -> None:
        sizes = [size for _, size in rows]
        self.size = sum(sizes)
        regions = framing.regions_of(sizes)
        self.pieces = Received(regions)
        self.complete = False
        self._rows = rows
        self._regions = [memory.take(region.size) for region in regions]
        self._parts: list[Buffer] = [b""] * len(sizes)
        for region, view in zip(regions, self._regions, strict=True):
            for index, start, size in region.parts:
                self._parts[index] = view[start : start + size]

    def place(self, header: PieceHeader) -> AbstractContextManager[memoryview]:
        return contextlib.nullcontext(self._regions[header.region][header.offset : header.offset + header.size])

    def complete_with(self, parts: list[Buffer]) -> None:
        """Use parts that came by the link instead."""
        if [memoryview(part).nbytes for part in parts] != [size for _, size in self._rows]:
            raise RemoteWireError("parts of another size than announced")
        self._parts, self.complete = parts, True

    def put_into(self, parts: list[Buffer]) -> None:
        """Put the parts of the transfer into the list of all parts of the message."""
        for (index, _), part in zip(self._rows, self._parts, strict=True):
            parts[index] = part
