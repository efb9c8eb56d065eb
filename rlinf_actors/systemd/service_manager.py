"""A daemon's relations to systemd: its state as datagrams to $NOTIFY_SOCKET (sd_notify(3)), and its log lines.

READY is sent once the service can be used, STOPPING once it will end. A state out of order (a reload before READY, a
READY after STOPPING) is sent as a status text only. Log lines carry priorities if the journal reads them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Seconds for which a change of state waits if the manager's queue is full. The loop stands still meanwhile."""

STARTING, READY, RELOADING, STOPPING = "starting", "ready", "reloading", "stopping"

NEXT = {
    STARTING: {"ready": READY, "stop": STOPPING},
    READY: {"ready": READY, "reload": RELOADING, "stop": STOPPING},
    RELOADING: {"reloaded": READY, "stop": STOPPING},
    STOPPING: {"stop": STOPPING},
}
"""For each state the changes that may be sent. The service manager would take others for the end of a start, or for a
stop that was called off."""


class Manager:
    """Reports this service's state to the service manager (systemd); does nothing without one. Not thread-safe.

    Args:
        address: of the manager's socket: a path, ``@name`` for an abstract one, "" without a manager.
        watchdog_s: seconds without a report after which the manager kills the service, None for no watchdog.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._state = STARTING

    def ready(self, status: str) -> None:
        """Report that the service can be used; *status* is for people."""
        self._step("ready", READY="1", STATUS=status)

    def reloading(self, status: str) -> None:
        """Report that the configuration is read again; `reloaded` ends that."""
        self._step("reload", RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000), STATUS=status)

    def reloaded(self, status: str) -> None:
        self._step("reloaded", READY="1", STATUS=status)

    def stopping(self, status: str) -> None:
        """Report that the service will end. Idempotent."""
        self._step("stop", STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        """Send a line for people, in any state."""
        self._send(STATUS=text)

    def watch(self, loop: asyncio.AbstractEventLoop) -> Watchdog | None:
        """Return a watchdog that reports from *loop* at half the manager's interval; None if the unit asks for none."""
        if not self._address or self._watchdog_s is None:
            return None
        return Watchdog(loop, self._watchdog_s / 2, lambda: self._send(WATCHDOG="1"))

    def _step(self, event: str, **fields: str) -> None:
        following = NEXT[self._state].get(event)
        if following is None:
            self._send(STATUS=fields["STATUS"])
            return
        self._state = following
        self._send(**fields)

    def _send(self, **fields: str) -> None:
        """Send a datagram. A failure is logged only, since the service can work without the manager."""
        if not self._address:
            return
        lines = [f"{name}={' '.join(value.split())}" for name, value in fields.items()]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                # READY and the like are sent once: worth a wait if the manager's queue is full
                channel.settimeout(0.0 if fields.keys() <= {"STATUS", "WATCHDOG"} else PATIENCE_S)
                channel.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("cannot notify the service manager at %s: %s", self._address, error)


class Watchdog:
    """Calls *beat* on the loop, at once and then every *interval_s* seconds; so a loop that stands still does not call
    it.

    Close it before the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float, beat: Callable[[], None]) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._beat = beat
        self._tick()

    def _tick(self) -> None:
        self._beat()
        self._timer = self._loop.call_later(self._interval_s, self._tick)

    def close(self) -> None:
        """Stop calling *beat*. Idempotent."""
        self._timer.cancel()


_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""Least level of logging for each priority of syslog, see sd-daemon(3)."""


def reads(fd: int, stream: str) -> bool:
    """True if the descriptor *fd*, open or closed, is the journal's socket.

    *stream* is $JOURNAL_STREAM, ``DEVICE:INODE`` of that socket. A process inherits it even with another stderr.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def marked(text: str, level: int) -> str:
    """Return *text* with a priority mark before each line, since each line is an entry of its own in the journal."""
    priority = next(number for least, number in _PRIORITIES if level >= least)
    return "\n".join(f"<{priority}>{line}" for line in text.splitlines() or [""])


class JournalFormatter(logging.Formatter):
    """Formats log records with priority marks and without times, since the journal adds times."""

    def format(self, record: logging.LogRecord) -> str:
        return marked(super().format(record), record.levelno)


class DaemonStderr:
    """A daemon's stderr: log records and last messages, with priority marks if the journal reads them.

    *program* begins each line outside the journal. *journal_stream* is $JOURNAL_STREAM.
    """

    def __init__(self, program: str, stream: TextIO, journal_stream: str) -> None:
        self._program = program
        self._stream = stream
        self._journal = bool(journal_stream) and reads(stream.fileno(), journal_stream)

    def set_up_logging(self, level: int = logging.INFO) -> None:
        if self._journal:
            formatter: logging.Formatter = JournalFormatter("%(levelname)s: %(message)s")
        else:
            formatter = logging.Formatter(f"{self._program} %(asctime)s %(levelname)s: %(message)s")
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(formatter)
        logging.basicConfig(level=level, handlers=[handler])

    def say(self, text: str, level: int = logging.ERROR) -> None:
        """Print a message that is no log record: why the process ends."""
        line = marked(text, level) if self._journal else f"{self._program}: {text}"
        print(line, file=self._stream, flush=True)
