"""What a daemon tells the service manager: datagrams to $NOTIFY_SOCKET, as sd_notify(3) has them.

House rule: what is said is true when it is said. READY once the service can be used, STOPPING once it will end; what is
out of order (a reload before READY, a READY after STOPPING) is told as a status only, or not at all.

Log lines of a daemon: for people on a terminal or in a file, with priorities where systemd's journal reads them.
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
"""How long a change of state waits for a manager whose queue is full, in seconds; the loop stands still meanwhile."""

STARTING, READY, RELOADING, STOPPING = "starting", "ready", "reloading", "stopping"

NEXT = {
    STARTING: {"ready": READY, "stop": STOPPING},
    READY: {"ready": READY, "reload": RELOADING, "stop": STOPPING},
    RELOADING: {"reloaded": READY, "stop": STOPPING},
    STOPPING: {"stop": STOPPING},
}
"""What a service may say, by what it said last. What is not here is not said: the manager would take it for the start
that it waits for, or for an end that was given up."""


class Manager:
    """The service manager, as this process sees it; silent where there is none. Any thread, one at a time.

    Args:
        address: of its socket: a path, ``@name`` for an abstract one, "" for none.
        watchdog_s: how long it takes silence for a hang, None for ever.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._state = STARTING

    def ready(self, status: str) -> None:
        """The service can be used; *status* is for people."""
        self._step("ready", READY="1", STATUS=status)

    def reloading(self, status: str) -> None:
        """The configuration is read again; `reloaded` ends that."""
        self._step("reload", RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000), STATUS=status)

    def reloaded(self, status: str) -> None:
        """That is over, whatever came of it."""
        self._step("reloaded", READY="1", STATUS=status)

    def stopping(self, status: str) -> None:
        """The service will end. Twice is fine."""
        self._step("stop", STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        """A line for people, at any time."""
        self._send(STATUS=text)

    def watch(self, loop: asyncio.AbstractEventLoop) -> Watchdog | None:
        """Say at half the time that *loop* goes on, until it is closed; None where nobody asked for that."""
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
        """A manager that is gone, or stands still, is logged only: the service is not worse for it."""
        if not self._address:
            return
        lines = [f"{name}={' '.join(value.split())}" for name, value in fields.items()]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                # READY and the like are said once: worth a wait where the manager's queue is full
                channel.settimeout(0.0 if fields.keys() <= {"STATUS", "WATCHDOG"} else PATIENCE_S)
                channel.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("cannot notify the service manager at %s: %s", self._address, error)


class Watchdog:
    """Calls *beat* from the loop, at once and then each *interval_s*: a loop that stands still says nothing.

    Args:
        loop: is watched. `close` before it is closed.
        interval_s: seconds.
        beat: says that the loop goes on.
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
        """Say no more. Twice is fine."""
        self._timer.cancel()


ERROR, WARNING, INFO, DEBUG = 3, 4, 6, 7
"""Of syslog, as sd-daemon(3) has them."""


def reads(fd: int, stream: str) -> bool:
    """Whether the journal reads what is written to *fd*.

    Args:
        fd: a descriptor; one that is closed is nobody's.
        stream: $JOURNAL_STREAM, ``DEVICE:INODE`` of the journal's socket; a process that was started with another
            stderr inherits it all the same.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def priority(level: int) -> int:
    """A priority of syslog for a level of logging."""
    if level >= logging.ERROR:
        return ERROR
    if level >= logging.WARNING:
        return WARNING
    return INFO if level >= logging.INFO else DEBUG


def marked(text: str, level: int) -> str:
    """*text* as the journal wants it: a mark at the beginning of each line, which is an entry of its own there."""
    mark = f"<{priority(level)}>"
    return "\n".join(mark + line for line in text.splitlines() or [""])


class JournalFormatter(logging.Formatter):
    """Marks, and no times: the journal has its own."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, with its traceback if it has one."""
        return marked(super().format(record), record.levelno)


class Voice:
    """How a daemon speaks on its stderr.

    Args:
        program: its name, the first word of each line outside the journal.
        stream: its stderr.
        journal_stream: $JOURNAL_STREAM.
    """

    def __init__(self, program: str, stream: TextIO, journal_stream: str) -> None:
        self._program = program
        self._stream = stream
        self._journal = bool(journal_stream) and reads(stream.fileno(), journal_stream)

    def set_up_logging(self, level: int = logging.INFO) -> None:
        """Send all that is logged here."""
        if self._journal:
            formatter: logging.Formatter = JournalFormatter("%(levelname)s: %(message)s")
        else:
            formatter = logging.Formatter(f"{self._program} %(asctime)s %(levelname)s: %(message)s")
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(formatter)
        logging.basicConfig(level=level, handlers=[handler])

    def say(self, text: str, level: int = logging.ERROR) -> None:
        """One message that is no log record: why the process ends."""
        line = marked(text, level) if self._journal else f"{self._program}: {text}"
        print(line, file=self._stream, flush=True)
