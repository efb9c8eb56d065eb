"""What the silence of the head means to an agent, a driver or a worker. Pure; time is an argument.

From three missed beats on the head's machine is asked whether anything listens at the head's address (the shell does
that, with `net.reachability`). An answer, be it a refusal, says that the network is whole: the head restarts,
stands still, or our old connection is stuck, so all that waits for it may go on for its grace. No answer for a lease
says that the network is cut, and then the head has given up on us as well. The same is asked of nodes whose workers
somebody waits for; theirs is no grace to end, since the head tells of every end.

A head that is not there: when to try again, and what to say of it. Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable

REACHABILITY_TIMEOUT_S = 2.0
"""A machine that has not answered a connection attempt by then counts as silent; a lost SYN is repeated after 1 s."""
STALL_S = 0.5
"""A timer that comes later than this says that the process stood still (SIGSTOP, a suspended machine)."""
SUSPECT_BEATS = 3
"""Beats missed before the head's machine is asked, as many as make a node suspect at the head."""


def stalled_s(due: float, now: float) -> float:
    """Return how long this process stood still if a timer of *due* fires at *now*; 0 if it was not late."""
    return now - due if now - due > STALL_S else 0.0


class FailureDetector:
    """How long the head has been silent, and its machine.

    Args:
        grace_s: how long the head may be silent while its machine answers.
        looks: whether its machine is asked at all; without that only the grace counts.
        who: what the head is called in a verdict.

    Attributes:
        grace_s: as given.
        beat_s: how often it is heard of, as it said.
        lease_s: how long its machine may be silent, as it said.
    """

    def __init__(self, grace_s: float, looks: bool = True, who: str = "the head") -> None:
        self._who = who
        self.grace_s = grace_s
        self.beat_s = 1.0
        self.lease_s = 10.0
        self._heard = 0.0
        self._there = 0.0
        self._next_look = math.inf
        self._looks = looks
        self._looking = False
        self._missed = False

    @property
    def last(self) -> float:
        """When it was heard of last."""
        return self._heard

    def seconds(self, now: float) -> float:
        """How long the head has been silent."""
        return now - self._heard

    def suspected(self, now: float) -> bool:
        """Whether it has been silent for so long that its machine is asked."""
        return self.seconds(now) >= self._suspect_s

    def heard(self, now: float) -> None:
        """The head said something."""
        self._heard = self._there = now
        self._missed = False
        self._look_at(now + self._suspect_s)

    def stalled(self, seconds: float, now: float) -> None:
        """We stood still ourselves so long: nobody was silent in that time, and a look that ended then says nothing."""
        self._heard = min(now, self._heard + seconds)
        self._there = min(now, max(self._there + seconds, now - self._suspect_s))
        self._missed = False
        self._look_at(now + self.beat_s)  # first what waits to be read

    def should_check(self, now: float) -> bool:
        """Whether to ask the head's machine now; `looked` is to follow."""
        if self._looking or now < self._next_look:
            return False
        self._looking = True
        return True

    @property
    def check_timeout_s(self) -> float:
        """How long a look may take: several fit into the lease."""
        return min(REACHABILITY_TIMEOUT_S, self.lease_s / 4)

    def checked(self, there: bool, now: float) -> None:
        """Its machine answered, or did not."""
        self._looking = False
        if there:
            self._there, self._missed = now, False
            self._look_at(now + self.lease_s / 2)
        else:
            self._missed = self._missed or now >= self._there + self._suspect_s
            self._look_at(now + self.beat_s)

    def check_failed(self, now: float) -> None:
        """The look could not be made: nothing is known by it, and the next one may be."""
        self._looking = False
        self._look_at(now + self.beat_s)

    def verdict(self, now: float) -> str | None:
        """Why what depends on the head has to end; None as long as it may go on."""
        if self._missed and now >= self._there + self.lease_s:
            return (
                f"{self._who} was silent for {self.seconds(now):.3g} s, and so was its machine for "
                f"{now - self._there:.3g} s: the network between here and there is cut"
            )
        if self.seconds(now) >= self.grace_s:
            return f"{self._who} was silent for {self.seconds(now):.3g} s, although its machine answers"
        return None

    def next_deadline(self) -> float:
        """When `look` or `verdict` has something new to say, infinity for never."""
        times = [self._heard + self.grace_s]
        if not self._looking:
            times.append(self._next_look)
        if self._missed:
            times.append(self._there + self.lease_s)
        return min(times)

    def _look_at(self, at: float) -> None:
        if self._looks:
            self._next_look = at

    @property
    def _suspect_s(self) -> float:
        return min(SUSPECT_BEATS * self.beat_s, self.lease_s / 2)


HELLO_TIMEOUT_S = 5.0
"""How long a hello may wait for its answer, at most."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 3.0
"""Bounds of the pause between two tries; doubled each time, and shortened by up to a half at random: many who lost the
head at one moment must not all come back at one moment.
"""
REMIND_S = 60.0
"""One line is enough in so much time."""


class ReconnectBackoff:
    """One end's view of the other's absence.

    Args:
        random: between 0 and 1.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._pause = RETRY_MIN_S
        self._since: float | None = None
        self._said = 0.0

    def attempt_timeout(self, lease_s: float) -> float:
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

    def recovered(self, now: float) -> float | None:
        """The other end is there: for how many seconds it was not, None if nothing was said of that."""
        since, self._since = self._since, None
        self._pause = RETRY_MIN_S
        return None if since is None else now - since
