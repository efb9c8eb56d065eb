"""The last lines of a daemon's log, in memory: for bug reports, wherever its log goes. Any thread."""

from __future__ import annotations

import logging
from collections import deque

MOST_LINES = 500
LINE_CHARS = 1000


class RecentLog(logging.Handler):
    """Keeps the last MOST_LINES records of a process's log, each cut to LINE_CHARS characters."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._lines: deque[str] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. Called by logging, with this handler's lock."""
        self._lines.append(self.format(record)[:LINE_CHARS])

    def lines(self) -> list[str]:
        """Return the records that are kept, the oldest first."""
        return list(self._lines)


def recent_lines() -> list[str]:
    """Return the last lines of this process's log; none if it keeps none."""
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, RecentLog)]
    return handlers[0].lines() if handlers else []
