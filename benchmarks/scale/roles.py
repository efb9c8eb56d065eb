"""The processes of a simulation. Each obeys orders: a line of JSON on its stdin, answered by a line on its stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.processes import cpu_s, descriptors, die_with_parent, rss_mb

Answer = dict[str, Any]
LOG_LINES = 25


class Measured:
    """A process whose resources are measured."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: str) -> None:
        self._log = log
        with open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
                preexec_fn=die_with_parent,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders, self._answers = self.process.stdin, self.process.stdout

    def read(self) -> str:
        """Return the next line of the process.

        Raises:
            RuntimeError: the process has ended.
        """
        line = self._answers.readline()
        if not line:
            with open(self._log, errors="replace") as log:
                tail = "".join(log.readlines()[-LOG_LINES:])
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}; its last lines:\n{tail}")
        return line

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    @property
    def rss_mb(self) -> float:
        return rss_mb(self.process.pid)

    @property
    def descriptors(self) -> int:
        return descriptors(self.process.pid)

    def end(self, how: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.communicate()


class Role(Measured):
    """A process that runs *module* and obeys orders."""

    def __init__(self, module: str, *arguments: object, environment: Mapping[str, str], log: str) -> None:
        command = [sys.executable, "-m", f"benchmarks.scale.{module}", *map(str, arguments)]
        super().__init__(command, environment, log)

    def ask(self, order: str, **given: object) -> Answer:
        """Give an order and return the answer.

        Raises:
            RuntimeError: the order failed, or the process has ended.
        """
        self.give(order, **given)
        return self.answer(order)

    def give(self, order: str, **given: object) -> None:
        """Give an order. The caller then calls `answer`."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"order": order, **given}), file=self._orders, flush=True)

    def answer(self, order: str) -> Answer:
        """Return the answer to the last order; raise RuntimeError as `ask` does."""
        answer: Answer = json.loads(self.read())
        if "error" in answer:
            raise RuntimeError(f"{order}: {answer['error']}")
        return answer


class Head(Measured):
    """A head process, at *address*. Port 0 chooses a port."""

    def __init__(self, address: str, state_dir: str, *, environment: Mapping[str, str], log: str) -> None:
        cli = "import sys; from rlinf_actors.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", cli, "head", "--listen", address, "--state-dir", state_dir]
        super().__init__(command, environment, log)
        self.address = self.read().strip()


# --- in the process of a role ---


def obey(receiver: object) -> None:
    """Call the method of *receiver* that each order names, until stdin ends."""
    for line in sys.stdin:
        given = json.loads(line)
        try:
            answer = getattr(receiver, given.pop("order"))(**given)
        except Exception as error:  # noqa: BLE001 - the process that gave the order reports it
            answer = _failed(error)
        print(json.dumps(answer or {}), flush=True)


async def obey_in_loop(receiver: object) -> None:
    """Do the same as `obey` with coroutine functions."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        given = json.loads(line)
        try:
            answer = await getattr(receiver, given.pop("order"))(**given)
        except Exception as error:  # noqa: BLE001 - the process that gave the order reports it
            answer = _failed(error)
        print(json.dumps(answer or {}), flush=True)


def _failed(error: Exception) -> Answer:
    return {"error": f"{type(error).__name__}: {error}"}
