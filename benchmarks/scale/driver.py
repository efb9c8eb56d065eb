"""A script with a Cluster on the simulated nodes, as a user writes it."""

from __future__ import annotations

import argparse
import logging
import os

from benchmarks.processes import cpu_s, descriptors, rss_mb
from benchmarks.scale.roles import Answer, obey
from benchmarks.timing import clock, later_half, timed
from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Nothing(Worker):
    """A class that no process constructs: its workers exist in messages only."""

    def noop(self) -> None:
        return None


class Driver:
    def __init__(self, head: str, nodes: int) -> None:
        self._head = head
        self._nodes = nodes

    def connect(self) -> Answer:
        start = clock()
        self._cluster = Cluster(num_nodes=self._nodes, head=self._head)
        self._descriptors = descriptors(os.getpid())
        return {"connect_s": clock() - start}

    def launch(self, workers: int, limit_s: float) -> Answer:
        ranks = sorted(n % self._nodes for n in range(workers))
        start, cpu = clock(), cpu_s(os.getpid())
        self._group = Nothing.create_group().launch(self._cluster, NodePlacementStrategy(ranks), name="group")
        launched = clock()
        self._group.wait_ready(limit_s)
        ready, pid = clock(), os.getpid()
        return {
            "launch_s": launched - start,
            "ready_s": ready - start,
            "cpu_s": cpu_s(pid) - cpu,
            "rss_mb": rss_mb(pid),
            "descriptors_per_worker": (descriptors(pid) - self._descriptors) / workers,
        }

    def fan_out(self, calls: int) -> Answer:
        """Call all workers *calls* times. The workers are one socket, so this is the driver's own cost."""
        cpu = cpu_s(os.getpid())
        taken = [timed(lambda: self._group.noop().wait()) for _ in range(calls)]
        return {"fan_out_s": later_half(taken), "fan_out_cpu_s": (cpu_s(os.getpid()) - cpu) / calls}

    def end(self) -> Answer:
        start = clock()
        self._group.shutdown()
        stopped = clock()
        self._cluster.shutdown()
        return {"stop_s": stopped - start, "shutdown_s": clock() - stopped}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("head")
    parser.add_argument("nodes", type=int)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    obey(Driver(given.head, given.nodes))


if __name__ == "__main__":
    main()
