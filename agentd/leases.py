"""The leases of this node's robot workers: renewed by the head's answers, enforced here. Pure; time is an argument."""

from __future__ import annotations

import math

BEATS = 4
"""Beats in a robot lease: three may be late."""


class RobotLeases:
    """One lease for all robot workers of a node.

    It lasts `lease_s` from when a beat was sent that the head answered: the head was there then, whenever the answer
    came. A worker that the lease was lost for is not given one again.

    Attributes:
        lease_s: as the head said.
        until: the end of the lease.
    """

    def __init__(self) -> None:
        self.lease_s = 2.0
        self.until = 0.0
        self._held: set[str] = set()

    @property
    def beat_s(self) -> float:
        """How often the head is to be told; infinity without robot workers."""
        return self.lease_s / BEATS if self._held else math.inf

    @property
    def deadline(self) -> float:
        """When `expired` has something to say, infinity for never."""
        return self.until if self._held else math.inf

    def started(self, id: str, now: float) -> None:
        """A robot worker is to be started: the head said so, which counts as its word where no beat is fresh."""
        if self.until < now + self.lease_s / 2:
            self.until = now + self.lease_s
        self._held.add(id)

    def ended(self, id: str) -> None:
        """A worker has ended, or is told to."""
        self._held.discard(id)

    def answered(self, at: float, now: float) -> bool:
        """The head answered a beat sent at that time. Returns whether the lease lasts longer now."""
        if not self._held or not now < self.until < at + self.lease_s:
            return False  # too late: those that held it are told to stop
        self.until = at + self.lease_s
        return True

    def expired(self, now: float) -> list[str]:
        """The workers that have lost it; each is named once."""
        if now < self.deadline:
            return []
        lost, self._held = sorted(self._held), set()
        return lost
