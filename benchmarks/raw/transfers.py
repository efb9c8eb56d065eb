"""Limits of one-way transfers between two processes: shared memory, gloo, ZeroMQ, a socket."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from benchmarks.cases.transfers import MIB, RUNS
from benchmarks.hosts import HERE, TwoHosts
from benchmarks.model import Figures
from benchmarks.raw.forks import children
from benchmarks.raw.memcpy import echo_numpy
from benchmarks.timing import clock, later_half

PORT = 21377
HIGH_WATER = 500
"""Most messages that wait at each end of a queue."""
_TIME = struct.Struct("d")

Open = Callable[[int], Callable[[], object]]
"""Takes a number of bytes. Returns a function that sends or receives that number."""


def between(sender: Open, receiver: Open, size: int, runs: int, before: Callable[[], object] = lambda: None) -> float:
    """Return GB/s from *sender* in this process to *receiver* in another process, which first calls *before*."""
    here, there = socket.socketpair()

    def work() -> None:
        before()
        receive = receiver(size)
        there.sendall(_TIME.pack(clock()))
        while True:
            receive()
            there.sendall(_TIME.pack(clock()))

    def seen() -> float:
        return _TIME.unpack(here.recv(_TIME.size, socket.MSG_WAITALL))[0]

    with here, there, children([work]):
        seen()
        send, taken = sender(size), []
        for _ in range(runs):
            start = clock()
            send()
            taken.append(seen() - start)
    return size / later_half(taken) / 1e9


# --- one host ---


def shared(size: int, runs: int) -> float:
    """Copy once into memory that both processes map. The receiver uses the mapped memory."""
    with mmap.mmap(-1, size) as memory:
        go, gone = socket.socketpair()

        def sender(size: int) -> Callable[[], object]:
            source, view = np.ones(size, np.uint8), np.frombuffer(memory, np.uint8)

            def send() -> None:
                np.copyto(view, source)
                go.sendall(b"g")

            return send

        with go, gone:
            taken = between(sender, lambda _size: lambda: (gone.recv(1), memory[-1]), size, runs)
        del sender
    return taken


def zmq_ipc(size: int, runs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/s"
        return between(*_whole(endpoint), size, runs)


def gloo(size: int, runs: int) -> float:
    """Measure torch.distributed over loopback, into one tensor that the receiver reuses. Both run in new processes."""
    import torch
    import torch.distributed as dist

    here, there = socket.socketpair()

    def peer(rank: int, folder: str) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        tensor, seen = torch.ones(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
        for _ in range(runs):
            start = clock()
            if rank:
                dist.recv(tensor, 0)
                dist.send(seen.fill_(clock()), 0)
            else:
                dist.send(tensor, 1)
                dist.recv(seen, 1)
                there.sendall(_TIME.pack(seen.item() - start))
        there.recv(1)  # nobody writes: the parent ends it

    with tempfile.TemporaryDirectory() as folder, here, there:
        peers = [lambda rank=rank: peer(rank, folder) for rank in (0, 1)]
        with children(peers):
            taken = [_TIME.unpack(here.recv(_TIME.size, socket.MSG_WAITALL))[0] for _ in range(runs)]
    return size / later_half(taken) / 1e9


def transfers() -> Figures:
    figures = echo_numpy()
    for size, runs in RUNS.items():
        for name, way in (("shared", shared), ("zmq", zmq_ipc)):
            figures[f"{name}_{size}"] = way(size * MIB, runs)
    return figures


def transfers_lane() -> Figures:
    return {f"gloo_{size}": gloo(size * MIB, runs) for size, runs in RUNS.items()}


# --- two hosts ---


def transfers_tcp() -> Figures:
    endpoint = f"tcp://{HERE}:{PORT}"
    figures = {}
    with TwoHosts() as hosts:
        for size, runs in RUNS.items():
            for name, ends in (("message", _whole(endpoint)), ("frames", _in_frames(endpoint)), ("socket", _socket())):
                figures[f"{name}_{size}"] = between(*ends, size * MIB, runs, hosts.move_to_other)
    return figures


def _whole(endpoint: str) -> tuple[Open, Open]:
    """Measure ZeroMQ with one message."""

    def sender(size: int) -> Callable[[], object]:
        source, push = np.ones(size, np.uint8), _bound(endpoint)
        return lambda: push.send(source, copy=False)

    def receiver(_size: int) -> Callable[[], object]:
        pull = _connected(endpoint)
        return lambda: np.frombuffer(pull.recv(copy=False), np.uint8)[-1]

    return sender, receiver


def _in_frames(endpoint: str) -> tuple[Open, Open]:
    """Measure ZeroMQ with messages of 1 MiB, each copied into one buffer that the receiver reuses."""

    def sender(size: int) -> Callable[[], object]:
        source, push = np.ones(size, np.uint8), _bound(endpoint)

        def send() -> None:
            for at in range(0, size, MIB):
                push.send(source[at : at + MIB], copy=False)

        return send

    def receiver(size: int) -> Callable[[], object]:
        kept, pull = np.ones(size, np.uint8), _connected(endpoint)

        def receive() -> None:
            for at in range(0, size, MIB):
                kept[at : at + MIB] = np.frombuffer(pull.recv(copy=False), np.uint8)

        return receive

    return sender, receiver


def _bound(endpoint: str) -> zmq.Socket[bytes]:
    push = zmq.Context().socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 16)
    push.setsockopt(zmq.LINGER, 0)
    push.bind(endpoint)
    return push


def _connected(endpoint: str) -> zmq.Socket[bytes]:
    pull = zmq.Context().socket(zmq.PULL)
    pull.setsockopt(zmq.RCVHWM, 16)
    pull.connect(endpoint)
    return pull


def _socket() -> tuple[Open, Open]:
    """Measure a blocking socket, into one buffer that the receiver reuses."""
    server = socket.create_server((HERE, PORT + 1))

    def sender(size: int) -> Callable[[], object]:
        source, (connection, _) = memoryview(np.ones(size, np.uint8)), server.accept()
        server.close()
        return lambda: connection.sendall(source)

    def receiver(size: int) -> Callable[[], object]:
        kept, connection = memoryview(np.ones(size, np.uint8)), socket.create_connection((HERE, PORT + 1))

        def receive() -> None:
            got = 0
            while got < size:
                got += connection.recv_into(kept[got:])

        return receive

    return sender, receiver


@contextlib.contextmanager
def pushed(endpoint: str, work: Callable[[zmq.Socket[bytes]], None]) -> Iterator[zmq.Socket[bytes]]:
    """Yield a PUSH socket. Its PULL end is in another process, which runs *work* with it."""
    with children([lambda: work(_connected(endpoint))]), zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.SNDHWM, HIGH_WATER)
        push.bind(endpoint)
        yield push
