"""Workers whose methods are plain generators, or run beside the main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf_actors import Worker, WorkerGroup


def here() -> str:
    """The thread that runs this."""
    current = threading.current_thread()
    return "main" if current is threading.main_thread() else current.name


class Generating(Worker):
    """Streams from plain generators."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.folder = Path(folder)
        self.made = 0
        self.closed_on = ""
        self.closed = threading.Event()

    def rollouts(self, n: int) -> Iterator[tuple[int, str]]:
        self.closed.clear()
        self.made = 0
        try:
            for k in range(n):
                self.made = k + 1
                yield k, here()
        finally:
            self.closed_on = here()
            self.closed.set()
            if self.folder.name:
                (self.folder / "closed").write_text(here())

    def how_it_went(self) -> tuple[int, str]:
        assert self.closed.wait(20)
        return self.made, self.closed_on

    def breaks(self) -> Iterator[int]:
        yield 1
        raise ValueError("dry")

    def dies(self) -> Iterator[int]:
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    def forks(self) -> Iterator[tuple[int, int]]:
        """The child comes back at a yield."""
        pid = os.fork()
        yield pid, os.getpid()
        if pid:
            yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.getpid()

    def makes_a_list(self) -> Any:
        return (k for k in range(3))

    def takes(self, group: str, n: int) -> int:
        """Iterate another group's stream, and die in it after *n* items."""
        for _, (k, _) in WorkerGroup.from_group_name(Generating, group).rollouts(10**9):
            if k + 1 == n:
                os.kill(os.getpid(), signal.SIGKILL)
        return n


class AsyncGenerating(Generating):
    """The same on an event loop."""

    async def how_it_went(self) -> tuple[int, str]:  # type: ignore[override]
        assert await asyncio.to_thread(self.closed.wait, 20)
        return self.made, self.closed_on

    async def spin(self) -> str:
        await asyncio.sleep(0)
        return here()


class Beside(Worker):
    """A main thread that is busy, and methods beside it."""

    def __init__(self, fifo: str = "") -> None:
        super().__init__()
        self.stopped = threading.Event()
        self.steps = 0
        self.ready = threading.Event()
        if fifo:
            Path(fifo).read_bytes()

    def run(self) -> int:
        """Step until it is stopped."""
        self.ready.set()
        while not self.stopped.wait(0.001):
            self.steps += 1
        return self.steps

    def plain(self) -> str:
        return here()

    @Worker.concurrent()
    def wait_until_busy(self) -> str:
        assert self.ready.wait(20)
        return here()

    @Worker.concurrent()
    def health(self) -> str:
        return here()

    @Worker.concurrent()
    def stop(self) -> None:
        self.stopped.set()

    @Worker.concurrent()
    def progress(self) -> Iterator[tuple[int, str]]:
        while not self.stopped.is_set():
            yield self.steps, here()

    @Worker.concurrent(threads=2)
    def wait_for_stop(self) -> str:
        assert self.stopped.wait(20)
        return here()

    @Worker.idempotent
    @Worker.concurrent()
    def forks(self) -> tuple[int, int]:
        pid = os.fork()
        return pid, os.getpid()

    @Worker.concurrent()
    def asks_the_main_thread(self) -> Any:
        return self._own().plain().wait(20)

    def asks_beside(self) -> Any:
        return self._own().health().wait(20), [item for item, _ in zip(self._own().progress(), range(2), strict=False)]

    def asks_itself(self) -> Any:
        return self._own().plain().wait(20)

    def _own(self) -> Any:
        return WorkerGroup.from_group_name(type(self), self._group_name)


class AsyncBeside(Beside):
    """The same with an event loop, which `run` blocks."""

    async def meet(self) -> str:
        await asyncio.sleep(0)
        return here()


class Slow(Worker):
    """A method beside the main thread takes long."""

    def __init__(self) -> None:
        self._began = threading.Event()

    @Worker.concurrent()
    def sleep(self, seconds: float) -> None:
        self._began.set()
        time.sleep(seconds)

    @Worker.concurrent()
    def began(self) -> bool:
        return self._began.wait(60)
