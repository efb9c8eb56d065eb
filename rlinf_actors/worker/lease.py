"""A robot worker's lease: until when it may move its robots. Pure; time is an argument."""

from __future__ import annotations

MARGIN = 0.15
"""Part of the lease that is kept for stopping: 0.3 s of 2 s, of which the threads that move the robot may take 0.2."""


class Lease:
    """Counted from when a beat was sent that the head answered, so that whoever waits for its end is never early.

    Args:
        until: its end, in seconds of CLOCK_MONOTONIC.
        lease_s: how long it lasts from a beat on, in seconds.
    """

    def __init__(self, until: float, lease_s: float) -> None:
        self.until = until
        self.lease_s = lease_s

    def renew(self, until: float) -> None:
        """It lasts until then; one that is older than what is known changes nothing."""
        self.until = max(self.until, until)

    def left(self, now: float) -> float:
        """Seconds until the robot must be made safe, 0 when it is time."""
        return max(0.0, self.until - MARGIN * self.lease_s - now)

    def silence(self, now: float) -> float:
        """For how long there has been no word from the head, in seconds."""
        return now - (self.until - self.lease_s)
