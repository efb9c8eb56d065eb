"""The transfers of `net.bulk` at their two ends: where the bytes of each piece come from, and where they belong.

Not thread-safe: the link's lock protects them. The bytes of a piece are read and written without the lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net import bulk_framing as framing
from rlinf_actors.net.bulk_framing import PieceHeader, Received
from rlinf_actors.net.receive_memory import ReceiveMemory

_ZEROS = bytes(framing.ALIGN)


class GivenMemory:
    """Memory that a receive has given for the only large part of a message, until it takes it back. Any thread.

    Attributes:
        memory: where the part is, or will be.
        given: False once the memory was taken back.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.given = memory, True
        self._changed = threading.Condition()
        self._writers = 0
        self._moving = self._finished = self._dropped = False

    def finish(self) -> None:
        """Let nothing write any more, because the part is complete."""
        with self._changed:
            self._finished = True
            self._changed.wait_for(lambda: not self._writers)

    def drop(self) -> None:
        """Record that the transfer has ended early: nothing that has arrived is needed."""
        self._dropped = self._finished = True

    def take_back(self) -> None:
        """Move what has arrived to other memory, where the rest will arrive, too. Idempotent.

        Afterwards nothing writes to the memory that was given. If there is no other memory, or the transfer was dropped
        (`drop`), nothing is moved: further pieces are refused, and the sender sends the message by the link.
        """
        with self._changed:
            self._moving = True
            try:
                self._changed.wait_for(lambda: not self._writers)
                if self.given and not self._dropped:
                    self.memory = memoryview(bytearray(self.memory))
            except MemoryError:
                if self._finished:
                    raise  # the message is complete, and another receive gets it
                self._finished, self.memory = True, memoryview(b"")
            finally:
                self.given = False
                self._moving = False
                self._changed.notify_all()


class _Writing:
    """Context in which one thread writes a piece to the memory of a GivenMemory."""

    __slots__ = ("_given", "_header")

    def __init__(self, given: GivenMemory, header: PieceHeader) -> None:
        self._given, self._header = given, header

    def __enter__(self) -> memoryview:
        given, header = self._given, self._header
        with given._changed:
            given._changed.wait_for(lambda: not given._moving)
            if given._finished:
                raise RemoteWireError("a piece of a transfer that is complete")
            given._writers += 1
            return given.memory[header.offset : header.offset + header.size]

    def __exit__(self, *_error: object) -> None:
        with self._given._changed:
            self._given._writers -= 1
            self._given._changed.notify_all()


TargetFor = Callable[[bytes, Sequence[Buffer], int, Callable[[], None]], GivenMemory | None]
"""Returns the memory that a receive has for the last part of the message that is delivered next, None if none has.

Called on the loop with the message's header, its parts, of which the last is missing, and the size of the last. The
fourth argument is to be called on the loop when a receive has memory later: it asks again.
"""
LATE_PIECES = 8
"""Most pieces that may have begun to arrive when a receive gives its memory. They are copied there, on the loop."""


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
        given: the place of the part, if there is only one and a receive has given memory for it.
        lone: True if there is only one part, the last of the message, so that a receive may give memory later.

    Attributes:
        size: size of all parts in bytes.
        complete: True if all parts are there.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        memory: ReceiveMemory,
        given: GivenMemory | None = None,
        lone: bool = False,
    ) -> None:
        sizes = [size for _, size in rows]
        self.size = sum(sizes)
        regions = framing.regions_of(sizes)
        self.pieces = Received(regions)
        self.complete = False
        self._rows = rows
        self._given = given
        self._lone = lone
        self._begun: set[PieceHeader] = set()  # pieces of a lone part that are not in memory that was given
        self._regions = [memory.take(region.size) for region in regions] if given is None else [given.memory]
        self._parts: list[Buffer] = [b""] * len(sizes)
        for region, view in zip(regions, self._regions, strict=True):
            for index, start, size in region.parts:
                self._parts[index] = view[start : start + size]

    @property
    def wants_memory(self) -> bool:
        """True if a receive may still give memory for the part."""
        return self._lone and self._given is None and not self.complete and len(self._begun) <= LATE_PIECES

    def give(self, given: GivenMemory) -> None:
        """Let all pieces that have not begun to arrive go to memory that a receive gives. Loop thread."""
        self._given = given

    def place(self, header: PieceHeader) -> AbstractContextManager[memoryview]:
        if self._given is not None and header not in self._begun:
            return _Writing(self._given, header)
        if self._lone:
            self._begun.add(header)
        return contextlib.nullcontext(self._regions[header.region][header.offset : header.offset + header.size])

    def drop(self) -> None:
        """Record that the transfer has ended early."""
        if self._given is not None:
            self._given.drop()

    def complete_with(self, parts: list[Buffer]) -> None:
        """Use parts that came by the link instead."""
        if [memoryview(part).nbytes for part in parts] != [size for _, size in self._rows]:
            raise RemoteWireError("parts of another size than announced")
        if self._given is not None:
            self._given.take_back()  # pieces may still arrive
            self._given = None
        self._parts, self.complete = parts, True

    def put_into(self, parts: list[Buffer]) -> None:
        """Put the parts of the transfer into the list of all parts of the message. Loop thread."""
        if self._given is not None:
            for piece in self._begun:
                with _Writing(self._given, piece) as memory:
                    memory[:] = self._regions[0][piece.offset : piece.offset + piece.size]
            self._given.finish()
            self._parts = [self._given.memory]
        for (index, _), part in zip(self._rows, self._parts, strict=True):
            parts[index] = part
