"""What runs while strangers knock."""

from __future__ import annotations

import os

from rlinf_actors import Worker


class Counter(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def hit(self) -> int:
        self._calls += 1
        return self._calls

    def pid(self) -> int:
        return os.getpid()
