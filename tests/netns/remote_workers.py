"""Worker classes of the namespace tests: importable on every node, torch only where it is used."""

from __future__ import annotations

import os
import sys

from rlinf_actors import Worker

TOLD = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLUSTER_NODE_RANK", "NODE_RANK", "NODE_GROUP_LABEL", "MARK",
    "GLOO_SOCKET_IFNAME",
)  # fmt: skip


class Anywhere(Worker):
    def about(self) -> dict[str, object]:
        return {
            "prefix": sys.prefix,
            "version": list(sys.version_info[:2]),
            "env": {name: os.environ.get(name) for name in TOLD},
            "torch": "torch" in sys.modules,
        }


class Reducer(Anywhere):
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(self._rank + 1)])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return float(total.item())
