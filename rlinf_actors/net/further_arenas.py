"""FurtherArenas: shared memory on one connection besides the arenas of the two processes; for large channel items.

A producer writes a large item once, into an arena that it has made for one connection to one channel host, and hands
the block over: it neither writes to the block nor uses it for another item until the host releases it. The host keeps
the arena open and mapped, so the item outlives its producer, and shows the arena to consumers, which map the same
block. So nobody copies the item again. The host releases a block when the item was acknowledged and no consumer has a
view of it; the producer then uses the block again, whose pages are warm.

If the connection is lost or closed, the producer never uses the arena again, and makes another one for the next
connection. The host frees the memory of each block of the abandoned arena when its last view ends. So no party has to
know what another one still reads.

A producer that breaks these rules can change items that it has put, because the kernel cannot take a mapping away from
a process. Members of a job trust one another, and can open the host's memory anyway.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from rlinf_actors.model.buffers import Buffer, lent
from rlinf_actors.net.descriptors import descriptor_of
from rlinf_actors.net.shared_memory import Arena, Borrowed, Offer, kept
from rlinf_actors.wire import frames

log = logging.getLogger(__name__)

GIVEN = 1
"""Number of the arena whose blocks this process hands over. Greater numbers are arenas that were handed over to it."""
MOST = 1000
"""Most further arenas that are opened for one peer."""


def owned(part: Buffer, copy: Callable[[Buffer], Buffer]) -> Buffer:
    """Return a received part in memory that stays valid and unchanged after its sender's end.

    That is the part itself if it was sent, or if its block was handed over and the sender has enough room. A part that
    is only lent is copied by *copy*.
    """
    if not lent(part) or (kept(part) is not None and not part.obj.crowded):  # type: ignore[union-attr]
        return part
    return copy(part)


class FurtherArenas:
    """The further arenas of one connection. `place` may be called on any thread, the other methods on the loop's only.

    Args:
        arena: this process's own shared memory; None if it has none.
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
        self._own = arena
        self._soon = soon
        self._send = send
        self._peer = peer
        self._given: Arena | None = None
        self._asked = False
        self._shown: dict[Borrowed, int] = {}
        self._numbers = iter(range(GIVEN + 1, 1 << 62))
        self._ready: set[int] = set()  # numbers that the peer has opened
        self._opened: dict[int, Borrowed] = {}
        self._closed = False

    def place(self, part: Buffer, give: bool) -> tuple[Buffer, int, int, bool] | None:
        """Return where the peer finds *part* in a further arena; None if that is not possible (yet). Any thread.

        Returns:
            A block to keep until the peer has released it, the number of its arena, the offset there, and True if the
            peer is asked to copy it soon.
        """
        if give:
            return self._give(part)
        source = kept(part)
        if source is None:
            return None
        number = self._shown.get(source)
        if number in self._ready:
            assert isinstance(part, memoryview)
            return part, number or 0, source.place(part), False
        if number is None:
            self._soon(functools.partial(self._show, source))
        return None

    def _give(self, part: Buffer) -> tuple[Buffer, int, int, bool] | None:
        given = self._given
        if given is None:
            if not self._asked:
                self._asked = True
                self._soon(self._make)
            return None
        if GIVEN not in self._ready:
            return None
        block = given.store(part)
        offset = None if block is None else given.place(block)
        return None if block is None or offset is None else (block, GIVEN, offset, given.crowded)

    def _make(self) -> None:
        if self._closed or self._own is None:
            return
        try:
            self._given = self._own.another(self._own.size // 2)
        except OSError as error:
            log.info("large items for %s are copied there: %s", self._peer, error)
            return
        self._offer(GIVEN, self._given.offer, self._given.descriptors(), True)

    def _show(self, source: Borrowed) -> None:
        """Offer an arena that was handed over to this process to the peer."""
        if self._closed or source in self._shown or source.offer is None:
            return
        number = self._shown[source] = next(self._numbers)
        source.on_unused[self] = lambda: self._soon(functools.partial(self._hide, source))
        self._offer(number, source.offer, source.descriptors(), False)

    def _offer(self, number: int, offer: Offer, descriptors: Sequence[Buffer], handed_over: bool) -> None:
        where = offer.pid, offer.fd, offer.device, offer.inode, offer.size
        self._send(frames.Shown(number, *where, handed_over), descriptors)

    def _hide(self, source: Borrowed) -> None:
        number = self._shown.pop(source, None)
        if number is not None and not self._closed:
            self._ready.discard(number)
            self._send(frames.Hidden(number))

    def heard(self, frame: frames.Shown | frames.Opened | frames.Hidden, parts: Sequence[Buffer] = ()) -> None:
        """Handle a frame of the peer, with its *parts*, about a further arena, the peer's or one of this process."""
        if isinstance(frame, frames.Opened):
            if frame.number == GIVEN or frame.number in self._shown.values():
                self._ready.add(frame.number)
        elif isinstance(frame, frames.Hidden):
            self._opened.pop(frame.number, None)
        elif self._own is not None and frame.number not in self._opened and len(self._opened) < MOST:
            offer = Offer(frame.pid, frame.fd, frame.device, frame.inode, frame.size)
            passed = descriptor_of(parts[0]) if parts else None
            try:
                fd = None if passed is None else passed.take()
                self._opened[frame.number] = Borrowed(offer, fd, keep=frame.handed_over)
            except (OSError, ValueError) as error:
                log.info("large items from %s come in another way: %s", self._peer, error)
                return
            self._send(frames.Opened(frame.number))

    def opened(self, number: int) -> Borrowed:
        """Return the peer's arena *number*. Raises ValueError if it is not open."""
        found = self._opened.get(number)
        if found is None:
            raise ValueError(f"arena {number} was never opened")
        return found

    def close(self) -> None:
        """End all use of further arenas. Memory that is in use stays as long as views of it exist."""
        self._closed = True
        given, self._given = self._given, None
        if given is not None:
            given.close()
        for source in self._opened.values():
            if source.offer is not None:
                source.abandon()
        for source in self._shown:
            source.on_unused.pop(self, None)
        self._opened, self._shown = {}, {}
