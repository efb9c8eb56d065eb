"""Large parts of one connection, lent instead of sent where both ends share a machine and a user.

After its Join the end that connected offers its arena; each end says whether it could open the other's,
and until it has said so (or if it could not) every part travels in the message. A lent part is
replaced by a line in the header: which lease, where, how long. The receiver's views of it end the lease.
"""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.shared_memory import SHARED_FROM, Arena, Borrowed, Offer
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

MARK = b"\xc1"
"""Begins a header with lent parts: the byte that no MessagePack value begins with."""


class _Leases(msgspec.Struct, frozen=True, array_like=True):
    """What a header says of its lent parts: (index of the part, lease, offset, size in bytes) each."""

    alone: bool
    crowded: bool
    rows: list[tuple[int, int, int, int]]
    header: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Leases).decode


class Lending:
    """Both directions of one connection. `pack` on any thread, the rest on the loop's.

    Args:
        arena: of this process, None to neither lend nor borrow.
        soon: runs a function on the loop; any thread.
        tell: sends a frame to the other end; loop thread.
        peer: the other end, for messages to people.
    """

    def __init__(
        self,
        arena: Arena | None,
        soon: Callable[[Callable[[], object]], object],
        tell: Callable[[frames.AnyFrame], object],
        peer: str,
    ) -> None:
        self._arena = arena
        self._soon = soon
        self._tell = tell
        self._peer = peer
        self._lends = False
        self._borrowed: Borrowed | None = None
        self._offered = False
        self._asked = False
        self._lent: dict[int, Buffer] = {}
        self._numbers = itertools.count(1)
        self._dropped: collections.deque[int] = collections.deque()
        self._telling = False

    @property
    def lent_bytes(self) -> int:
        """Bytes of our arena that the other end has views of."""
        return sum(memoryview(part).nbytes for part in list(self._lent.values()))

    def offer(self) -> bool:
        """Begin: offer our arena to the other end, which is on this machine; False if there is none.

        It answers with a Memory of its own, for `heard`; both ends can be lent to then, or never.
        """
        if self._arena is None:
            return False
        self._say(False)
        return True

    def heard(self, frame: frames.Memory) -> None:
        """The other end said what it has, and whether it opened ours."""
        if self._arena is None:
            if frame.pid:
                self._tell(frames.Memory())
            return
        self._lends = frame.opened
        if not frame.pid or self._asked:
            return
        self._asked = True  # once: what cannot be opened now cannot be opened later
        try:
            self._borrowed = Borrowed(Offer(frame.pid, frame.fd, frame.device, frame.inode, frame.size))
        except (OSError, ValueError) as error:
            log.info("large parts from %s come over the socket: %s", self._peer, error)
        self._say(self._borrowed is not None)

    def _say(self, opened: bool) -> None:
        assert self._arena is not None
        offer = self._arena.offer
        if self._offered:
            self._tell(frames.Memory(opened=opened))
            return
        self._offered = True
        self._tell(frames.Memory(offer.pid, offer.fd, offer.device, offer.inode, offer.size, opened))

    def store(self, parts: Sequence[Buffer]) -> tuple[Sequence[Buffer], bool]:
        """Copy the large parts into shared memory, if the other end can be lent to and there is room. Any thread.

        Returns:
            The parts, and whether all of the large ones are copies: then the caller may change its own.
        """
        arena = self._arena
        if arena is None or not self._lends:
            return parts, False
        stored = list(parts)
        for index, part in enumerate(parts):
            if type(part) is bytes or memoryview(part).nbytes < SHARED_FROM or arena.place(part) is not None:
                continue
            block = arena.store(part)
            if block is None:
                return stored, False
            stored[index] = block
        return stored, True

    def pack(self, header: bytes, parts: Sequence[Buffer], *, alone: bool = True) -> tuple[bytes, Sequence[Buffer]]:
        """The message as it is sent: large parts lent, if the other end can be lent to and there is room.

        Args:
            header, parts: the message.
            alone: whether nobody else is sent these parts; else the receivers' changes are kept apart.
        """
        arena = self._arena
        if arena is None or not self._lends:
            return header, parts
        rows: list[tuple[int, int, int, int]] = []
        kept = list(parts)
        for index, part in enumerate(parts):
            size = len(part) if type(part) is bytes else memoryview(part).nbytes
            if size < SHARED_FROM:
                continue
            offset = arena.place(part)
            if offset is None:
                block = arena.store(part)
                offset = None if block is None else arena.place(block)
                if block is None or offset is None:
                    continue
                part = block
            lease = next(self._numbers)
            self._lent[lease] = part
            kept[index] = b""
            rows.append((index, lease, offset, size))
        if not rows:
            return header, parts
        return MARK + _encode(_Leases(alone, arena.crowded, rows, header)), kept

    def unpack(self, header: bytes, parts: list[Buffer]) -> bytes:
        """Put views of the lent parts in their places in *parts*; returns the header without them.

        Raises:
            RemoteWireError: the header names what is not there.
        """
        if header[:1] != MARK:
            return header
        try:
            leases = _decode(memoryview(header)[1:])
            if self._borrowed is None:
                raise ValueError("it was never opened")
            for index, lease, offset, size in leases.rows:
                parts[index] = self._borrowed.view(
                    offset,
                    size,
                    leases.alone,
                    leases.crowded,
                    lambda lease=lease: self._drop(lease),  # type: ignore[misc]
                )
        except (msgspec.DecodeError, ValueError, IndexError) as error:
            raise RemoteWireError(f"lent parts that are not in the sender's memory: {error}") from None
        return leases.header

    def dropped(self, frame: frames.Dropped) -> None:
        """The other end has no view of these any more."""
        for lease in frame.leases:
            self._lent.pop(lease, None)

    def borrower_gone(self) -> None:
        """The other end's process has ended: what it was lent is free. What it sent before may still come."""
        self._lends = False
        self._lent.clear()

    def close(self) -> None:
        """Nothing more comes from the other end. Views of its memory stay as they are."""
        self.borrower_gone()
        self._arena = None
        self._borrowed = None

    def _drop(self, lease: int) -> None:
        """The last view of a part was collected: on any thread, with any lock held."""
        self._dropped.append(lease)
        if not self._telling:
            self._telling = True
            self._soon(self._tell_dropped)

    def _tell_dropped(self) -> None:
        self._telling = False
        leases = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if leases and self._arena is not None:
            self._tell(frames.Dropped(leases))
