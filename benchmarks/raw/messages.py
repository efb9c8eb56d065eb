"""Limits of ZeroMQ on one node: ROUTER and DEALER over ipc. The loop watches the socket's FD and reads all messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator

import msgspec
import zmq

from benchmarks.model import Figures
from benchmarks.raw.forks import children
from benchmarks.timing import clock, new_uvloop, p50_async

DRAIN = 256
"""Most messages read from a socket in one turn of the loop."""
WINDOW = 1000
ROUNDS = 12
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Drained:
    """A ZeroMQ socket in the running loop; ``got(frames)`` for each message.

    The FD is edge-triggered and any call on the socket may take the edge, so every send has a drain follow.
    """

    def __init__(self, kind: int, got: Callable[[list[bytes]], object]) -> None:
        self.socket = zmq.Context.instance().socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._got = got
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._loop.add_reader(self.socket.getsockopt(zmq.FD), self._drain)

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames, copy=True)
        self._soon()

    def close(self) -> None:
        self._loop.remove_reader(self.socket.getsockopt(zmq.FD))
        self.socket.close()

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        try:
            for _ in range(DRAIN):
                self._got(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        self._soon()


class Chunks:
    """Sends the messages of one turn of the loop as one ZeroMQ message."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send
        self._waiting: list[msgspec.Raw] = []

    def add(self, item: object) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(msgspec.Raw(_encode(item)))

    def _flush(self) -> None:
        chunk, self._waiting = self._waiting, []
        self._send(_encode(chunk))


# --- the other process ---


def _serve(endpoint: str, set_up: Callable[[], Drained]) -> None:
    async def run() -> None:
        set_up().socket.bind(endpoint)
        await asyncio.Event().wait()

    _run(run())


def serve_pings(endpoint: str) -> None:
    def set_up() -> Drained:
        drained = Drained(zmq.ROUTER, lambda frames: drained.send(frames))
        return drained

    _serve(endpoint, set_up)


def serve_pipeline(endpoint: str) -> None:
    """Answer ``[[id, method, args], ...]`` with ``[[id, None], ...]``."""

    def set_up() -> Drained:
        peer = b""
        chunks = Chunks(lambda chunk: drained.send([peer, chunk]))

        def got(frames: list[bytes]) -> None:
            nonlocal peer
            peer = frames[0]
            for call, _, _ in _decode(frames[1]):
                chunks.add((call, None))

        drained = Drained(zmq.ROUTER, got)
        return drained

    _serve(endpoint, set_up)


@contextlib.contextmanager
def servers(count: int, serve: Callable[[str], None]) -> Iterator[list[str]]:
    """Start *count* processes that run *serve*. Yield their endpoints."""
    with tempfile.TemporaryDirectory() as folder:
        endpoints = [f"ipc://{os.path.join(folder, str(index))}" for index in range(count)]
        with children([lambda endpoint=endpoint: serve(endpoint) for endpoint in endpoints]):
            yield endpoints


# --- this process ---


class Pings:
    """Sends pings to several peers at once. A peer's n-th reply answers its n-th ping."""

    def __init__(self, endpoints: list[str]) -> None:
        self._left = 0
        self._done: asyncio.Future[None]
        self._sockets = [Drained(zmq.DEALER, self._got) for _ in endpoints]
        for drained, endpoint in zip(self._sockets, endpoints, strict=True):
            drained.socket.connect(endpoint)

    async def ping(self) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._left = len(self._sockets)
        for drained in self._sockets:
            drained.send([b"x" * 64])
        await self._done

    def _got(self, _frames: list[bytes]) -> None:
        self._left -= 1
        if not self._left:
            self._done.set_result(None)

    def close(self) -> None:
        for drained in self._sockets:
            drained.close()


def ping_us(peers: int, count: int = 1000) -> float:
    """Return the median microseconds of a ping to *peers* processes, until all have answered."""

    async def run(endpoints: list[str]) -> float:
        pings = Pings(endpoints)
        try:
            return await p50_async(pings.ping, count)
        finally:
            pings.close()

    with servers(peers, serve_pings) as endpoints:
        taken = _run(run(endpoints))
        zmq.Context.instance().term()  # or the next servers are forked with it
    return taken * 1e6


def one_call() -> Figures:
    return {"ping_pong": ping_us(1, 3000)}


def fan_out() -> Figures:
    return {"ping_pong": ping_us(1), "zmq_8": ping_us(8, 500), "zmq_32": ping_us(32, 200)}


def in_flight() -> Figures:
    async def run(endpoint: str) -> list[float]:
        loop, futures = asyncio.get_running_loop(), {}

        def got(frames: list[bytes]) -> None:
            for call, value in _decode(frames[0]):
                futures.pop(call).set_result(value)

        drained = Drained(zmq.DEALER, got)
        drained.socket.connect(endpoint)
        chunks = Chunks(lambda chunk: drained.send([chunk]))
        rates = []
        for _ in range(ROUNDS):
            start = clock()
            for call in range(WINDOW):
                futures[call] = loop.create_future()
                chunks.add((call, "noop", ()))
            for future in list(futures.values()):
                await future
            rates.append(WINDOW / (clock() - start))
        drained.close()
        return rates[2:]

    with servers(1, serve_pipeline) as endpoints:
        return {"pipeline": statistics.median(_run(run(endpoints[0])))}


def _run(coroutine):
    loop = new_uvloop() or asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
