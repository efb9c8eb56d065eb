"""Differences between the monotonic clocks of machines, measured by heartbeats. Pure.

A process sends a beat at its time *sent*; the head answers with its own time; the answer arrives at *received*. If both
messages took equally long, the head's time belongs to the middle of the two. The difference is wrong by at most half of
the round trip, plus the precision with which event loops know the time.
"""

from __future__ import annotations

import msgspec

PRECISION_S = 0.001
"""Event loops read the clock once in a turn."""
WINDOW_S = 60.0
"""Of the beats of this time the one with the shortest round trip counts: others may have waited somewhere."""


class Sample(msgspec.Struct, frozen=True):
    """One measurement: at the own time *at*, the head's clock was *offset* seconds ahead, plus or minus *error*."""

    at: float
    offset: float
    error: float


class HeadClock:
    """How far the head's monotonic clock is ahead of this process's. The first and the latest best sample are kept.

    Two machines' clocks drift apart by some milliseconds an hour, so times between the samples are interpolated.
    """

    def __init__(self) -> None:
        self.first: Sample | None = None
        self.last: Sample | None = None

    def answered(self, sent: float, received: float, head: float) -> None:
        """Count the answer *head* (the head's time) to the beat of the time *sent*, which arrived at *received*."""
        if received < sent or head <= 0 or sent <= 0:
            return
        sample = Sample(received, head - (sent + received) / 2, (received - sent) / 2 + PRECISION_S)
        if self.first is None or (received - self.first.at < WINDOW_S and sample.error < self.first.error):
            self.first = sample
        if self.last is None or received - self.last.at > WINDOW_S or sample.error <= self.last.error:
            self.last = sample

    def forget(self) -> None:
        """Drop all samples: another head, with another clock, answers from now on."""
        self.first = self.last = None

    def samples(self) -> list[Sample]:
        """Return the samples to interpolate between: none, one or two."""
        if self.first is None or self.last is None:
            return []
        return [self.first] if self.first == self.last else [self.first, self.last]


def offset_at(samples: list[Sample], at: float) -> tuple[float, float]:
    """Return how many seconds the head's clock was ahead at the own time *at*, and the greatest error of that.

    Without samples both are 0.
    """
    if not samples:
        return 0.0, 0.0
    if len(samples) == 1 or samples[1].at - samples[0].at < WINDOW_S:
        best = min(samples, key=lambda one: one.error)
        return best.offset, best.error
    first, last = samples[0], samples[-1]
    share = (at - first.at) / (last.at - first.at)
    return first.offset + share * (last.offset - first.offset), max(first.error, last.error)
