"""Workers for tests of heads that end."""

from __future__ import annotations

import os
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
        self.calls += 1
        return self.calls


class Pipe(Worker):
    """Says when its stream was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    async def items(self) -> AsyncIterator[int]:
        try:
            n = 0
            while True:
                yield n
                n += 1
        finally:
            self.ended += 1

    async def closed(self) -> int:
        return self.ended
