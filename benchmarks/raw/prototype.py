"""A prototype of an actor runtime: calls, transfers and queues in our design, without anything else.

It has no errors, no keys, no other machine and no memory limits, so it shows what the design allows on this machine:
processes are forked, each has one uvloop with one ZeroMQ socket, all that a turn of the loop sends to a peer leaves as
one chunk, and arrays go through shared memory that is kept.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import mmap
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.cases import fan_out as fan_out_case
from benchmarks.cases import in_flight as in_flight_case
from benchmarks.cases import queues as queues_case
from benchmarks.cases.queues import BIG, SETTINGS
from benchmarks.cases.transfers import MIB, RUNS
from benchmarks.methods import Methods
from benchmarks.model import Figures
from benchmarks.raw.forks import children
from benchmarks.raw.messages import Chunks, Drained
from benchmarks.timing import clock, later_half, new_uvloop, p50_async

_decode = msgspec.msgpack.Decoder().decode

# --- links ---


class Served:
    """The end that is called. *handle* gets the caller, the number of the call, the method and its arguments."""

    def __init__(self, endpoint: str, handle: Callable[[bytes, int, str, list[Any]], object]) -> None:
        self._handle = handle
        self._chunks: dict[bytes, Chunks] = {}
        self._drained = Drained(zmq.ROUTER, self._got)
        self._drained.socket.bind(endpoint)

    def answer(self, peer: bytes, call: int, value: Any) -> None:
        if peer not in self._chunks:
            self._chunks[peer] = Chunks(lambda chunk: self._drained.send([peer, chunk]))
        self._chunks[peer].add((call, value))

    def _got(self, frames: list[bytes]) -> None:
        for call, method, args in _decode(frames[1]):
            self._handle(frames[0], call, method, args)


class Peer:
    """The end that calls."""

    def __init__(self, endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._drained = Drained(zmq.DEALER, self._got)
        self._drained.socket.connect(endpoint)
        self._chunks = Chunks(lambda chunk: self._drained.send([chunk]))

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        self._calls += 1
        future = self._futures[self._calls] = self._loop.create_future()
        self._chunks.add((self._calls, method, args))
        return future

    def close(self) -> None:
        self._drained.close()

    def _got(self, frames: list[bytes]) -> None:
        for call, value in _decode(frames[0]):
            self._futures.pop(call).set_result(value)


# --- processes ---


def run(coroutine: Any) -> Any:
    loop = new_uvloop() or asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def serve(make: Callable[[], object]) -> None:
    """Run a process whose loop has what *make* returns, until it is killed."""

    async def forever() -> None:
        kept = make()
        await asyncio.Event().wait()
        del kept

    run(forever())


class Worker:
    """Runs the methods of `benchmarks.methods`, and takes arrays from shared memory."""

    def __init__(self, endpoint: str) -> None:
        self._methods = Methods()
        self._mapped = Mapped()
        self._kept: dict[int, Any] = {}
        self._served = Served(endpoint, self._handle)

    def _handle(self, peer: bytes, call: int, method: str, args: list[Any]) -> None:
        owner = self if method == "take" else self._methods
        self._served.answer(peer, call, getattr(owner, method)(*args))

    def take(self, kept: bool, segment: list[int]) -> float:
        """Receive an array, into the same memory each time if *kept*. Return when it was there."""
        view = self._mapped.view(segment)
        if kept:
            target = self._kept.setdefault(len(view), np.zeros(len(view), np.uint8))
            np.copyto(target, view)
        return clock()


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[str]]:
    """Fork *count* workers. Yield their endpoints."""
    with tempfile.TemporaryDirectory() as folder:
        endpoints = [f"ipc://{folder}/{n}" for n in range(count)]
        with children([lambda endpoint=endpoint: serve(lambda: Worker(endpoint)) for endpoint in endpoints]):
            yield endpoints


# --- shared memory ---


class Pool:
    """Segments of shared memory of one size, which are kept: the first touch of a page costs more than its copy."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[tuple[int, Any]] = []

    def put(self, array: Any) -> tuple[list[int], Any]:
        """Copy *array* into a free segment. Return its description for the peer, and the segment for `release`."""
        if not self._free:
            fd = os.memfd_create("prototype")
            os.ftruncate(fd, self._size)
            self._free.append((fd, np.frombuffer(mmap.mmap(fd, self._size), np.uint8)))
        segment = self._free.pop()
        np.copyto(segment[1], array)
        return [os.getpid(), segment[0], self._size], segment

    def release(self, segment: Any) -> None:
        self._free.append(segment)


class Mapped:
    """Segments of peers, each mapped once."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, int], Any] = {}

    def view(self, segment: list[int]) -> Any:
        pid, fd, size = segment
        if (pid, fd) not in self._views:
            with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
                self._views[pid, fd] = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        return self._views[pid, fd]


# --- a queue ---


class Host:
    """The process that has the queue. A put is answered when the queue has the item; of an array, when it is done."""

    def __init__(self, endpoint: str) -> None:
        self._items: collections.deque[tuple[int, Any]] = collections.deque()
        self._gets: collections.deque[tuple[bytes, int]] = collections.deque()
        self._arrays: dict[int, tuple[bytes, int]] = {}
        self._count = 0
        self._served = Served(endpoint, self._handle)

    def _handle(self, peer: bytes, call: int, method: str, args: list[Any]) -> None:
        if method == "get":
            self._gets.append((peer, call))
        elif method == "done":
            self._served.answer(*self._arrays.pop(args[0]), None)
            self._served.answer(peer, call, None)
        else:
            self._count += 1
            self._items.append((self._count, args[0]))
            if isinstance(args[0], list):
                self._arrays[self._count] = (peer, call)
            else:
                self._served.answer(peer, call, None)
        while self._items and self._gets:
            self._served.answer(*self._gets.popleft(), self._items.popleft())


async def _consume(endpoint: str, size: int, count: int, window: int, end: socket.socket) -> None:
    host, mapped = Peer(endpoint), Mapped()
    gets = collections.deque(host.call("get") for _ in range(min(window, count)))
    end.sendall(b"r")
    for n in range(count):
        number, value = await gets.popleft()
        if n + window < count:
            gets.append(host.call("get"))
        array = isinstance(value, list)
        assert len(mapped.view(value) if array else value) == size
        if array:
            host.call("done", number)
    end.sendall(b"e")
    await asyncio.Event().wait()


async def _produce(endpoint: str, size: int, count: int, window: int) -> float:
    host, pool, start = Peer(endpoint), Pool(size), clock()
    value = np.ones(size, np.uint8) if size >= BIG else b"x" * size
    pending: collections.deque[tuple[asyncio.Future[Any], Any]] = collections.deque()

    async def finish() -> None:
        future, segment = pending.popleft()
        await future
        if segment is not None:
            pool.release(segment)

    for _ in range(count):
        if len(pending) == window:
            await finish()
        given, segment = pool.put(value) if size >= BIG else (value, None)
        pending.append((host.call("put", given), segment))
    while pending:
        await finish()
    host.close()
    return start


def rate(size: int, count: int, window: int) -> float:
    """Return items per second through a host, *window* at a time."""
    here, there = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, here, there:
        endpoint = f"ipc://{folder}/host"
        work = [lambda: serve(lambda: Host(endpoint)), lambda: run(_consume(endpoint, size, count, window, there))]
        with children(work):
            here.recv(1)
            start = run(_produce(endpoint, size, count, window))
            here.recv(1)
            taken = clock() - start
    zmq.Context.instance().term()  # or the next processes are forked with it
    return count / taken


# --- the cases ---


def queues() -> Figures:
    return {name: queues_case.rate(rate, *setting) for name, setting in SETTINGS.items()}


def _call_us(count: int, runs: int) -> float:
    """Return the median microseconds of a call of *count* workers, until all have answered."""

    async def measure(endpoints: list[str]) -> float:
        peers = [Peer(endpoint) for endpoint in endpoints]

        async def call() -> None:
            for future in [peer.call("noop") for peer in peers]:
                await future

        taken = await p50_async(call, runs)
        for peer in peers:
            peer.close()
        return taken

    with workers(count) as endpoints:
        taken = run(measure(endpoints))
    zmq.Context.instance().term()
    return taken * 1e6


def one_call() -> Figures:
    return {"await": _call_us(1, 1000)}


def fan_out() -> Figures:
    return {f"await_{size}": _call_us(size, fan_out_case.COUNT) for size in (8, 32)}


def in_flight() -> Figures:
    async def measure(endpoint: str) -> list[float]:
        peer, rates = Peer(endpoint), []
        for _ in range(in_flight_case.ROUNDS):
            start = clock()
            for future in [peer.call("noop") for _ in range(in_flight_case.WINDOW)]:
                await future
            rates.append(in_flight_case.WINDOW / (clock() - start))
        peer.close()
        return rates[in_flight_case.WARM_UP :]

    with workers(1) as endpoints:
        rates = run(measure(endpoints[0]))
    zmq.Context.instance().term()
    return {"await": statistics.median(rates)}


def transfers() -> Figures:
    async def measure(endpoint: str) -> Figures:
        peer, figures = Peer(endpoint), {}
        for name, kept in (("tensor", True), ("object", False)):
            for size, runs in RUNS.items():
                source, pool, taken = np.ones(size * MIB, np.uint8), Pool(size * MIB), []
                for _ in range(runs):
                    start = clock()
                    given, segment = pool.put(source)
                    taken.append(await peer.call("take", kept, given) - start)
                    pool.release(segment)
                figures[f"{name}_{size}"] = size * MIB / later_half(taken) / 1e9
        peer.close()
        return figures

    with workers(1) as endpoints:
        figures = run(measure(endpoints[0]))
    zmq.Context.instance().term()
    return figures
