"""A daemon's relations to systemd: its state as datagrams to $NOTIFY_SOCKET (sd_notify(3)), and its log lines.

READY is sent when the daemon can be used, STOPPING before it ends. A state out of order (a reload before READY, a
READY after STOPPING) is sent as a status text only. Log lines carry priorities if the journal reads them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TextIO

from rlinf_actors import shown

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
    """Reports the state of this daemon to systemd, the service manager. Outside of systemd it does nothing. Not
    thread-safe.

    Args:
        address: address of systemd's notification socket: a path, ``@name`` for an abstract socket, "" outside of
            systemd.
        watchdog_s: seconds without a report after which systemd kills the daemon, None for no watchdog.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._state = STARTING

    def ready(self, status: str) -> None:
        """Report to systemd that this daemon can be used. *status* is a line for people."""
        self._step("ready", READY="1", STATUS=status)

    def reloading(self, status: str) -> None:
        """Report to systemd that this daemon begins to read its configuration again. *status* is a line for people.

        The caller calls `reloaded` when the configuration has been read.
        """
        self._step("reload", RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000), STATUS=status)

    def reloaded(self, status: str) -> None:
        self._step("reloaded", READY="1", STATUS=status)

    def stopping(self, status: str) -> None:
        """Report to systemd that this daemon is about to end. *status* is a line for people. Idempotent."""
        self._step("stop", STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        """Report the line *text* to systemd, which shows it to people. Allowed in any state of the daemon."""
        self._send(STATUS=text)

    def watch(self, loop: asyncio.AbstractEventLoop) -> Watchdog | None:
        """Return a Watchdog that runs on *loop* and reports to systemd twice in each watchdog interval.

        The result is None if the unit has no watchdog.
        """
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
        """Send *fields* to systemd in one datagram. If that fails, only log it, because the daemon can work without
        systemd.
        """
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
    """Calls *beat* on the loop at once and then every *interval_s* seconds.

    *beat* reports to systemd that the daemon works. If the loop stands still, the reports stop, and systemd kills the
    daemon. The caller closes the watchdog before the loop.
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
        """Stop the calls of *beat*. Idempotent."""
        self._timer.cancel()


_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""Least level of logging for each priority of syslog, see sd-daemon(3)."""


def reads(fd: int, stream: str) -> bool:
    """Return True if systemd's journal reads what is written to the descriptor *fd*. A closed *fd* gives False.

    *stream* is $JOURNAL_STREAM: ``DEVICE:INODE`` of the journal's socket. The variable alone proves nothing, because a
    process with another stderr inherits it too.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def marked(text: str, level: int) -> str:
    """Return *text* with the journal's priority mark for *level* before each line.

    The journal makes an entry of each line.
    """
    priority = next(number for least, number in _PRIORITIES if level >= least)
    return "\n".join(f"<{priority}>{line}" for line in text.splitlines() or [""])


class SafeFormatter(logging.Formatter):
    """Formats log records with escapes for control characters, which texts of other processes may have.

    A message is one line, so that no text can look like another entry; a traceback has its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown.lines(record.message).replace("\n", "\n    ")
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return shown.lines(super().formatException(ei))


class JournalFormatter(SafeFormatter):
    """Formats log records for systemd's journal: with priority marks, and without times, which the journal adds."""

    def format(self, record: logging.LogRecord) -> str:
        return marked(super().format(record), record.levelno)


class DaemonStderr:
    """Writes a daemon's log and its last message to stderr, with priority marks if systemd's journal reads stderr.

    Args:
        program: name of the daemon, which begins each line outside of the journal.
        stream: the daemon's stderr.
        journal_stream: $JOURNAL_STREAM, "" outside of systemd.
    """

    def __init__(self, program: str, stream: TextIO, journal_stream: str) -> None:
        self._program = program
        self._stream = stream
        self._journal = bool(journal_stream) and reads(stream.fileno(), journal_stream)

    def formatter(self) -> logging.Formatter:
        if self._journal:
            return JournalFormatter("%(levelname)s: %(message)s")
        return SafeFormatter(f"{self._program} %(asctime)s %(levelname)s: %(message)s")

    def set_up_logging(self, level: int = logging.INFO) -> None:
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(self.formatter())
        logging.basicConfig(level=level, handlers=[handler])

    def say(self, text: str, level: int = logging.ERROR) -> None:
        """Print *text*, the reason why the daemon ends, to stderr. Works before logging is set up."""
        text = shown.lines(text)
        line = marked(text, level) if self._journal else f"{self._program}: {text}"
        print(line, file=self._stream, flush=True)
