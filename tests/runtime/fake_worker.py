"""FakeWorker, a worker's end of a link, and Waiter, which receives the answer of a call."""

from __future__ import annotations

import asyncio

from rlinf_actors.wire import frames


class FakeWorker:
    """Listens, and keeps the headers and parts that it receives."""

    def __init__(self, network, endpoint: str) -> None:
        self._listener = network.listener(self._received)
        self.endpoint = self._listener.bind(endpoint)
        self.came: list[tuple[frames.AnyFrame, list]] = []
        self.peer = b""
        self._event = asyncio.Event()

    def _received(self, peer: bytes, header: bytes, parts: list) -> None:
        self.peer = peer
        self.came.append((frames.decode(header), parts))
        self._event.set()

    @property
    def frames(self) -> list[frames.AnyFrame]:
        return [frame for frame, _ in self.came]

    async def until(self, count: int) -> list[frames.AnyFrame]:
        while len(self.came) < count:
            self._event.clear()
            await asyncio.wait_for(self._event.wait(), 10)
        return self.frames

    def say(self, frame: frames.AnyFrame, parts=()) -> None:
        self._listener.send(self.peer, frames.encode(frame), parts)

    def say_bytes(self, header: bytes) -> None:
        self._listener.send(self.peer, header)


class Waiter:
    """A Pending that keeps its answers and its error."""

    def __init__(self, answers: int = 1) -> None:
        self.answers: list[frames.AnyFrame] = []
        self.error: Exception | None = None
        self._left = answers
        self.told = asyncio.Event()

    def answer(self, frame, parts) -> bool:
        self.answers.append(frame)
        self._left -= 1
        self.told.set()
        return self._left == 0

    def fail(self, error: Exception) -> None:
        assert self.error is None, "a call ends once"
        self.error = error
        self.told.set()
