"""Worker classes of the routing tests: two groups of different sizes that exchange batches."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlinf_actors import Channel, Worker


class Router(Worker):
    """Sends its part of a batch of numbers, and receives its part of one."""

    def pid(self) -> int:
        return os.getpid()

    def part(self, batch_size: int) -> dict[str, Any]:
        size = batch_size // self._world_size
        start = self._rank * size
        numbers = np.arange(start, start + size)
        return {"numbers": numbers, "names": [f"task {n}" for n in numbers], "nothing": None, "step": 3}

    def give(self, to: str, batch_size: int, channel: Channel[Any] | None, **options: Any) -> Any:
        data = self.part(batch_size)
        return self.send_to(to, channel, data, enable_p2p=channel is None, **options)

    def take(self, of: str, batch_size: int | None, channel: Channel[Any] | None, **options: Any) -> Any:
        return self.recv_from(of, channel, batch_size=batch_size, enable_p2p=channel is None, **options)

    def exchange(self, with_: str, batch_size: int, channel: Channel[Any] | None) -> Any:
        """Send and receive at once."""
        sent = self.give(with_, batch_size, channel, async_op=True)
        got = self.take(with_, batch_size, channel, async_op=True)
        sent.wait()
        return got.wait()

    def start_taking(self, of: str, batch_size: int, channel: Channel[Any]) -> None:
        self.work = self.take(of, batch_size, channel, async_op=True)

    def finish_taking(self) -> Any:
        return self.work.wait()


class Asking(Router):
    """Sends requests to whichever rank is free, and receives the answers; or answers requests."""

    def __init__(self, answers: bool) -> None:
        super().__init__()
        self.batch_router = {"obs": []} if answers else {}

    async def ask(self, group: str, channel: Channel[Any], batch_size: int, steps: int) -> list[list[int]]:
        got = []
        for step in range(steps):
            mine = [100 * self._rank + step]
            self.send_to(group, channel, mine, tag="obs", mode="train", decoupled_mode=True, async_op=True)
            work = self.recv_from(group, channel, tag="obs", batch_size=batch_size, decoupled_mode=True, async_op=True)
            got.append(await work.async_wait())
        return got

    async def answer(self, group: str, channel: Channel[Any], batch_size: int, steps: int) -> None:
        for _ in range(steps):  # one shard at a time: two ranks that hold one each would wait for a second for ever
            work = self.recv_from(
                group,
                channel,
                tag="obs",
                batch_size=batch_size,
                decoupled_mode=True,
                recv_queue_size=1,
                async_op=True,
            )
            answers = [-n for n in await work]
            self.send_to(
                group,
                channel,
                answers,
                tag="obs",
                batch_size=batch_size,
                decoupled_mode=True,
                send_queue_size=1,
                async_op=True,
            )
