"""How this agentd is, for those who wait for it: the service manager, and the driver that started it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from rlinf_actors.systemd.notify import Manager


class Standing:
    """Tells both. Loop thread only.

    Args:
        manager: the service manager; one without an address where a driver owns this process.
        ready_fd: inherited pipe to the driver, which gets one line, once; -1 without.
    """

    def __init__(self, manager: Manager, ready_fd: int) -> None:
        self._manager = manager
        self._ready_fd = ready_fd
        self._hardware = ""
        self._text = "starting"
        self._ends = False

    def has(self, hardware: str) -> None:
        """What this node has, for people; said with everything that follows."""
        self._hardware = hardware

    def up(self, text: str) -> None:
        """The head was tried. For the service manager we are up then: it may be down when this machine boots."""
        if not self._ends:
            self._text = f"{text}; {self._hardware}"
            self._manager.ready(self._text)

    def registered(self, head: str, node_id: str) -> None:
        """The head took this node: the driver may come."""
        self._tell_driver({"head": head, "node_id": node_id})

    def reloading(self) -> None:
        """The configuration is read again."""
        self._manager.reloading("reading the configuration again")

    def reloaded(self, trouble: str = "") -> None:
        """That is over, also if nothing came of it."""
        self._manager.reloaded(f"{trouble}; {self._text}" if trouble else self._text)

    def ending(self, text: str) -> None:
        """It ends. Twice is fine."""
        self._ends = True
        self._manager.stopping(text)

    def failed(self, code: int, text: str) -> None:
        """It ends because of an error; a driver that was told already is told nothing more."""
        self._manager.status(text)
        self._tell_driver({"error": text, "code": code})

    def _tell_driver(self, line: Mapping[str, object]) -> None:
        if self._ready_fd < 0:
            return
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(self._ready_fd, json.dumps(line).encode() + b"\n")
        os.close(self._ready_fd)
        self._ready_fd = -1
