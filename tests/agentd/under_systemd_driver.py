"""A driver that launches a worker where the units run, and asks it who it is whenever a line comes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


class Where(Worker):
    def look(self) -> dict[str, object]:
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "pid": os.getpid(),
            "cgroup": Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":")[-1],
            "no_new_privileges": status["NoNewPrivs"],
            "told": sorted(name for name in os.environ if name.endswith("_DIRECTORY") or name == "NOTIFY_SOCKET"),
        }


if __name__ == "__main__":
    with Cluster(num_nodes=1) as cluster:
        first = Where.create_group().launch(cluster, NodePlacementStrategy([0]), name="first")
        for number, _ in enumerate(sys.stdin):
            another = Where.create_group().launch(cluster, NodePlacementStrategy([0]), name=f"more-{number}")
            print(json.dumps([first.look().wait()[0], another.look().wait()[0]]), flush=True)
            another.shutdown()
