"""Workers of test_shared_memory."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from typing import Any

import numpy as np

from rlinf_actors import Worker, WorkerGroup
from rlinf_actors.worker.context import current


class Streamer(Worker):
    """Streams without end, and counts the streams that were closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = asyncio.Event()

    async def numbers(self) -> Any:
        try:
            number = 0
            while True:
                yield number
                number += 1
        finally:
            self.closed.set()

    async def wait_until_closed(self) -> str:
        await self.closed.wait()
        return "closed"


class Consumer(Worker):
    """Takes one item of a stream, and waits."""

    async def take_one(self, group: str) -> int:
        async for _rank, item in WorkerGroup.from_group_name(Streamer, group).numbers():
            self.taken = item
            os.kill(os.getpid(), signal.SIGKILL)
        return -1


class Holder(Worker):
    """Keeps what it is given, until it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def release(self) -> None:
        self.kept.clear()

    def total(self) -> float:
        return float(sum(int(np.asarray(value).sum()) for value in self.kept))

    def echo(self, value: Any) -> Any:
        return value

    def fill(self, value: Any) -> tuple[list[int], Any]:
        """Writes its rank all over its argument; what was there before, and the argument."""
        before = np.unique(value).tolist()
        value[:] = self._rank + 1
        return before, value

    def is_shared(self, value: Any) -> bool:
        """Whether the argument lies in memory of another process."""
        address = value.__array_interface__["data"][0]
        with open("/proc/self/maps") as maps:
            for line in maps:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if low <= address < high:
                    return "memfd:rlinf-actors" in line
        return False

    def echo_through(self, group: str, value: Any) -> None:
        """Keeps what the workers of another group answer."""
        self.kept += WorkerGroup.from_group_name(Holder, group).echo(value).wait()

    def lends(self, turns: int = 1) -> int:
        """Bytes of this worker's own shared memory that are in use; -1 without any.

        The I/O thread's loop has turned before, so it has said what this worker dropped before this call.
        """
        context = current()
        assert context is not None
        for _ in range(turns):
            turned = threading.Event()
            context.runtime.network.soon(turned.set)
            turned.wait()
        memory = context.runtime.network.memory
        return -1 if memory is None else memory.used

    def watch(self, pid: int) -> None:
        self.watched = os.pidfd_open(pid)

    def lends_after_its_end(self) -> int:
        """The same, once the process that is watched has ended and this worker knows."""
        select.select([self.watched], [], [])
        os.close(self.watched)
        return self.lends(turns=3)  # the loop has looked at its own descriptors in between

    def mapped(self) -> int:
        """How many pieces of shared memory this process has mapped or open."""
        with open("/proc/self/maps") as maps:
            return sum("memfd:rlinf-actors" in line for line in maps)
