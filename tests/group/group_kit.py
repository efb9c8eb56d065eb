"""A group whose workers are stand-ins on the memory network; all run on the test's own loop."""

from __future__ import annotations

import asyncio
import types
from typing import Any

from msgspec.structs import replace

from rlinf_actors import forks
from rlinf_actors.group.class_facts import facts_of
from rlinf_actors.group.control import GroupControl
from rlinf_actors.group.group import WorkerGroup
from rlinf_actors.runtime.lost_errors import LostErrors
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.values import Endpoint, ExitReport, WorkerState
from rlinf_actors.worker.worker import Worker
from tests.memory_network import MemoryNetwork


class Arm(Worker):
    """The user's class."""

    def move(self, x: float = 0.0) -> float:
        return x

    def stop(self) -> None: ...

    async def watch(self):
        yield 1

    def _secret(self) -> None: ...


class FakeRank:
    """A worker's end: keeps calls, and answers when the test calls for an answer."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self._listener = network.listener(self._received)
        self.rank = rank
        self.endpoint = self._listener.bind(f"ipc:///w{rank}")
        self.calls: list[frames.AnyFrame] = []
        self.args: list[tuple] = []
        self.doing: frames.Runs | None = frames.Runs(0, "")
        self._peer = b""
        self._came = asyncio.Event()

    def _received(self, peer: bytes, header: bytes, parts: list) -> None:
        self._peer, frame = peer, frames.decode(header)
        if isinstance(frame, frames.Join):
            return
        if isinstance(frame, frames.WhatRuns):
            if self.doing is not None:
                self.say(replace(self.doing, id=frame.id))
            return
        self.calls.append(frame)
        if isinstance(frame, (frames.Call, frames.Stream)):
            args, kwargs = payload.decode_call(AuthenticatedParts(parts))
            self.args.append((tuple(args), kwargs))
        self._came.set()

    async def until(self, count: int) -> list[frames.AnyFrame]:
        while len(self.calls) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), 10)
        return self.calls

    async def call(self, n: int = 0) -> Any:
        """The n-th frame that this rank received."""
        return (await self.until(n + 1))[n]

    def say(self, frame: frames.AnyFrame, parts: Any = ()) -> None:
        self._listener.send(self._peer, frames.encode(frame), parts)

    def ok(self, call: int, value: Any = None, seconds: float = 0.0) -> None:
        self.say(frames.Ok(call, seconds), payload.encode(value))

    def item(self, call: int, value: Any) -> None:
        self.say(frames.Item(call), payload.encode(value))

    def raises(self, call: int, error: Exception, kind: str = "raised") -> None:
        self.say(*failure.encode(call, error, kind))


class Io:
    """Stands in for the I/O thread, on the test's loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.made_in = forks.generation

    def call(self, function: Any, *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def later(self, seconds: float, function: Any) -> None:
        self.loop.call_later(seconds, function)

    def submit(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class World:
    """`group` is the handle, `ranks` are its workers."""

    def __init__(self, size: int = 3, cls: type = Arm) -> None:
        self.network = MemoryNetwork(asyncio.get_running_loop())
        self.ranks = [FakeRank(self.network, rank) for rank in range(size)]
        self.remote = RemoteGroup(self.network, "driver:x", "here", "ns", "arms", [f"n{n}" for n in range(size)])
        self.stopped: list[float] = []
        self.stop_error: Exception | None = None
        io = Io()
        self.runtime = types.SimpleNamespace(
            lost=LostErrors(False, io.later),
            serving_thread=0,
            worker_id="",
            closed=False,
            check_usable=lambda: None,
            peer=lambda name: None,
            copy=bytes,
            io=io,
            groups=types.SimpleNamespace(stop_or_leave=self._stop_group, reach=self._reach),
        )
        self.control = GroupControl(self.runtime, self.remote, facts_of(cls))
        self.group: Any = WorkerGroup(self.control)
        self.remote.update(
            [
                WorkerState(
                    f"id-{fake.rank}", fake.rank, fake.rank, "10.0.0.1", "running", 1, Endpoint("here", fake.endpoint)
                )
                for fake in self.ranks
            ]
        )

    async def _reach(self, group: RemoteGroup) -> None:
        """The head has described the group."""

    async def _stop_group(self, group: RemoteGroup, grace_s: float) -> None:
        self.stopped.append(grace_s)
        if self.stop_error is not None:
            group.end_calls()
            raise self.stop_error
        group.close()

    async def sent_by(self, rank: int) -> None:
        """Wait until the messages that this rank has sent so far have arrived."""
        known = len(self.ranks[rank].calls)
        marker = self.group.execute_on(rank).stop()
        call = (await self.ranks[rank].until(known + 1))[-1]
        self.ranks[rank].ok(call.id)
        await marker

    def dies(self, rank: int, **how: Any) -> None:
        report = ExitReport("signalled", signal=9) if not how else ExitReport(**how)
        self.remote.update([WorkerState(f"id-{rank}", rank, rank, "10.0.0.1", "gone", 1, exit=report)])
