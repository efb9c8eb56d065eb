"""Clusters of two nodes on two hosts (`benchmarks.hosts`), with keys and without, each with a driver.

A process can be in one cluster only, so each driver is a separate process (``--drive``), which measures on request.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.hosts import TwoHosts
from benchmarks.processes import stays_on
from benchmarks.timing import timed

MIB = 1 << 20
ECHOED = 64
"""MiB of a round trip to a worker."""


class Driver:
    """A driver in a separate process.

    Args:
        head: address of its cluster's head.
        environment: its own.
    """

    def __init__(self, head: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.keyed_clusters", "--drive"]
        self._process = subprocess.Popen(
            command, env={**environment, "RLINF_HEAD": head}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, what: str, count: int) -> float:
        """Measure *count* operations. Return their mean in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {count}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the driver."""
        self._process.communicate()


@contextlib.contextmanager
def clusters() -> Iterator[tuple[Driver, Driver]]:
    """Yield the drivers of two clusters on the same two hosts; the second has keys. Needs root."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlb-", dir="/tmp")))
        yield (
            _driver(stack, hosts, folder / "p", 6380, keyed=False),
            _driver(stack, hosts, folder / "k", 6381, keyed=True),
        )


def _driver(stack: contextlib.ExitStack, hosts: TwoHosts, folder: Path, port: int, *, keyed: bool) -> Driver:
    """Start a cluster, and a driver on the head's host."""
    address = f"{hosts.here}:{port}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLINF_")}
    here, there = ({**clean, "RLINF_ACTORS_KEYS": str(folder / name)} for name in ("here", "there"))
    folder.mkdir(mode=0o700)
    more: list[str] = []
    if keyed:
        _keys(here, "init", "--name", "bench")
    else:
        more = ["--insecure-test-network"]
        here["RLINF_ACTORS_INSECURE_TEST_NETWORK"] = "1"
    agent = [sys.executable, "-m", "agentd", *more]
    run_dir = str(folder / "h")
    stack.enter_context(
        _agentd(
            [*agent, "--head", "--listen", address, "--node-rank", "0", "--run-dir", run_dir, "--state-dir", run_dir],
            here,
        )
    )
    if keyed:
        enrolled = _keys(here, "enroll", "there", "--file", str(folder / "agent.key"), "--head", run_dir)
        keys = folder / "there"
        keys.mkdir(mode=0o700)
        os.rename(enrolled, keys / "agent.key")
    connect = ["--connect", address, "--node-rank", "1", "--name", "there", "--run-dir", str(folder / "o")]
    stack.enter_context(_agentd([*hosts.prefix, *agent, *connect], there))
    return stack.enter_context(contextlib.closing(Driver(address, here)))


def _keys(environment: dict[str, str], *arguments: str) -> str:
    """Run `rlinf-actors keys`. Return the path of the written file, if the output names it."""
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "keys", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"rlinf-actors keys {arguments[0]}: {done.stderr}")
    return str(json.loads(done.stdout).get("file", ""))


@contextlib.contextmanager
def _agentd(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Run an agentd during the block, which begins when the agentd has registered."""
    ready, tell = os.pipe()
    command = [*command, "--ready-fd", str(tell)]
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        with stays_on(1):
            process = stack.enter_context(subprocess.Popen(command, env=environment, pass_fds=(tell,), stderr=log))
        os.close(tell)
        try:
            with os.fdopen(ready) as said:
                answer = json.loads(said.readline() or "{}")
            if "head" not in answer:
                log.seek(0)
                raise OSError(f"agentd did not start: {answer.get('error', 'it ended')}\n{log.read()}")
            yield
        finally:
            process.terminate()


# --- the driver's process ---


def drive() -> None:
    """Measure the operation in each line of stdin until stdin ends."""
    import numpy as np

    import rlinf_actors
    from benchmarks.backends.ours import BenchWorker

    with rlinf_actors.Cluster(num_nodes=2) as cluster:
        near, far = (
            BenchWorker.create_group().launch(
                cluster, placement_strategy=rlinf_actors.NodePlacementStrategy([node]), name=name
            )
            for node, name in enumerate(("near", "far"))
        )
        array = np.ones(ECHOED * MIB, np.uint8)
        actions: dict[str, Callable[[], object]] = {
            "ask": cluster.get_alive_nodes,
            "call": lambda: far.noop().wait(),
            "near": lambda: near.noop().wait(),
            "echo": lambda: near.echo(array).wait(),
        }
        for line in sys.stdin:
            what, count = line.split()
            action = actions[what]
            print(
                timed(lambda action=action, count=int(count): [action() for _ in range(count)]) / int(count), flush=True
            )


if __name__ == "__main__":
    drive()
