"""Workers that are traced."""

from __future__ import annotations

import os
import signal

from rlinf_actors import Channel, Tracer, Worker


class Producer(Worker):
    @Worker.timer("work")
    def work(self) -> str:
        self.send({"x": 1}, "consumer", 0)
        with self.worker_timer("hidden", trace=False):
            return "sent"

    def feed(self, channel: Channel[int], count: int) -> None:
        for number in range(count):
            channel.put(number)

    def stream(self, count: int):
        yield from range(count)

    def die(self) -> None:
        with Tracer.trace_span("last words"):
            os.kill(os.getpid(), signal.SIGKILL)


class Consumer(Worker):
    async def take(self):
        return await self.recv("producer", 0, async_op=True)

    async def eat(self, channel: Channel[int], count: int) -> list[int]:
        return [await channel.get(async_op=True) for _ in range(count)]
