"""Workers that hold handles, and workers whose constructors take their time. Importable in workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import robot_kit as rk

from rlinf_actors import Worker


class Homing(rk.Streamer):
    """Moves its arm in its constructor until a file is there."""

    def __init__(self, done: str) -> None:
        super().__init__()
        while not os.path.exists(done):
            self.arm.move(0.1)
            time.sleep(0.01)

    def double(self, number: int) -> int:
        return 2 * number

    def numbers(self) -> Iterator[int]:
        yield from range(3)


class Waiting(Worker):
    """Has a constructor like that, and no robot."""

    def __init__(self, done: str) -> None:
        super().__init__()
        while not os.path.exists(done):
            time.sleep(0.01)

    def ready(self) -> bool:
        return True


class Holder(Worker):
    """Keeps the handle of another group, and calls it."""

    def take(self, group: Any) -> None:
        self.group = group

    def pid(self) -> int:
        return int(self.group.pid().wait()[0])
