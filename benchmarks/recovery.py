"""Measure how long a node or a cluster takes to recover: ``python -m benchmarks.recovery [--repeat N]``.

A LocalCluster has three nodes, with workers on the last two and calls in progress all the time. A killed process is
started again at once, as by systemd. The time runs from kill -9. No worker may end.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, Worker
from rlinf_actors.testing import LocalCluster

NODES = 3


class Busy(Worker):
    def pid(self) -> int:
        return os.getpid()


@contextmanager
def calls(group: Any) -> Iterator[None]:
    """Make one call after the other in a thread during the block. Raise the first error at the end."""
    stop, errors = threading.Event(), []

    def call() -> None:
        try:
            while not stop.is_set():
                group.pid().wait(60)
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    yield
    stop.set()
    caller.join()
    if errors:
        raise errors[0]


def agentd(local: LocalCluster, cluster: Cluster) -> None:
    """Kill the agentd of a node with workers, and wait until the node has registered again with them."""
    local.kill_agent(1)
    local.restart_agent(1)


def head(local: LocalCluster, cluster: Cluster) -> None:
    """Kill the head, and wait until all nodes have registered again and a driver's request is answered."""
    local.kill_agent(0)
    local.restart_agent(0)
    _all_are_back(cluster)


def head_and_agentd(local: LocalCluster, cluster: Cluster) -> None:
    """Kill the head and the agentd of a node with workers, and wait as `head` does."""
    local.kill_agent(1)
    local.kill_agent(0)
    local.restart_agent(0)
    local.restart_agent(1)
    _all_are_back(cluster)


def _all_are_back(cluster: Cluster) -> None:
    runtime = cluster.runtime
    nodes = runtime.io.submit(runtime.nodes(NODES, 60.0)).result()
    assert len(nodes.nodes) == NODES


FAULTS: dict[str, Callable[[LocalCluster, Cluster], None]] = {
    "agentd, until its node is back": agentd,
    "the head, until all nodes are back": head,
    "the head and an agentd": head_and_agentd,
}


def measure(fault: str, repeat: int) -> list[float]:
    """Return the seconds of each repetition."""
    taken = []
    with LocalCluster(NODES) as local, local.cluster() as cluster:
        group: Any = Busy.create_group().launch(cluster, NodePlacementStrategy([1, 2]))
        pids = group.pid().wait()
        for _ in range(repeat):
            with calls(group):
                start = time.perf_counter()
                FAULTS[fault](local, cluster)
                taken.append(time.perf_counter() - start)
            if group.pid().wait() != pids:
                raise RuntimeError(f"the workers were {pids}, and are others now")
    return sorted(taken)


def main() -> None:
    """Print a table of seconds."""
    parser = argparse.ArgumentParser(prog="benchmarks.recovery")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    for fault in FAULTS:
        taken = measure(fault, given.repeat)
        print(f"{fault:<36}" + "".join(f"{seconds:>8.2f}" for seconds in taken) + " s", flush=True)


if __name__ == "__main__":
    main()
