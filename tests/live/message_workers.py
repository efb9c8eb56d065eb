"""Worker classes of the message tests."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
from typing import Any

from rlinf_actors import RlinfActorsError, Worker
from rlinf_actors.worker.context import current


def ended(work: Any) -> str:
    """The kind of error that a work ended with."""
    try:
        work.wait()
    except TimeoutError:
        return "TimeoutError"
    except RlinfActorsError as error:
        return type(error).__name__
    return ""


class Talker(Worker):
    """Sends and receives on command, plain."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def shared_in_use(self) -> int:
        """Bytes of this worker's shared memory that somebody has."""
        context = current()
        assert context is not None
        assert context.runtime.network.memory is not None
        return context.runtime.network.memory.used

    def say(self, value: Any, group: str, rank: Any = 0, **options: Any) -> Any:
        return self.send(value, group, rank, **options)

    def hear(self, group: str, rank: Any = 0, **options: Any) -> Any:
        return self.recv(group, rank, **options)

    def swap(self, value: Any, group: str, rank: int = 0) -> Any:
        self.send(value, group, rank)
        return self.recv(group, rank)

    def echo(self, count: int, group: str, rank: int = 0) -> None:
        for _ in range(count):
            self.send(self.recv(group, rank), group, rank)

    def start_sends(self, values: list[Any], group: str, rank: int = 0) -> int:
        self.works = [self.send(value, group, rank, async_op=True) for value in values]
        return len(self.works)

    def finish(self, first: int = 0, last: int | None = None) -> list[Any]:
        return [work.wait() for work in self.works[first:last]]

    def done(self) -> list[bool]:
        return [work.done() for work in self.works]

    def say_from_a_child(self, group: str) -> str:
        said = multiprocessing.get_context("fork").SimpleQueue()

        def child() -> None:
            me = Worker(parent_address=self.worker_address, world_size=1, rank=0)
            me.send("from a child", group, 0)
            try:
                self.send("from a child", group, 0)
            except RlinfActorsError as error:
                said.put(type(error).__name__)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        return said.get()

    def say_unpicklable(self, group: str) -> str:
        try:
            self.send({"lock": threading.Lock()}, group, 0)
        except RlinfActorsError as error:
            return type(error).__name__
        return "sent"

    def hear_late(self, group: str, timeout: float) -> str:
        return ended(self.recv(group, 0, async_op=True, timeout=timeout))

    def works_of_recv(self, group: str, count: int) -> list[str]:
        works = [self.recv(group, 0, async_op=True) for _ in range(count)]
        return [ended(work) for work in works]

    def held_messages(self) -> int:
        assert self._context is not None
        return len(self._context.messenger._mailbox)

    def give(self, value: Any, groups: Any, src: Any = None, **options: Any) -> Any:
        got = self.broadcast(value, groups=groups, src=src, **options)
        return "mine" if value is not None and got is value else got

    def give_unpicklable(self, groups: Any) -> str:
        try:
            self.broadcast({"lock": threading.Lock()}, groups=groups)
        except RlinfActorsError as error:
            return type(error).__name__
        return "given"


class AsyncTalker(Worker):
    """The same in coroutines."""

    async def pid(self) -> int:
        return os.getpid()

    async def hear_many(self, count: int, group: str) -> list[Any]:
        return [await self.recv(group, 0, async_op=True) for _ in range(count)]

    async def say_many(self, values: list[Any], group: str) -> None:
        await asyncio.gather(*(self.send(value, group, 0, async_op=True).async_wait() for value in values))

    async def hear_blocking(self, group: str) -> Any:
        return self.recv(group, 0)

    async def cancelled_then_heard(self, group: str) -> Any:
        waiting = asyncio.ensure_future(self.recv(group, 0, async_op=True).async_wait())
        await asyncio.sleep(0)
        waiting.cancel()
        [ended] = await asyncio.gather(waiting, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            return ended  # it came before the task's first step, and nothing was cancelled
        return await self.recv(group, 0, async_op=True)

    async def chained(self, group: str) -> Any:
        return await self.recv(group, 0, async_op=True).then(lambda a, b: a + b, 1, b=2)

    async def give_many(self, values: list[Any], groups: Any) -> list[Any]:
        works = [self.broadcast(value, groups=groups, async_op=True) for value in values]
        return [await work for work in works]


class Walker(Worker):
    """Counts the files of this library that a send of an array visits, and the calls of its functions."""

    def hear(self, group: str, count: int) -> None:
        for _ in range(count):
            self.recv(group, 0)

    def walk(self, group: str, count: int) -> tuple[set[str], int]:
        import numpy as np

        array, warm = np.ones(1 << 20, np.uint8), []
        for _ in range(count):
            calls: list[str] = []
            sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == "call" else None)  # noqa: B023
            self.send(array, group, 0)
            sys.setprofile(None)
            warm.append([file for file in calls if "rlinf_actors" in file])
        ours = min(warm, key=len)  # others find the memory of the one before still in use, if the receiver is late
        return set(ours), len(ours)
