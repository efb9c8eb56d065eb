"""Workers that are given items."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from rlinf_actors import Worker, WorkerGroup


class Mapper(Worker):
    """A class without ``async def``."""

    def double(self, n: int) -> int:
        return 2 * n

    @Worker.idempotent
    def pid_after(self, n: int) -> tuple[int, int]:
        return n, os.getpid()

    @Worker.idempotent
    def die_at(self, n: int) -> int:
        if n == 13 and self.restart_count == 0 and self._rank == 1:
            os.kill(os.getpid(), 9)
        return n

    @Worker.idempotent
    def die(self, n: int) -> None:
        os._exit(3)

    def die_once(self, n: int) -> int:
        if n == 13:
            os._exit(3)
        return n

    def over_own_group(self, items: Iterable[int]) -> list[int]:
        group = WorkerGroup.from_group_name(Mapper, self._group_name)
        return list(group.method(Mapper.double).map(items))


class AsyncMapper(Worker):
    """A class with ``async def``: it runs several items at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._now = self._staying = 0
        self._all = asyncio.Event()

    async def meet(self, n: int) -> int:
        """Return n once three items are here."""
        self._now += 1
        if self._now == 3:
            self._all.set()
        await self._all.wait()
        return n

    async def stay(self, n: int) -> None:
        self._staying += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._staying -= 1

    async def staying(self) -> int:
        return self._staying

    async def over(self, name: str, items: list[int]) -> list[int]:
        group = WorkerGroup.from_group_name(Mapper, name)
        return [value async for value in group.method(Mapper.double).map(items, ordered=True)]
