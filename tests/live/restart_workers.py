"""Workers that are started again."""

from __future__ import annotations

import os
import signal
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


class Counted(Worker):
    """Writes down each call that begins, in a file that outlives it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def _begins(self, method: str) -> int:
        with (self.folder / method).open("a") as file:
            file.write("begun\n")
        return len((self.folder / method).read_text().splitlines())

    def pid(self) -> int:
        return os.getpid()

    @Worker.idempotent
    def dies_in_rank(self, rank: int, times: int) -> tuple[str, int]:
        """Die in *rank*, the first *times* times."""
        begun = self._begins(f"dies_in_rank-{self._rank}")
        if self._rank == rank and begun <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived", self._rank

    @Worker.idempotent
    def changes_its_argument_and_dies(self, array: Any) -> bool:
        """Zeros arrive, though the worker that died wrote into the memory that both had in view."""
        zeros = not array.any()
        array[:] = 1
        if not self.restart_count:
            os.kill(os.getpid(), signal.SIGKILL)
        return zeros

    @Worker.idempotent
    def waits_the_first_time(self, fifo: str) -> int:
        if not self.restart_count:
            (self.folder / fifo).write_bytes(b"")
            threading.Event().wait()
        return self.restart_count

    def plain_dies(self) -> None:
        self._begins("plain_dies")
        os.kill(os.getpid(), signal.SIGKILL)

    @Worker.idempotent
    def raises(self) -> None:
        self._begins("raises")
        raise ValueError("no")

    # --- by handles of its own ---

    def ask(self, group: str, times: int) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = self._found(group).with_retries(1).dies_in_rank(0, times).wait(20)
        return found

    def why_not(self, group: str) -> str:
        try:
            self._found(group).with_retries(1)
        except Exception as error:  # noqa: BLE001 - its name is the answer
            return type(error).__name__
        return ""

    def _found(self, group: str) -> Any:
        from rlinf_actors import WorkerGroup

        return WorkerGroup.from_group_name(Counted, group)
