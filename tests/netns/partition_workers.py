"""Workers of the partition tests."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from typing import Any

from rlinf_actors import Worker


class Talker(Worker):
    """A worker whose constructor fails while another process of its group and rank runs."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._lock = open(f"{folder}/{self._group_name}-{self._rank}", "w")  # noqa: SIM115 - as long as we run
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._count = 0

    def pid(self) -> int:
        return os.getpid()

    def count(self, payload: bytes = b"") -> int:
        self._count += 1
        return self._count

    def same(self, payload: bytes) -> bytes:
        return payload

    def block(self) -> None:
        threading.Event().wait()

    def read(self, path: str) -> str:
        """Block on a read from an empty pipe."""
        with open(path) as pipe:
            return pipe.read()

    @Worker.idempotent
    def count_once_told(self, begun: str, go: str) -> int:
        """Count. The first call says that it runs, and waits for the word to go on."""
        self._count += 1
        count = self._count
        if count == 1:
            with open(begun, "w"):
                pass
            with open(go):
                pass
        return count

    def numbers(self, closed: str) -> Iterator[int]:
        """An endless stream that records the thread on which it was closed."""
        n = 0
        try:
            while True:
                n += 1
                yield n
        finally:
            with open(closed, "w") as pipe:
                pipe.write(threading.current_thread().name)

    def give(self, value: Any, group: str, rank: int) -> None:
        self.send(value, group, rank)

    def take(self, group: str, rank: int) -> Any:
        return self.recv(group, rank)
