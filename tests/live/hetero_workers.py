"""Workers that tell what their node and group gave them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlinf_actors import Worker


class Teller(Worker):
    def tell(self, *names: str) -> dict[str, object]:
        return {
            "env": {name: os.environ.get(name) for name in names},
            "prefix": sys.prefix,
            "version": list(sys.version_info[:2]),
            "node": self._cluster_node_rank,
            "accelerator": [str(self.accelerator_type), self._accelerator_model],
            "template": os.getppid(),
        }

    def loaded_with(self, name: str) -> str | None:
        """What the libraries of this process read when they were loaded: the template's environment."""
        block = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        found = dict(entry.partition(b"=")[::2] for entry in block if entry)
        value = found.get(name.encode())
        return None if value is None else value.decode()

    def threads(self) -> int:
        import torch

        return int(torch.get_num_threads())

    def affinity(self) -> list[object]:
        policy = next(iter(Path("/proc/self/numa_maps").read_text().splitlines())).split()[1]
        return [sorted(os.sched_getaffinity(0)), policy]
