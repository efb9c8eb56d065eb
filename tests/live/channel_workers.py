"""Worker classes of the live tests of channels. Importable in workers: pytest puts this directory on sys.path."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from rlinf_actors import Channel, Worker


class User(Worker):
    """Puts and gets, blocking."""

    def pid(self) -> int:
        return os.getpid()

    def put(self, channel: Channel, items: list[Any], **options: Any) -> None:
        for item in items:
            channel.put(item, **options)

    def get(self, channel: Channel, count: int = 1, **options: Any) -> list[Any]:
        return [channel.get(**options) for _ in range(count)]

    def put_nowait(self, channel: Channel, item: Any) -> str:
        try:
            channel.put_nowait(item)
        except asyncio.QueueFull as error:
            return type(error).__name__
        return "in"

    def mixed(self, channel: Channel) -> list[Any]:
        """An async get that waits, and sync gets of another key meanwhile."""
        waiting = channel.get("slow", async_op=True)
        quick = [channel.get("quick") for _ in range(3)]
        channel.put("go", key="asked")
        return [*quick, waiting.wait()]

    def hold(self, channel: Channel) -> bool:
        """Have an item delivered and not take it."""
        self._held = channel.get(async_op=True)
        arrived = threading.Event()
        self._held._on_done(arrived.set)
        return arrived.wait(10)

    def put_async(self, channel: Channel, items: list[Any]) -> None:
        """All under way at once; returns when all are in."""
        for work in [channel.put(item, async_op=True) for item in items]:
            work.wait()

    def error_of_get(self, channel: Channel, asked: Channel | None = None) -> str:
        try:
            if asked is not None:
                channel.qsize()
                asked.put("waiting")
            channel.get()
        except Exception as error:  # noqa: BLE001 - which one is the answer
            return type(error).__name__
        return "none"

    def cpu_of_get(self, channel: Channel, asked: Channel) -> float:
        """CPU seconds of this thread in a get that waits."""
        asked.put("waiting")
        before = time.thread_time()
        channel.get()
        return time.thread_time() - before

    def make(self, *args: Any, **options: Any) -> Channel:
        channel = self.create_channel(*args, **options)
        channel.put("made here")
        return channel

    def connect(self, name: str) -> Any:
        return self.connect_channel(name).get()


class Awaiting(Worker):
    """The same on an event loop."""

    async def drain(self, channel: Channel) -> list[Any]:
        return [item async for item in channel]

    async def get_cancelled(self, channel: Channel, times: int) -> list[Any]:
        """Gets that are cancelled, some with their item on its way; then all that is left."""
        for _ in range(times):
            waiting = asyncio.ensure_future(channel.get(async_op=True).async_wait())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        return [await channel.get(async_op=True) for _ in range(times)]
