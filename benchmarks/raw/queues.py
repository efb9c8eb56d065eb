"""Limits of a queue (ZeroMQ push to pull) and of a broadcast (one copy into shared memory that four processes map)."""

from __future__ import annotations

import mmap
import socket
import struct
import tempfile

import numpy as np
import zmq

from benchmarks.cases.broadcast import RECEIVERS, RUNS, SIZE
from benchmarks.cases.queues import SETTINGS, rate
from benchmarks.methods import item
from benchmarks.model import Figures
from benchmarks.raw.forks import children
from benchmarks.raw.transfers import pushed
from benchmarks.timing import clock, later_half

_TIME = struct.Struct("d")


def broadcast() -> Figures:
    with mmap.mmap(-1, SIZE) as memory:
        view, source = np.frombuffer(memory, np.uint8), np.ones(SIZE, np.uint8)
        view[:] = 1
        pairs = [socket.socketpair() for _ in range(RECEIVERS)]

        def look(end: socket.socket) -> None:
            while end.recv(1):
                assert memory[-1] == 1
                end.sendall(_TIME.pack(clock()))

        taken = []
        with children([lambda end=there: look(end) for _, there in pairs]):
            for _ in range(RUNS):
                start = clock()
                np.copyto(view, source)
                for here, _ in pairs:
                    here.sendall(b"g")
                seen = [_TIME.unpack(here.recv(_TIME.size, socket.MSG_WAITALL))[0] for here, _ in pairs]
                taken.append(max(seen) - start)
        for ends in pairs:
            for end in ends:
                end.close()
        del view
    return {"spread": later_half(taken)}


def queues() -> Figures:
    return {name: rate(push, *setting) for name, setting in SETTINGS.items()}


def push(size: int, count: int, window: int) -> float:
    """Return items per second. With a window of 1 each item is acknowledged before the next."""
    here, there = socket.socketpair()

    def consume(pull: zmq.Socket[bytes]) -> None:
        there.sendall(b"r")
        for n in range(1, count + 1):
            pull.recv(copy=size < 1 << 14)
            if window == 1 or n == count:
                there.sendall(b"a")
        there.recv(1)  # nobody writes: the parent ends it

    with tempfile.TemporaryDirectory() as folder, here, there, pushed(f"ipc://{folder}/s", consume) as out:
        here.recv(1)
        value = item(size)
        start = clock()
        for _ in range(count):
            out.send(value, copy=size < 1 << 14)
            if window == 1:
                here.recv(1)
        if window > 1:
            here.recv(1)
        return count / (clock() - start)
