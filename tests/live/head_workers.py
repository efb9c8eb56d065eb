"""Workers for tests of heads that end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

from rlinf_actors import Worker


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
