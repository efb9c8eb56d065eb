"""Workers of test_event_loops.py."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

import loop_rows
from blocking import no_blocking

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker


class Plain(Worker):
    """What the rows call."""

    @Worker.idempotent
    def add(self, x: Any) -> Any:
        return x

    async def count(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number

    @staticmethod
    async def _nothing() -> None:
        await asyncio.sleep(0)

    def launch_far(self) -> None:
        """A group, and channels, that the driver has no handle of."""
        for name in ("theirs", "theirs-too", "ended"):
            Channel.create(name).qsize()
        self.far = Plain.create_group().launch(Cluster(), NodePlacementStrategy([1]), name="far")
        self.far.wait_ready()


class Pulse:
    """Runs in each turn of the loop."""

    def __init__(self) -> None:
        self.beats = 0
        self._task = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.beats += 1

    async def next(self) -> None:
        """Let the loop make some turns."""
        before = self.beats
        for _ in range(5):
            await asyncio.sleep(0)
        assert self.beats > before

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def begin(rows: dict[str, Any], scene: Any) -> dict[str, asyncio.Future[Any]]:
    """Call every row; the futures of what can be awaited."""
    under_way = {}
    for name, row in rows.items():
        made = row(scene)
        if inspect.isawaitable(made):
            under_way[name] = asyncio.ensure_future(_value(made))
    return under_way


async def end(under_way: dict[str, asyncio.Future[Any]], seconds: float) -> dict[str, Any]:
    """What came of them."""
    for name, future in under_way.items():
        try:
            await asyncio.wait_for(future, seconds)
        except asyncio.TimeoutError:
            raise AssertionError(f"{name} did not end") from None
    return {name: future.result() for name, future in under_way.items()}


async def _value(made: Any) -> Any:
    return await made


class Looped(Worker):
    """Runs rows in its own event loop. Rank 0 is on the head's node, rank 1 is the other end of its messages."""

    def __init__(self, far: Any, tensors: bool) -> None:
        super().__init__()
        self.far = far
        self.ports: list[int] = []
        self.stack = contextlib.ExitStack()
        self.rows = loop_rows.TENSORS if tensors else loop_rows.WORKER
        if tensors:
            import torch

            self.tensor = torch.zeros(2)

    async def begin(self, seconds: float) -> list[str]:
        """Call the rows, and end those that need no head. Returns the names of those that wait."""
        self.stack.enter_context(no_blocking())
        pulse = Pulse()
        self.under_way = await begin(self.rows, self)
        ending = {name: one for name, one in self.under_way.items() if name not in loop_rows.WAITS | loop_rows.MAY_WAIT}
        await end(ending, seconds)
        await pulse.next()
        await pulse.stop()
        await end({name: one for name, one in self.under_way.items() if one.done()}, seconds)  # raises what they did
        return [name for name, one in self.under_way.items() if not one.done()]

    async def finish(self, seconds: float) -> list[str]:
        """End them; the head goes on. Returns the names of all."""
        await end(self.under_way, seconds)
        if self.rows is loop_rows.WORKER:
            await end(await begin(loop_rows.AFTER, self), seconds)
        self.stack.close()
        return [*self.under_way]

    async def other_end(self) -> None:
        """Rank 1's."""
        if self.rows is loop_rows.TENSORS:
            await self.recv_tensor(self.tensor, self._group_name, 0, async_op=True)
            await self.send_tensor(self.tensor, self._group_name, 0, async_op=True)
            return
        await self.recv(self._group_name, 0, async_op=True)
        await self.send(b"back", self._group_name, 0, async_op=True)
        await self.broadcast(async_op=True)
