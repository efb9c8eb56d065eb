"""Workers whose own code forks: their methods end in two processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from typing import Any

from rlinf_actors import Channel, Cluster, NodePlacementStrategy, Worker, WorkerGroup
from rlinf_actors.errors import RlinfActorsError


def end(how: str) -> str:
    """Leave the method in a forked child."""
    if how == "raise":
        raise RuntimeError("in the child")
    if how == "exit":
        sys.exit(7)
    if how == "exit well":
        sys.exit()
    if how == "exit with a text":
        sys.exit("a text")
    return how


def use(calls: dict[str, Any]) -> list[str]:
    """What a process gets for each of some calls."""
    got = []
    for name, call in calls.items():
        try:
            call()
        except RlinfActorsError as error:
            got.append(f"{name}: {type(error).__name__}: {error}")
        else:
            got.append(f"{name}: went through")
    return got


def in_child(work: Any) -> list[str]:
    """What *work* gives in a forked child, which ends after it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with open(writer, "w") as answers:
            answers.write("\n".join(work()))
        os._exit(0)
    os.close(writer)
    with open(reader) as answers:
        text = answers.read()
    assert os.waitpid(child, 0)[1] == 0
    return text.splitlines()


class Forks(Worker):
    """Plain methods: on the main thread, or on threads."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.count = 0
        self.child = os.fork() if how else -1
        if not self.child:
            end(how)

    def fork(self, how: str) -> int:
        self.count += 1
        child = os.fork()
        if child:
            return child
        return end(how)

    def ended(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def constructed(self) -> tuple[int, int]:
        """The child that the constructor forked, and how it ended."""
        return self.child, self.ended(self.child)

    def counted(self) -> int:
        return self.count

    def multiprocess(self) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2, -3])

    def uses(self, channel: Channel) -> list[str]:
        """What a forked child gets for each call of ours."""
        other = WorkerGroup.from_group_name(Other, "other")
        waiting = channel.get(async_op=True)
        local = Channel.create("local", local=True)
        call = other.pid()
        calls = {
            "put": lambda: channel.put(1),
            "put async": lambda: channel.put(1, async_op=True),
            "get": lambda: channel.get(),
            "get_nowait": lambda: channel.get_nowait(),
            "work of the parent's": lambda: waiting.wait(),
            "local": lambda: local.get(),
            "create": lambda: Channel.create("new"),
            "connect": lambda: Channel.connect("new"),
            "create_channel": lambda: self.create_channel("new"),
            "check_worker_alive": lambda: self.check_worker_alive("other:0"),
            "send": lambda: self.send(1, "other", 0),
            "recv": lambda: self.recv("other", 0),
            "broadcast": lambda: self.broadcast(1),
            "call": lambda: other.pid(),
            "result": lambda: call.wait(),
            "Cluster": lambda: Cluster(),
            "launch": lambda: Forks.create_group().launch(Cluster(), NodePlacementStrategy([0])),
            "device_lock": lambda: self.device_lock.acquire(),
        }
        try:
            return in_child(lambda: use(calls))
        finally:
            call.wait()

    def local_in_child(self) -> list[str]:
        """A queue that the child makes itself is its own."""

        def work() -> list[str]:
            local = Channel.create("local", local=True)
            local.put("mine")
            return [local.get()]

        return in_child(work)


class ForksAsync(Forks):
    """The same on an event loop."""

    async def fork_awaited(self, how: str) -> int:
        await asyncio.sleep(0)
        return self.fork(how)

    async def fork_and_await(self) -> int:
        child = os.fork()
        if not child:
            await asyncio.sleep(3600)
        return child

    async def fork_in_task(self, how: str) -> int:
        """In a task of the user's own, of which nothing of ours knows."""

        async def task() -> int:
            return self.fork(how)

        return await asyncio.create_task(task())

    async def fork_in_stream(self, how: str) -> Any:
        yield self.fork(how)


class Other(Worker):
    def pid(self) -> int:
        return os.getpid()
