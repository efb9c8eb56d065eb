"""A loop whose time is virtual. Tests marked `virtual_time` run on it: their timers cost nothing, and no slow machine
is too slow for them.

For what happens in one loop: another thread or process is not waited for, since time goes on instead.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

TURN_S = 1e-6
"""What a turn of the loop takes: what looks at the clock until it has gone on is not to look for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock goes on while it would wait, and a little with every turn."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        there = super().select(0)
        if there:
            self._loop.now += TURN_S
            return there
        assert timeout is not None, "nothing will ever happen: somebody waits for ever"
        self._loop.now += max(TURN_S, timeout)
        return super().select(0)
