"""Workers that are started again."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rlinf_actors import Worker


class Mortal(Worker):
    """Remembers what it was told, until it dies."""

    def __init__(self, folder: str = "", fail_from: int = 99) -> None:
        super().__init__()
        if self.restart_count >= fail_from:
            raise ValueError(f"the checkpoint of incarnation {self.restart_count} is broken")
        self.events = ["constructed"]
        self.folder = folder

    def on_restart(self) -> None:
        self.events.append(f"restarted {self.restart_count}")

    def pid(self) -> int:
        return os.getpid()

    def tell(self, text: str) -> list[str]:
        self.events.append(text)
        return self.events

    def block(self) -> None:
        threading.Event().wait()

    def leave(self, code: int) -> None:
        print("leaving", flush=True)
        os._exit(code)

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    # --- with others ---

    def give(self, value: Any, to: int) -> None:
        self.send(value, self._group_name, to)

    def take(self, source: int) -> Any:
        return self.recv(self._group_name, source)

    def outcome_of_take(self, source: int) -> str:
        taking = self.recv(self._group_name, source, async_op=True)
        Path(self.folder, "taking").write_bytes(b"")
        try:
            return repr(taking.wait())
        except Exception as error:  # noqa: BLE001 - its name is the answer
            return type(error).__name__

    def ask_other(self, group: str, text: str) -> list[str]:
        """By a handle of this process's own, which it keeps."""
        if not hasattr(self, "other"):
            from rlinf_actors import WorkerGroup

            self.other = WorkerGroup.from_group_name(Mortal, group)
        found: list[str] = self.other.tell(text).wait(20)[0]
        return found

    def end_other(self) -> str:
        """By the same handle: what its call ends with."""
        try:
            self.other.leave(3).wait(20)
        except Exception as error:  # noqa: BLE001 - its name is the answer
            return type(error).__name__
        return ""


class LateMortal(Worker):
    """Exits while it is constructed, the first time."""

    def __init__(self) -> None:
        super().__init__()
        if not self.restart_count:
            os._exit(4)

    def count(self) -> int:
        return self.restart_count


class AsyncMortal(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    async def on_restart(self) -> None:
        self.ready = True

    async def state(self) -> tuple[int, bool]:
        return self.restart_count, self.ready

    async def pid(self) -> int:
        return os.getpid()

    async def numbers(self) -> AsyncIterator[int]:
        number = 0
        while True:
            yield number
            number += 1
