"""Throttles log lines about dropped messages, so that a peer that sends malformed bytes cannot fill the log. Pure."""

from __future__ import annotations


class LogThrottle:
    """Counts occurrences in `count` and decides which of them are logged."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> bool:
        """Count an occurrence. Return True if it must be logged: the first, the second, the fourth, the eighth, ..."""
        self.count += 1
        return self.count & (self.count - 1) == 0
