"""A pickle that makes a directory where it is unpickled, and workers that say it to one another."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from rlinf_actors import Worker


class Canary:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path, 0o700, True)


class Keeper(Worker):
    """Takes, gives and passes on canaries."""

    def take(self, value: Any) -> int:
        return self._rank

    def give(self, path: str) -> Canary:
        return Canary(path)

    def fail(self, path: str) -> None:
        raise ValueError(Canary(path))

    def pass_on(self, path: str, channel: str) -> None:
        if self._rank == 0:
            self.send(Canary(f"{path}-message"), "keepers", 1)
            self.connect_channel(channel).put(Canary(f"{path}-item"))
        else:
            self.recv("keepers", 0)
            self.connect_channel(channel).get()


class Streamer(Worker):
    """Gives one by one."""

    async def items(self, path: str) -> AsyncIterator[Canary]:
        yield Canary(path)
