"""Executors under test: an instance, invocations, and the answers that came."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

from rlinf_actors.wire import failure, frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker.invocation import Invocation


class Answers:
    """Collects the answers of invocations; any thread."""

    def __init__(self) -> None:
        self.all: list[tuple[int, frames.AnyFrame, list]] = []
        self._came = threading.Condition()

    def __call__(self, invocation: Invocation, frame: frames.AnyFrame, parts: Any) -> None:
        with self._came:
            self.all.append((invocation.id, frame, [bytes(part) for part in parts]))
            self._came.notify_all()

    def until(self, count: int) -> list[tuple[int, frames.AnyFrame, list]]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.all) >= count, 10), f"only {self.all}"
            return list(self.all)

    def value(self, call: int) -> Any:
        """The result of a call, or its exception raised."""
        with self._came:
            assert self._came.wait_for(lambda: any(self._last(a, call) for a in self.all), 10), f"only {self.all}"
            _, frame, parts = next(answer for answer in self.all if self._last(answer, call))
        if isinstance(frame, frames.Raised):
            raise failure.decode(frame, AuthenticatedParts(parts), worker="g:0", rank=0, node="n")
        return payload.decode(AuthenticatedParts(parts))

    @staticmethod
    def _last(answer: tuple, call: int) -> bool:
        return answer[0] == call and not isinstance(answer[1], frames.Item)

    def items(self, call: int) -> list[Any]:
        with self._came:
            return [
                payload.decode(AuthenticatedParts(parts))
                for who, frame, parts in self.all
                if who == call and type(frame) is frames.Item
            ]

    def order(self) -> list[int]:
        with self._came:
            return [call for call, _, _ in self.all]


class Served:
    """An executor that serves an instance on a thread of its own: the worker's main thread."""

    def __init__(self, executor: Any, instance: Any) -> None:
        self.executor = executor
        self.answers = Answers()
        self._ids = 0
        self._invocations: dict[int, Invocation] = {}
        self.thread = threading.Thread(target=self._serve, args=(instance,), name="main-of-the-worker", daemon=True)
        self.thread.start()

    def _serve(self, instance: Any) -> None:
        with contextlib.suppress(SystemExit):
            self.executor.serve(instance)

    def close(self, threads: int = 1) -> None:
        main = getattr(self.executor, "main", self.executor)
        loop = getattr(main, "_loop", None)
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        else:
            for _ in range(threads):
                main.submit(Last(b"", 0, "", AuthenticatedParts(), lambda *_: None, bytes, 0.0, 0))
        for method, executor in getattr(self.executor, "_beside", {}).items():
            for _ in range(self.executor._threads[method]):
                executor.submit(Last(b"", 0, "", AuthenticatedParts(), lambda *_: None, bytes, 0.0, 0))
        more = [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]
        for thread in (self.thread, *more):
            thread.join(10)
            assert not thread.is_alive()
        if loop is not None:
            loop.run_until_complete(_finish(loop))
            loop.close()

    def call(self, method: str, *args: Any, deadline_s: float = 0.0, window: int = 0) -> int:
        self._ids += 1
        parts = AuthenticatedParts(payload.encode_call(args, {}))
        made = Invocation(
            b"driver",
            self._ids,
            method,
            parts,
            self.answers,
            bytes,
            deadline_s and time.monotonic() + deadline_s,
            window,
        )
        self._invocations[self._ids] = made
        self.executor.submit(made)
        return self._ids

    def run(self, method: str, *args: Any, **options: Any) -> Any:
        return self.answers.value(self.call(method, *args, **options))

    def invocation(self, call: int) -> Invocation:
        return self._invocations[call]


class Last(Invocation, eq=False):
    """An invocation that ends the thread which runs it."""

    def run(self, instance: Any) -> None:
        raise SystemExit


async def _finish(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
