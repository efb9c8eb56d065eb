"""Throttles log lines about dropped messages: a peer that sends nonsense all day must not fill the log. Pure."""

from __future__ import annotations


class LogThrottle:
    """Counts occurrences in `count`."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> bool:
        """Count one more. Return True if it is to be logged: the first, the second, the fourth, the eighth, ..."""
        self.count += 1
        return self.count & (self.count - 1) == 0
