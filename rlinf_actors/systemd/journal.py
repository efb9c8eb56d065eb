"""Log lines of a daemon: for people on a terminal or in a file, with priorities where systemd's journal reads them."""

from __future__ import annotations

import logging
import os
from typing import TextIO

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
