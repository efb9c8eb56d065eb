"""How often something was dropped, and when that is worth a line in the log. Pure."""

from __future__ import annotations


class LogThrottle:
    """Counts. A peer that sends nonsense all day must not fill the log with it.

    Attributes:
        count: how often by now.
    """

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> bool:
        """Count once more; whether to say so: the first time, the second, the fourth, the eighth, ..."""
        self.count += 1
        return self.count & (self.count - 1) == 0
