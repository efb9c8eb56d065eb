"""Workers for test_reading."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from rlinf_actors import Worker
from rlinf_actors.net import reading


class Echo(Worker):
    """Answers at once, late, or in several pieces, on its main thread."""

    def echo(self, value: Any) -> Any:
        return value

    def reads(self) -> bool:
        return reading.active is not None

    def late(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def ping(self, peer: str, rank: int, n: int) -> int:
        for number in range(n):
            self.send(number, peer, rank)
            if self.recv(peer, rank) != number:
                raise AssertionError(f"message {number} is not the next")
        return n

    def pong(self, peer: str, rank: int, n: int) -> None:
        for _ in range(n):
            self.send(self.recv(peer, rank), peer, rank)

    def relay(self, peer: Any, n: int) -> int:
        """Call another worker from several threads of this one."""
        sums: list[int] = []

        def run(base: int) -> None:
            sums.append(sum(peer.echo(base + i).wait(30)[0] for i in range(n)))

        threads = [threading.Thread(target=run, args=(1000 * t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(sums)


class LoopEcho(Worker):
    """The same on an event loop."""

    async def echo(self, value: Any) -> Any:
        return value

    async def late(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
