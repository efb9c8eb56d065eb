"""Workers that exchange large arrays between two nodes."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from rlinf_actors import Worker


def array(mebibytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 255, mebibytes << 20, dtype=np.uint8)


def right(value: Any, mebibytes: int, seed: int) -> bool:
    return bool(np.array_equal(value, array(mebibytes, seed)))


def streams() -> int:
    """Number of this process's bulk streams."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rlinf-actors-bulk")]
    return len(threads)


class Mover(Worker):
    def take(self, value: Any, mebibytes: int, seed: int) -> bool:
        return right(value, mebibytes, seed)

    def give(self, mebibytes: int, seed: int) -> Any:
        return array(mebibytes, seed)

    def swap(self, mebibytes: int) -> list[bool]:
        """Exchange arrays with the other rank, in both directions at once, and hundreds of small ones."""
        other = 1 - self._rank
        weights = {f"layer{n}": array(1, n)[: (n * 7919) % 300_000 + 1] for n in range(200)}
        works = [
            self.send(array(mebibytes, self._rank), "movers", other, async_op=True),
            self.send(weights, "movers", other, async_op=True),
        ]
        large = self.recv("movers", other)
        theirs = self.recv("movers", other)
        for work in works:
            work.wait()
        return [
            right(large, mebibytes, other),
            all(np.array_equal(theirs[name], value) for name, value in weights.items()),
            len(theirs) == 200,
        ]

    def through(self, channel: Any, mebibytes: int) -> bool:
        """Rank 0 puts a large item, rank 1 gets it."""
        if self._rank == 0:
            channel.put(array(mebibytes, 5))
            return True
        return right(channel.get(), mebibytes, 5)

    def streams(self) -> int:
        return streams()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def wait_for_one(self) -> None:
        self.recv("movers", 1 - self._rank)

    def send_much(self, count: int) -> None:
        """Send arrays to the other rank until it has ended."""
        value = array(16, 1)
        for _ in range(count):
            self.send(value, "movers", 1 - self._rank)

    def stop_self(self) -> None:
        os.kill(os.getpid(), 9)
