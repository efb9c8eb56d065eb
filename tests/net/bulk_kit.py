"""Two processes' ends of one link with bulk streams, on one loop. The link itself is a queue in order."""

from __future__ import annotations

import asyncio
import os

import pace

from rlinf_actors.net.bulk import MARK, BulkLink
from rlinf_actors.net.bulk_handshake import BulkTransport

MIB = 1 << 20


class End:
    """One end of the link.

    Attributes:
        cut: True to lose what this end sends by the link.
        sent: headers and parts that this end has sent by the link.
        arrived: messages that were delivered at this end.
    """

    def __init__(self, keyed: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport = BulkTransport(self.loop, keyed)
        self.transport.bulk_from = MIB
        self.other: End
        self.bulk: BulkLink
        self.cut = False
        self.sent: list[tuple[bytes, list]] = []
        self.arrived: list[tuple[bytes, list]] = []
        self.raises: Exception | None = None
        self.errors: list[Exception] = []
        self._came = asyncio.Event()

    def _link(self, header: bytes, parts) -> None:
        self.sent.append((header, list(parts)))
        if not self.cut:
            self.loop.call_soon_threadsafe(self.other.receive, header, list(parts))

    def receive(self, header: bytes, parts: list) -> None:
        if not self.bulk.takes(header, parts):
            self._deliver(header, parts)

    def _deliver(self, header: bytes, parts: list) -> None:
        self.arrived.append((header, parts))
        self._came.set()
        if self.raises is not None:
            raise self.raises

    def send(self, header: bytes, *parts) -> None:
        self._link(*self.bulk.pack(header, parts))

    async def until(self, count: int, seconds: float = pace.PATIENCE_S) -> list[tuple[bytes, list]]:
        while len(self.arrived) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), seconds)
        return self.arrived

    @property
    def bulk_messages(self) -> list[bytes]:
        return [header for header, _ in self.sent if header[:1] == MARK]


class Pair:
    """`near` has the link, `far` listens."""

    def __init__(self, keyed: bool) -> None:
        self.near, self.far = End(keyed), End(keyed)
        self.near.other, self.far.other = self.far, self.near
        self.port = self.far.transport.listen("127.0.0.1")
        for end, address in ((self.near, ("127.0.0.1", self.port)), (self.far, None)):
            end.bulk = BulkLink(end.transport, "the other", end._link, end._deliver, end.errors.append, address)

    async def close(self) -> None:
        for end in (self.near, self.far):
            end.bulk.close()
        for end in (self.near, self.far):
            await end.transport.close()


def array(size: int) -> memoryview:
    """Return bytes that differ from place to place."""
    return memoryview((os.urandom(997) * (size // 997 + 1))[:size])


async def eventually(check, seconds: float = pace.PATIENCE_S) -> None:
    """Wait until *check* returns True; it changes on another thread."""

    async def wait() -> None:
        while not check():  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), seconds)
