"""A process's log of a soak: each event is a line, written before the next event, so that kill -9 loses none."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from deliveries import Event, Stream


class Log:
    """A log for any thread: a line is one write() to a file opened for appending."""

    def __init__(self, folder: str, who: str) -> None:
        self.who = who
        self._fd = os.open(Path(folder, f"{who}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._left = 0
        """Events after which this process kills itself; 0 for never."""

    def die_after(self, events: int) -> None:
        """Kill this process (SIGKILL) at its *events*-th event from now on."""
        self._left = events

    def write(self, what: Any, stream: Stream, n: int = 0, note: str = "") -> None:
        os.write(self._fd, json.dumps([what, stream, n, note]).encode() + b"\n")
        with self._lock:
            if self._left:
                self._left -= 1
                if not self._left:
                    os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        os.close(self._fd)


def read(folder: str) -> dict[str, list[Event]]:
    """The events of all processes."""
    logs = {}
    for path in sorted(Path(folder).glob("*.log")):
        lines = path.read_text().splitlines()
        logs[path.stem] = [Event(what, Stream(*stream), n, note) for what, stream, n, note in map(json.loads, lines)]
    return logs
