"""What keys cost a control round trip: ``python -m benchmarks.keys_cost [--batches N]``.

Two heads in processes of their own, on loopback TCP, one with keys; this process asks both for their status, in batches
that take turns, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from rlinf_actors.head.keys import OwnKeys
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.loop import new_event_loop
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.security import Security
from rlinf_actors.net.transport import ZmqNetwork
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.operators import GetStatus

BATCH = 20
"""Round trips whose mean is one value. On a machine that does other things too, compare the best ones."""


async def serve() -> None:
    """Be a head until stdin ends; its own secret and a driver's public key come on stdin, or an empty line."""
    line = sys.stdin.readline().split()
    pair = KeyPair.of_text(line[0], line[1], "stdin") if line else None
    security = Security(insecure_test_network=True) if pair is None else Security(pair=pair, head=pair.public)
    network = ZmqNetwork(asyncio.get_running_loop(), security)
    head = HeadServer(network, own=OwnKeys(pair.public, line[2], "bench") if pair is not None else None)
    print(head.start(["tcp://127.0.0.1:0"])[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    head.close()
    network.close()


@contextlib.contextmanager
def head(said: str) -> Iterator[str]:
    """A head's process; its endpoint."""
    command = [sys.executable, "-m", "benchmarks.keys_cost", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(said + "\n")
        process.stdin.flush()
        yield process.stdout.readline().strip()
        process.stdin.close()


async def ask(endpoints: dict[str, tuple[str, Security]], batches: int) -> dict[str, list[float]]:
    """Seconds of a round trip, the mean of each batch; sorted."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, (endpoint, security) in endpoints.items():
            network = ZmqNetwork(loop, security)
            stack.callback(network.close)
            clients[name] = ControlClient(network, endpoint, name.encode(), lambda notice: None)
            stack.callback(clients[name].close)
            await clients[name].request(GetStatus(), 10)
        taken: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(batches):
            for name, client in clients.items():
                start = time.perf_counter()
                for _ in range(BATCH):
                    await client.request(GetStatus(), 10)
                taken[name].append((time.perf_counter() - start) / BATCH)
        return {name: sorted(values) for name, values in taken.items()}


def main() -> None:
    """Print the two, and their ratio."""
    parser = argparse.ArgumentParser(prog="benchmarks.keys_cost")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    loop = new_event_loop()
    try:
        if given.serve:
            loop.run_until_complete(serve())
            return
        server, driver = KeyPair.make(), KeyPair.make()
        with head("") as plain, head(f"{server.public} {server.secret} {driver.public}") as keyed:
            endpoints = {
                "without keys": (plain, Security(insecure_test_network=True)),
                "with keys": (keyed, Security(pair=driver, head=server.public)),
            }
            taken = loop.run_until_complete(ask(endpoints, given.batches))
    finally:
        loop.close()
    for name, seconds in taken.items():
        print(f"{name:<14} best {seconds[0] * 1e6:7.1f} us   median {statistics.median(seconds) * 1e6:7.1f} us")
    plain_s, keyed_s = taken.values()
    print(
        f"{'ratio':<14} best {keyed_s[0] / plain_s[0]:7.3f}      "
        f"median {statistics.median(keyed_s) / statistics.median(plain_s):7.3f}"
    )


if __name__ == "__main__":
    main()
