"""Worker classes of test_reviewed."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlinf_actors import Worker, WorkerGroup


class OddError(Exception):
    detail = property(lambda self: 1 / 0)


class Hands(Worker):
    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        if odd:
            raise OddError("in the constructor")
        self.array = np.ones(500_000)

    def total(self, array: Any) -> float:
        return float(array.sum())

    def kept(self) -> Any:
        return self.array

    def wipe(self) -> None:
        self.array[:] = 0

    def odd_file_name(self) -> None:
        raise FileNotFoundError(os.fsdecode(b"\xff"))

    def odd_error(self) -> None:
        raise OddError("odd")


class Notes(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    async def note_async(self, text: str) -> None:
        self.notes.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def noted(self) -> list[str]:
        return self.notes

    async def waits_for_itself(self) -> Any:
        return WorkerGroup.from_group_name(Notes, self._group_name).execute_on(self._rank).noted().wait()

    async def stream(self, n: int):
        for k in range(n):
            yield k
