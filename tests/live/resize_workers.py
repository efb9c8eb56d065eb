"""Worker classes of the tests of groups that grow and shrink."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rlinf_actors import Channel, Worker


class Elastic(Worker):
    """Knows its number of ranks, and writes down how it ends."""

    def __init__(self, folder: str = "", fail_from: int = 1000) -> None:
        super().__init__()
        self.folder = folder
        self.changes: list[int] = []
        if self._rank >= fail_from:
            raise ValueError(f"rank {self._rank} does not want to be")

    def on_world_size_changed(self) -> None:
        self.changes.append(self._world_size)

    def sizes(self) -> tuple[int, int, str]:
        return self._rank, self._world_size, os.environ["WORLD_SIZE"]

    def seen(self) -> list[int]:
        return self.changes

    def parent(self) -> int:
        return os.getppid()

    def variable(self, name: str) -> str:
        return os.environ.get(name, "")

    def pid(self) -> int:
        return os.getpid()

    def pid_of(self, path: str) -> None:
        Path(path, f"pid-{self._rank}").write_text(str(os.getpid()))

    def slow(self, path: str) -> int:
        """Run until the test makes the file *path*."""
        Path(f"{path}.{self._rank}").touch()
        while not os.path.exists(path):
            time.sleep(0.02)
        return self._rank

    def _close(self) -> None:
        if self.folder:
            Path(self.folder, f"closed-{self._rank}").touch()

    def say(self, group: str, rank: int, value: Any) -> None:
        self.send(value, group, rank)

    def hear(self, group: str, rank: int) -> Any:
        return self.recv(group, rank)

    def hold(self, channel: Channel[Any]) -> Any:
        """Take an item and never release it."""
        self.taking = channel.take()
        return self.taking.__enter__()

    def count(self, others: Any) -> list[int]:
        """Call another group by its handle."""
        return [rank for rank, _, _ in others.sizes().wait()]

    def give(self, group: str, channel: Channel[Any], batch_size: int) -> None:
        part = batch_size // self._world_size
        self.send_to(group, channel, list(range(self._rank * part, (self._rank + 1) * part)))

    def take(self, group: str, channel: Channel[Any], batch_size: int) -> Any:
        return self.recv_from(group, channel, batch_size=batch_size)


class Stuck(Worker):
    """Says that it is being constructed; rank 1 does that for ever."""

    def __init__(self, place: str) -> None:
        super().__init__()
        name = Path(place, f"pid-{self._rank}")
        name.with_suffix(".new").write_text(str(os.getpid()))
        name.with_suffix(".new").rename(name)
        while self._rank:
            time.sleep(1)
