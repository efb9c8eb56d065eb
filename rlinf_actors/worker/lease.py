"""A robot worker's lease: until when it may move its robots. Pure; time is an argument.

The guard counts in CLOCK_BOOTTIME, which goes on while the machine is suspended: a machine that slept for longer than
the lease has lost it. The template counts in CLOCK_MONOTONIC, as agentd does.
"""

from __future__ import annotations

MARGIN = 0.2
"""Part of the lease that is kept for stopping: 0.4 s of 2 s, of which the threads that move the robot may take 0.2."""
END_MARGIN = 0.125
"""Part of the lease before whose end nothing renews it any more: 0.25 s of 2 s. A guard that could not run until then
has 0.15 s to say so before its template kills the worker.
"""


class Lease:
    """Counted from when a beat was sent that the head answered, so that whoever waits for its end is never early.

    Args:
        until: its end.
        lease_s: how long it lasts from a beat on, in seconds.
    """

    def __init__(self, until: float, lease_s: float) -> None:
        self.until = until
        self.lease_s = lease_s

    def renew(self, until: float) -> None:
        """It lasts until then; one that is older than what is known changes nothing."""
        self.until = max(self.until, until)

    def left(self, now: float) -> float:
        """Seconds until the robot must be made safe if no renewal comes, 0 when it is time."""
        return max(0.0, self.until - MARGIN * self.lease_s - now)

    @property
    def last_moment(self) -> float:
        """When the lease is lost for good. A renewal that is read later, by a process that stood still, is void."""
        return self.until - END_MARGIN * self.lease_s

    def lost(self, now: float) -> bool:
        """True if no renewal that the guard reads now can save the lease any more."""
        return now >= self.last_moment

    def silence(self, now: float) -> float:
        """For how long there has been no word from the head, in seconds."""
        return now - (self.until - self.lease_s)
