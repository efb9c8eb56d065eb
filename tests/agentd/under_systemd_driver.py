"""A driver that launches a worker under the units, and prints facts about the worker for each line on stdin."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from rlinf_actors import Cluster, NodePlacementStrategy, Worker


def limit(name: str) -> str:
    """The limit *name* of this process's cgroup, or "" without that controller."""
    cgroup = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":")[-1]
    file = Path(f"/sys/fs/cgroup{cgroup}", name)
    return file.read_text().strip() if file.exists() else ""


class Where(Worker):
    def look(self) -> dict[str, object]:
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "pid": os.getpid(),
            "cgroup": Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":")[-1],
            "limits": {name: limit(name) for name in ("memory.max", "pids.max")},
            "no_new_privileges": status["NoNewPrivs"],
            "seccomp": status["Seccomp"],
            "uids": [*os.getresuid(), *os.getresgid()],
            "capabilities": sorted({status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")}),
            "home": os.environ["HOME"],
            "cores": resource.getrlimit(resource.RLIMIT_CORE)[1],
            "told": sorted(name for name in os.environ if name.endswith("_DIRECTORY") or name == "NOTIFY_SOCKET"),
        }


if __name__ == "__main__":
    with Cluster(num_nodes=1) as cluster:
        limits = json.loads(os.environ.get("LIMITS", "{}"))
        first = Where.create_group().launch(cluster, NodePlacementStrategy([0]), name="first", **limits)
        for number, _ in enumerate(sys.stdin):
            another = Where.create_group().launch(cluster, NodePlacementStrategy([0]), name=f"more-{number}")
            print(json.dumps([first.look().wait()[0], another.look().wait()[0]]), flush=True)
            another.shutdown()
