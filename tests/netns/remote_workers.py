"""Worker classes of the namespace tests: importable on every node, torch only where it is used."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

from rlinf_actors import Worker

TOLD = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CLUSTER_NODE_RANK", "NODE_RANK", "NODE_GROUP_LABEL", "MARK",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


class Anywhere(Worker):
    def about(self) -> dict[str, object]:
        return {
            "prefix": sys.prefix,
            "version": list(sys.version_info[:2]),
            "env": {name: os.environ.get(name) for name in TOLD},
            "torch": "torch" in sys.modules,
        }


class Laner(Anywhere):
    def swap(self) -> list[str]:
        """Send a tensor by a lane in both directions; return the addresses on which this process listens."""
        import torch

        other = 1 - self._rank
        mine = torch.full((1 << 16,), float(self._rank))
        works = [self.send(mine, "laners", other, async_op=True), self.recv("laners", other, async_op=True)]
        assert [work.wait() for work in works][1][0].item() == other
        return listening()


def listening() -> list[str]:
    """Return the addresses on which this process listens."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    return [
        "every" if address.strip("0") == "" else socket.inet_ntoa(bytes.fromhex(address)[::-1])
        for table in ("tcp", "tcp6")
        for address, state, inode in _rows(table)
        if state == "0A" and f"socket:[{inode}]" in mine
    ]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _rows(table: str) -> Iterator[tuple[str, str, str]]:
    path = f"/proc/self/net/{table}"
    if table == "tcp6" and not os.path.exists(path):  # the kernel lacks IPv6
        return
    with open(path, encoding="ascii") as file:
        for line in list(file)[1:]:
            words = line.split()
            yield words[1].partition(":")[0], words[3], words[9]


class Reducer(Anywhere):
    def all_reduce(self) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(self._rank + 1)])
        dist.all_reduce(total)
        self._listened = listening()
        dist.destroy_process_group()
        return float(total.item())

    def listened(self) -> list[str]:
        return self._listened
