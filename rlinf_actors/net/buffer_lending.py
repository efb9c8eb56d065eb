"""Lends large message parts in shared memory instead of sending them, if both ends run on one machine as one user.

An arena is the shared memory of one process. After Join, the first frame of a connection, the process that connects
offers its arena by a Memory frame, and the other process answers with its own. Each reports whether it could open the
other's arena; before that, or if it could not, every part travels in the message. A unix stream passes the arena's
descriptor with the offer; over ZeroMQ the receiver opens it in /proc. A lent part is replaced by a row in
the header: lease, offset and size. When the receiver's last view of a part is gone, the receiver reports the lease by a
Dropped frame, and the owner frees the block.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from rlinf_actors import counters
from rlinf_actors.errors import RemoteWireError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.net.descriptors import descriptor_of
from rlinf_actors.net.further_arenas import FurtherArenas
from rlinf_actors.net.shared_memory import SHARED_FROM, Arena, Borrowed, Offer, kept
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

MARK = b"\xc1"
"""First byte of a header with lent parts. No MessagePack value begins with this byte."""


class _Leases(msgspec.Struct, frozen=True, array_like=True):
    """The header of a message whose large parts are lent, not sent.

    Attributes:
        alone: True if no other process borrows the same parts, so that the receiver may write to them.
        crowded: True to ask the receiver to copy the parts soon, because more than half of the sender's arena is in
            use.
        rows: (index of the part, lease, offset in the sender's arena, size in bytes) of each lent part.
        header: the message's own header.
        further: (index, lease, offset, size, arena number) of each part that lies in a further arena of the sender.
    """

    alone: bool
    crowded: bool
    rows: list[tuple[int, int, int, int]]
    header: bytes
    further: list[tuple[int, int, int, int, int]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Leases).decode


def lent(header: bytes) -> tuple[bytes, int]:
    """Return the message's own header in *header*, and the number of bytes that are lent with the message."""
    if header[:1] != MARK:
        return header, 0
    leases = _decode(memoryview(header)[1:])
    return leases.header, sum(row[3] for row in (*leases.rows, *leases.further))


def own_header(header: bytes) -> bytes:
    """Return the message's own header in *header*. Raises RemoteWireError if *header* is malformed."""
    try:
        return lent(header)[0]
    except msgspec.DecodeError as error:
        raise RemoteWireError(f"a malformed header of lent parts: {error}") from None


def _count_by_link(part: Buffer) -> None:
    size = len(part) if type(part) is bytes else memoryview(part).nbytes
    if size >= SHARED_FROM:
        counters.sent("pieces", size)


class Lending:
    """Lends large parts of one connection's messages to the peer in shared memory, and opens the parts that the peer
    lends.

    `pack`, `store` and `dropped` may be called on any thread, the other methods on the loop's thread only.

    Args:
        arena: this process's shared memory; None to neither lend nor borrow.
        soon: runs a function on the loop; callable on any thread.
        send: sends a frame to the peer, with parts if they are given; loop thread.
        peer: name of the peer, for logs.
    """

    def __init__(
        self,
        arena: Arena | None,
        soon: Callable[[Callable[[], object]], object],
        send: Callable[..., object],
        peer: str,
    ) -> None:
        self._arena = arena
        self._soon = soon
        self._send = send
        self._peer = peer
        self._lends = False
        self._borrowed: Borrowed | None = None
        self._offered = False
        self._opened = False
        self._lent: dict[int, Buffer] = {}
        self._lent_before: list[Buffer] = []  # on earlier links to the same process
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []
        self._reporting = False
        self._further: FurtherArenas | None = None  # made when the peer has said that it is on this machine

    @property
    def lent_bytes(self) -> int:
        """Number of bytes that are lent to the peer and that the peer has not returned yet."""
        return sum(memoryview(part).nbytes for part in list(self._lent.values()))

    def offer(self) -> bool:
        """Offer this process's arena to the peer by a Memory frame. Return False if this process has no arena.

        The peer answers with a Memory frame, for which the caller calls `heard`.
        """
        if self._arena is None:
            return False
        self._answer(False)
        return True

    def heard(self, frame: frames.Memory, parts: Sequence[Buffer] = ()) -> None:
        """Handle the peer's Memory frame, with its *parts*.

        If the frame offers the peer's arena, open that arena and report to the peer whether this succeeded. If the
        frame says that the peer has opened this process's arena, lend large parts to the peer from now on.
        """
        if self._arena is None:
            if frame.pid:
                self._send(frames.Memory())
            return
        if self._further is None:
            self._further = FurtherArenas(self._arena, self._soon, self._send, self._peer)
        self._lends = frame.opened
        if not frame.pid or self._opened:
            return
        self._opened = True  # once: an arena that cannot be opened now cannot be opened later
        try:
            offer = Offer(frame.pid, frame.fd, frame.device, frame.inode, frame.size)
            passed = descriptor_of(parts[0]) if parts else None
            self._borrowed = Borrowed(offer, None if passed is None else passed.take())
        except (OSError, ValueError) as error:
            log.info("large parts from %s come over the socket: %s", self._peer, error)
        self._answer(self._borrowed is not None)

    def _answer(self, opened: bool) -> None:
        assert self._arena is not None
        offer = self._arena.offer
        if self._offered:
            self._send(frames.Memory(opened=opened))
            return
        self._offered = True
        memory = frames.Memory(offer.pid, offer.fd, offer.device, offer.inode, offer.size, opened)
        self._send(memory, self._arena.descriptors())

    def store(self, parts: Sequence[Buffer]) -> tuple[Sequence[Buffer], bool]:
        """Copy large parts into this process's arena before they are sent, if the peer can borrow and the arena has
        room. Any thread.

        Returns:
            The parts, with the copies in place of the originals; and True if the caller may change its buffers now,
            because every large part that could change has been copied.
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

    def allocate(self, size: int) -> memoryview | None:
        """Return a block of this process's arena that the caller writes after the message that lends it. Any thread.

        None if the peer does not borrow, or the arena has no room.
        """
        arena = self._arena
        return arena.allocate(size) if arena is not None and self._lends else None

    def heard_further(self, frame: frames.Shown | frames.Opened | frames.Hidden, parts: Sequence[Buffer] = ()) -> None:
        """Handle a frame of the peer, with its *parts*, about a further arena. Ignore it before the peer's Memory."""
        if self._further is not None:
            self._further.heard(frame, parts)

    def pack(
        self, header: bytes, parts: Sequence[Buffer], *, alone: bool = True, give: bool = False
    ) -> tuple[bytes, Sequence[Buffer]]:
        """Return the header and parts to send to the peer. Any thread.

        If the peer can borrow and the arena has room, large parts are lent: b"" is sent in their place, and the
        returned header says where they lie in the arena.

        Args:
            header: the message's header.
            parts: the message's parts.
            alone: True if these parts are sent to no other peer. If False, a receiver that writes to a part changes
                only its own copy.
            give: True to hand the parts over, if the peer accepts that: the peer then keeps them without a copy.
        """
        arena, more = self._arena, self._further
        if arena is None or more is None or not self._lends:
            for part in parts:
                _count_by_link(part)
            return header, parts
        rows: list[tuple[int, int, int, int]] = []
        further: list[tuple[int, int, int, int, int]] = []
        crowded = arena.crowded
        sent = list(parts)
        for index, part in enumerate(parts):
            size = len(part) if type(part) is bytes else memoryview(part).nbytes
            if size < SHARED_FROM:
                continue
            found = more.place(part, give) if give or kept(part) is not None else None
            if found is not None:
                part, number, place, little_left = found
                lease = next(self._numbers)
                self._lent[lease] = part
                sent[index] = b""
                further.append((index, lease, place, size, number))
                counters.sent("shared", size)
                crowded |= little_left
                continue
            offset = arena.place(part)
            if offset is None:
                block = arena.store(part)
                offset = None if block is None else arena.place(block)
                if block is None or offset is None:
                    counters.sent("pieces", size)
                    continue
                part = block
            lease = next(self._numbers)
            self._lent[lease] = part
            sent[index] = b""
            rows.append((index, lease, offset, size))
            counters.sent("shared", size)
        if not rows and not further:
            return header, parts
        return MARK + _encode(_Leases(alone, crowded, rows, header, further)), sent

    def unpack(self, header: bytes, parts: list[Buffer]) -> bytes:
        """Replace the lent parts of a received message by views of the peer's arena. Return the message's own header.

        *parts* is changed in place.

        Raises:
            RemoteWireError: the header names bytes that are not in the peer's arena.
        """
        if header[:1] != MARK:
            return header
        try:
            leases = _decode(memoryview(header)[1:])
            rows = [(*row, 0) for row in leases.rows]
            for index, lease, offset, size, number in [*rows, *leases.further]:
                source = self._borrowed
                if number and self._further is not None:
                    source = self._further.opened(number)
                if source is None:
                    raise ValueError("it was never opened")
                ended = functools.partial(self._drop, lease)
                view = source.view(offset, size, leases.alone, leases.crowded, ended)
                parts[index] = view
        except (msgspec.DecodeError, ValueError, IndexError) as error:
            raise RemoteWireError(f"lent parts that are not in the sender's memory: {error}") from None
        return leases.header

    def dropped(self, frame: frames.Dropped) -> None:
        """Handle the peer's Dropped frame: the peer no longer uses some lent parts, so free their
        blocks in the arena.
        """
        for lease in frame.leases:
            self._lent.pop(lease, None)

    def borrower_gone(self) -> None:
        """Free all parts that are lent to the peer, because the peer's process has ended. Lend no more to that peer.

        Messages that the peer sent before its end can still be unpacked.
        """
        self._lends = False
        self._lent.clear()
        self._lent_before.clear()

    def succeed(self, earlier: Lending | None) -> None:
        """Take over what *earlier* has lent to the same process, on a link whose connection was lost; None for nothing.

        That process lives and may still read it, and cannot report any more when it does not. So these blocks are used
        again after its end only.
        """
        if earlier is None:
            return
        earlier._lends = False
        self._lent_before += [*earlier._lent_before, *earlier._lent.values()]
        earlier.borrower_gone()

    def close(self, *, lost: bool = False) -> None:
        """Stop lending and borrowing on this connection. Views of the peer's arena that exist already stay valid.

        *lost*: True if only the connection is gone: what is lent stays so, for `succeed`.
        """
        if lost:
            self._lends = False
        else:
            self.borrower_gone()
        if self._further is not None:
            self._further.close()
        self._arena = None
        self._borrowed = None

    def _drop(self, lease: int) -> None:
        # the last view of a part was collected: on any thread, with any lock held
        self._dropped.append(lease)
        if not self._reporting:
            self._reporting = True
            self._soon(self._report_dropped)

    def _report_dropped(self) -> None:
        self._reporting = False
        leases = self._dropped[:]
        del self._dropped[: len(leases)]  # other threads append meanwhile
        if leases and self._arena is not None:
            self._send(frames.Dropped(leases))
