"""The worker under load: it counts its calls, and has a child process in another session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator

from rlinf_actors import Worker


class Loaded(Worker):
    """Answers calls and streams."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.doubled = 0
        sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        self.child = subprocess.Popen(sleeper, start_new_session=True).pid

    async def about(self) -> tuple[int, int, int]:
        """Pids of this worker, its template and its child."""
        return os.getpid(), os.getppid(), self.child

    async def step(self, number: int) -> int:
        """Return *number*, which is unique to this call."""
        self.doubled += number in self.seen
        self.seen.add(number)
        return number

    async def executed(self) -> tuple[int, int]:
        """The number of different executed numbers, and of those executed more than once."""
        return len(self.seen), self.doubled

    async def ticks(self) -> AsyncIterator[int]:
        """A stream without an end."""
        number = 0
        while True:
            yield number
            number += 1
