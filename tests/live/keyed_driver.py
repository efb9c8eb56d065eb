"""A driver with a key: `keyed_driver.py NODES NAMESPACE GROUP`. It prints the workers' pids, then how the end came."""

from __future__ import annotations

import os
import sys
import time

from rlinf_actors import AuthenticationError, Cluster, NodePlacementStrategy, RlinfActorsError, Worker


class Pid(Worker):
    """Says who it is, or stays busy."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(600)


def main() -> int:
    nodes, namespace, name = sys.argv[1:]
    os.environ["CLUSTER_NAMESPACE"] = namespace
    try:
        cluster = Cluster(num_nodes=int(nodes))
        group = Pid.create_group().launch(cluster, NodePlacementStrategy(range(int(nodes))), name=name)
        print(*group.pid().wait(), flush=True)
        group.sleep().wait()
    except RlinfActorsError as error:
        print("AuthenticationError" if isinstance(error, AuthenticationError) else type(error).__name__, flush=True)
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
