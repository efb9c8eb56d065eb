"""A driver with a key whose head is killed: prints a line before and, once it was told to go on, one after."""

from __future__ import annotations

import os
import sys

from rlinf_actors import Cluster, NodePlacementStrategy, Worker, WorkerGroup


class Asking(Worker):
    """Asks the head about its own job, with its job's key."""

    def pid(self) -> int:
        return os.getpid()

    def known(self, name: str) -> int:
        return WorkerGroup.from_group_name(Asking, name).pid().wait()[0]


def main() -> None:
    with Cluster(num_nodes=2, namespace="mine") as cluster:
        before = Asking.create_group().launch(cluster, NodePlacementStrategy([1]), name="before")
        print(before.pid().wait()[0], flush=True)
        sys.stdin.readline()
        after = Asking.create_group().launch(cluster, NodePlacementStrategy([1]), name="after")
        print(before.pid().wait()[0], after.known("before").wait()[0], before.known("after").wait()[0], flush=True)


if __name__ == "__main__":
    main()
