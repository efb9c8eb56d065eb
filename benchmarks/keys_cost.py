"""Measure the cost of keys: ``python -m benchmarks.keys_cost [--batches N]``.

Every operation runs with keys and without, in alternating batches, so that other load of the machine affects both. The
client runs on one fixed processor and the server on another, because the kernel's choice changes a round trip by a
fifth. The memory layout of a process changes it as much, so each repetition uses new processes.

* raw: a round trip of plain pyzmq between two uvloops over loopback TCP, with CURVE or without
* head: a control round trip between this process and an idle head, over loopback TCP
* ask: a control round trip of a driver in a cluster of two nodes (this row and the next: network namespaces, as root)
* call: an empty method of a worker on the other node, over TCP
* near: an empty method of a worker on this node, over a unix socket
* echo: 64 MiB to a worker on this node and back, through shared memory
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import zmq

from benchmarks.keyed_clusters import clusters
from benchmarks.processes import stays_on
from benchmarks.raw.messages import Drained
from benchmarks.timing import clock
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.client_messages import GetStatus

Batch = Callable[[], float]
"""Returns the mean seconds of a few operations."""
Side = tuple[str, bool]
"""(row, True with keys)."""
Taken = dict[Side, list[float]]
"""Measured seconds of each side."""
BATCH = 10
"""Round trips of one value, which is their mean."""
REQUEST, ANSWER = b"x" * 60, b"y" * 150
"""About the sizes of GetStatus and its answer."""


ROWS = {
    "raw": "plain pyzmq, there and back, loopback TCP",
    "head": "control round trip, loopback TCP",
    "ask": "control round trip of a script, two nodes",
    "call": "call of a worker on another node, TCP",
    "near": "call of a worker on this node, unix socket",
    "echo": "echo of 64 MiB on this node, shared memory",
}


# --- the other process ---


async def serve_head() -> None:
    """Run a head until stdin ends. stdin has its secret key and a driver's public key, or an empty line."""
    pair, driver = _given()
    security = Security(insecure_test_network=True) if pair is None else Security(pair=pair, head=pair.public)
    network = ZmqNetwork(asyncio.get_running_loop(), security)
    head = HeadServer(network, own=OwnKeys(pair.public, driver, "bench") if pair is not None else None)
    print(head.start(["tcp://127.0.0.1:0"])[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    head.close()
    network.close()


async def serve_raw() -> None:
    """Answer messages until stdin ends."""
    pair, _ = _given()
    drained = Drained(zmq.ROUTER, lambda frames: drained.send([frames[0], ANSWER]))
    if pair is not None:
        drained.socket.setsockopt(zmq.CURVE_SERVER, 1)
        drained.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    drained.socket.bind("tcp://127.0.0.1:0")
    print(drained.socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    drained.close()


def _given() -> tuple[KeyPair | None, str]:
    line = sys.stdin.readline().split()
    return (KeyPair.of_text(line[0], line[1], "stdin"), line[2]) if line else (None, "")


@contextlib.contextmanager
def server(what: str, said: str) -> Iterator[str]:
    """Start a process that serves "head" or "raw". Yield its endpoint."""
    command = [sys.executable, "-m", "benchmarks.keys_cost", "--serve", what]
    with stays_on(1):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(said + "\n")
        process.stdin.flush()
        yield process.stdout.readline().strip()
        process.stdin.close()


# --- this process ---


@contextlib.contextmanager
def asking(loop: asyncio.AbstractEventLoop, endpoint: str, security: Security) -> Iterator[Batch]:
    """Measure control round trips to a head."""

    async def open_() -> ControlClient:
        return ControlClient(network, endpoint, b"bench", lambda notice: None)

    async def batch() -> float:
        start = clock()
        for _ in range(BATCH):
            await client.request(GetStatus(), 10)
        return (clock() - start) / BATCH

    network = ZmqNetwork(loop, security)
    try:
        client = loop.run_until_complete(open_())
        yield lambda: loop.run_until_complete(batch())
        client.close()
    finally:
        network.close()


@contextlib.contextmanager
def pinging(loop: asyncio.AbstractEventLoop, endpoint: str, security: Security) -> Iterator[Batch]:
    """Measure the same round trips with pyzmq only."""

    async def open_() -> Drained:
        drained = Drained(zmq.DEALER, lambda frames: answered.set_result(None))
        if security.pair is not None:
            drained.socket.setsockopt(zmq.CURVE_SERVERKEY, security.head.encode())
            drained.socket.setsockopt(zmq.CURVE_PUBLICKEY, security.pair.public.encode())
            drained.socket.setsockopt(zmq.CURVE_SECRETKEY, security.pair.secret.encode())
        drained.socket.connect(endpoint)
        return drained

    async def batch() -> float:
        nonlocal answered
        start = clock()
        for _ in range(BATCH):
            answered = loop.create_future()
            drained.send([REQUEST])
            await answered
        return (clock() - start) / BATCH

    answered: asyncio.Future[None] = loop.create_future()
    drained = loop.run_until_complete(open_())
    yield lambda: loop.run_until_complete(batch())
    drained.close()


def two_processes(loop: asyncio.AbstractEventLoop, batches: int) -> Taken:
    """Measure the rows "raw" and "head", in alternating batches."""
    own, driver = KeyPair.make(), KeyPair.make()
    keyed = f"{own.public} {own.secret} {driver.public}"
    sides = (("", Security(insecure_test_network=True)), (keyed, Security(pair=driver, head=own.public)))
    with contextlib.ExitStack() as stack:
        measured: dict[Side, Batch] = {}
        for what, client in (("raw", pinging), ("head", asking)):
            for said, security in sides:
                endpoint = stack.enter_context(server(what, said))
                measured[what, bool(said)] = stack.enter_context(client(loop, endpoint, security))
        return take_turns(measured, batches)


def two_clusters(batches: int) -> Taken:
    """Measure the other rows, one after the other."""
    taken: Taken = {}
    with clusters() as drivers:
        for what, count in (("ask", BATCH), ("call", BATCH), ("near", BATCH), ("echo", 1)):
            measured: dict[Side, Batch] = {
                (what, keyed): functools.partial(driver.measure, what, count)
                for keyed, driver in zip((False, True), drivers, strict=True)
            }
            taken |= take_turns(measured, batches if count > 1 else max(1, batches // 5))
    return taken


def take_turns(batches: Mapping[Side, Batch], count: int) -> Taken:
    """Measure *count* values of each batch, after one that does not count."""
    for batch in batches.values():
        batch()
    taken: Taken = {side: [] for side in batches}
    for _ in range(count):
        for side, batch in batches.items():
            taken[side].append(batch())
    return taken


def best_tenth(values: Sequence[float]) -> float:
    """Return the mean of the smallest tenth: larger values show other load of the machine."""
    return statistics.mean(sorted(values)[: max(1, len(values) // 10)])


def show(what: str, repeats: Sequence[Taken]) -> None:
    """Return one row: the best tenths of the median repetition, the cost of keys, and the ratios of all repetitions."""
    pairs = [(best_tenth(taken[what, False]), best_tenth(taken[what, True])) for taken in repeats]
    pairs.sort(key=lambda pair: pair[1] / pair[0])
    ratios = [keyed / without for without, keyed in pairs]
    without, keyed = (seconds * 1e6 for seconds in pairs[len(pairs) // 2])
    more = f"{keyed - without:+.0f}"
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"{what:5} {ROWS[what]:42} {without:7.0f} {keyed:7.0f} {more:>6} us {keyed / without:6.2f}  {spread}")


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="benchmarks.keys_cost")
    parser.add_argument("--batches", type=int, default=150, help="values of each kind, per repetition")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions, with new processes each")
    parser.add_argument("--serve", choices=("head", "raw"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    repeats: list[Taken] = []
    try:
        if given.serve:
            loop.run_until_complete(serve_head() if given.serve == "head" else serve_raw())
            return
        with stays_on(0):
            for _ in range(given.repeat):
                taken = two_processes(loop, given.batches)
                repeats.append(taken | ({} if os.geteuid() else two_clusters(given.batches)))
    finally:
        loop.close()
    print(f"{'':48} {'without':>7} {'keys':>7} {'more':>9} {'ratio':>6}  in all repetitions")
    for what in ROWS:
        if (what, True) in repeats[0]:
            show(what, repeats)
    if os.geteuid():
        print("the other rows need root, for network namespaces")


if __name__ == "__main__":
    main()
