"""Reports the state of agentd to systemd, and to the driver that started it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from rlinf_actors.systemd.service_manager import Manager


class StatusReporter:
    """Reports agentd's state to systemd, and once to the driver that started agentd. Loop thread only.

    *manager* is the connection to systemd; it sends nothing if a driver owns this agentd. *ready_fd* is the pipe to
    that driver, or -1 if no driver waits.
    """

    def __init__(self, manager: Manager, ready_fd: int) -> None:
        self._manager = manager
        self._ready_fd = ready_fd
        self._text = "starting"
        self._ending = False
        self.hardware = ""  # of this node, for people

    def ready(self, text: str) -> None:
        """Report READY to systemd, with *text* as status. Called after the first attempt to reach the head, even if
        that attempt failed.
        """
        if not self._ending:
            self._text = f"{text}; {self.hardware}"
            self._manager.ready(self._text)

    def registered(self, head: str, node_id: str) -> None:
        self._tell_driver({"head": head, "node_id": node_id})

    def reloading(self) -> None:
        self._manager.reloading("reading the configuration again")

    def reloaded(self, trouble: str = "") -> None:
        self._manager.reloaded(f"{trouble}; {self._text}" if trouble else self._text)

    def ending(self, text: str) -> None:
        """Report STOPPING to systemd, with *text* as status. May be called again."""
        self._ending = True
        self._manager.stopping(text)

    def failed(self, code: int, text: str) -> None:
        """Report to systemd the error that ends agentd. Report the error also to the driver, if the driver still waits
        for agentd to be ready.
        """
        self._manager.status(text)
        self._tell_driver({"error": text, "code": code})

    def stopped(self, code: int) -> None:
        """Report to the driver that agentd was stopped before it was ready. If the driver no longer waits for that, do
        nothing.
        """
        self._tell_driver({"error": "agentd was stopped before it was ready", "code": code})

    def _tell_driver(self, line: Mapping[str, object]) -> None:
        if self._ready_fd < 0:
            return
        with contextlib.suppress(BrokenPipeError):  # the driver does not wait any more
            os.write(self._ready_fd, json.dumps(line).encode() + b"\n")
        os.close(self._ready_fd)
        self._ready_fd = -1
