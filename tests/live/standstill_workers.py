"""Workers that hold the GIL, block their loop, or go on while others do."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

from rlinf_actors import Worker


class Busy(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def pid(self) -> int:
        return os.getpid()

    def count(self) -> int:
        self._count += 1
        return self._count

    def hold_the_gil(self, seconds: int) -> int:
        """In C, without giving it up."""
        return int(ctypes.PyDLL(None).sleep(seconds))


class Looped(Worker):
    async def block_the_loop(self, seconds: float) -> str:
        time.sleep(seconds)  # noqa: ASYNC251 - that is what is tried
        return "slept"

    async def rest(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"
