"""A head that is not there: when to try again, and what to say of it. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Callable

HELLO_TIMEOUT_S = 5.0
"""How long a hello may wait for its answer, at most."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 3.0
"""Bounds of the pause between two tries; doubled each time, and shortened by up to a half at random: many who lost the
head at one moment must not all come back at one moment.
"""
REMIND_S = 60.0
"""One line is enough in so much time."""


class Outage:
    """One end's view of the other's absence.

    Args:
        random: between 0 and 1.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._pause = RETRY_MIN_S
        self._since: float | None = None
        self._said = 0.0

    def patience(self, lease_s: float) -> float:
        """Seconds that this try may take. One that is lost must leave time in the lease for another, and a head that
        is slow to answer gets more each time.
        """
        return min(HELLO_TIMEOUT_S, lease_s / 4 * self._pause / RETRY_MIN_S)

    def pause(self) -> float:
        """Seconds until the next try."""
        pause = self._pause * (1 - self._random() / 2)
        self._pause = min(self._pause * 2, RETRY_MAX_S)
        return pause

    def failed(self, now: float, text: str) -> str:
        """A try has failed, or nothing was heard for long: what to say of it, "" for nothing."""
        if self._since is None:
            self._since = self._said = now
            return text
        if now - self._said < REMIND_S:
            return ""
        self._said = now
        return f"{text} (for {now - self._since:.0f} s now)"

    def over(self, now: float) -> float | None:
        """The other end is there: for how many seconds it was not, None if nothing was said of that."""
        since, self._since = self._since, None
        self._pause = RETRY_MIN_S
        return None if since is None else now - since
