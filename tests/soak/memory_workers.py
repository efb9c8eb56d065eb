"""Workers of test_memory_soak."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlinf_actors import Worker
from rlinf_actors.worker.context import current


def usage() -> dict[str, int]:
    """Return this process's descriptors, and its own memory in KiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file)
    return {"descriptors": len(os.listdir("/proc/self/fd")), "kib": int(rows["RssAnon"].split()[0])}


class Mover(Worker):
    """Passes large objects on."""

    def give(self, size: int, count: int, to: int, into: bool) -> None:
        import torch

        tensor, array = torch.ones(size, dtype=torch.uint8), np.ones(size, np.uint8)
        data = bytes(size // 8)
        for n in range(count):
            if into:
                self.send_tensor(tensor, self._group_name, to)
            else:
                self.send([array, data] if n % 2 else tensor, self._group_name, to)
            assert self.recv(self._group_name, to) == n

    def take(self, size: int, count: int, sender: int, into: bool) -> None:
        import torch

        target = torch.zeros(size, dtype=torch.uint8)
        for n in range(count):
            if into:
                self.recv_tensor(target, self._group_name, sender)
                assert int(target[-1]) == 1
            else:
                got: Any = self.recv(self._group_name, sender)
                del got
            self.send(n, self._group_name, sender)

    def echo(self, value: Any) -> Any:
        return value

    def usage(self) -> dict[str, int]:
        """Return also the bytes of the arena that others use, and its memory in KiB after what is free was returned."""
        context = current()
        assert context is not None
        arena = context.runtime.network.memory
        assert arena is not None
        arena.trim()
        return {**usage(), "lent": arena.used, "arena_kib": os.fstat(arena._fd).st_blocks // 2}
