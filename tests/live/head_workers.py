"""Workers for tests of heads that end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

from rlinf_actors import Channel, Worker


class Steady(Worker):
    """Counts its calls, and names its process."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def pid(self) -> int:
        return os.getpid()

    def step(self) -> int:
        """A hundredth of a second's work that needs no processor."""
        time.sleep(0.01)
        self.calls += 1
        return self.calls


class Pair(Worker):
    """Two ranks that exchange messages, and one end of a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def exchange(self, count: int) -> int:
        """Send so many numbers to the other rank while it does the same; each has to be the next one."""
        other = 1 - self._rank
        for number in range(self.sent, self.sent + count):
            self.send(number, self._group_name, other)
            received = self.recv(self._group_name, other)
            assert received == number, f"received {received} where {number} was next"
        self.sent += count
        return self.sent

    def take(self, channel: Channel, count: int) -> list[int]:
        """Items of a channel."""
        return [channel.get() for _ in range(count)]


class Pipe(Worker):
    """Says when its stream was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()

    async def items(self) -> AsyncIterator[int]:
        try:
            n = 0
            while True:
                yield n
                n += 1
        finally:
            self.over.set()

    async def closed(self) -> bool:
        """Waits for the end of a stream."""
        return await self.over.wait()
