from __future__ import annotations

from rlinf_actors import Worker


class Counter(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def add(self) -> int:
        self._calls += 1
        return self._calls
