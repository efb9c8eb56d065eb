"""Decides what silence means: when to check a peer's machine, when to give the peer up, when to reconnect. Pure.

After three missed beats the machine of a silent head is checked (`net.reachability`; the caller does that). An answer,
also a refusal, shows that the network is whole: the head restarts, stands still, or our old connection is stuck. What
waits for the head may then go on for its grace. No answer for a lease shows that the network is cut, and that the head
has given up on us as well. Drivers and workers do the same for nodes whose workers they wait for; these have no grace,
since the head reports every end. Time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable

REACHABILITY_TIMEOUT_S = 2.0
"""A machine that has not answered a connection attempt by then counts as silent; a lost SYN is repeated after 1 s."""
STALL_S = 0.5
"""A timer that is later than this shows that the process stood still (SIGSTOP, a suspended machine)."""
SUSPECT_BEATS = 3
"""Missed beats after which the peer's machine is checked: as many as make a node suspect at the head."""


def stalled_s(due: float, now: float) -> float:
    """Return how long this process stood still if a timer of *due* fires at *now*; 0 if it was not late."""
    return now - due if now - due > STALL_S else 0.0


class FailureDetector:
    """Decides from a peer's silence, and its machine's, whether the peer is lost.

    Args:
        grace_s: how long the peer may be silent while its machine answers.
        checks: False to ignore its machine; then only the grace counts.
        who: the peer, for the verdict.

    Attributes:
        grace_s: as given.
        beat_s: how often the peer is heard from, as it said.
        lease_s: how long its machine may be silent, as it said.
        last: when it was heard from last.
    """

    def __init__(self, grace_s: float, checks: bool = True, who: str = "the head") -> None:
        self._who = who
        self.grace_s = grace_s
        self.beat_s = 1.0
        self.lease_s = 10.0
        self.last = 0.0
        self._answered = 0.0  # when its machine did
        self._next_check = math.inf
        self._checks = checks
        self._checking = False
        self._missed = False

    def seconds(self, now: float) -> float:
        """Return how long the peer has been silent."""
        return now - self.last

    def suspected(self, now: float) -> bool:
        """Return True if the peer has been silent for so long that its machine is checked."""
        return self.seconds(now) >= self._suspect_s

    def heard(self, now: float) -> None:
        """Note a message of the peer."""
        self.last = self._answered = now
        self._missed = False
        self._check_at(now + self._suspect_s)

    def stalled(self, seconds: float, now: float) -> None:
        """Note that this process stood still: nobody was silent then, and a check that ended then says nothing."""
        self.last = min(now, self.last + seconds)
        self._answered = min(now, max(self._answered + seconds, now - self._suspect_s))
        self._missed = False
        self._check_at(now + self.beat_s)  # what waits in the sockets is read first

    def should_check(self, now: float) -> bool:
        """Return True if the caller must check the peer's machine now, and then call `checked` or `check_failed`."""
        if self._checking or now < self._next_check:
            return False
        self._checking = True
        return True

    @property
    def check_timeout_s(self) -> float:
        """How long a check may take: several fit into the lease."""
        return min(REACHABILITY_TIMEOUT_S, self.lease_s / 4)

    def checked(self, answered: bool, now: float) -> None:
        """Note the result of a check: the machine answered, or it did not."""
        self._checking = False
        if answered:
            self._answered, self._missed = now, False
            self._check_at(now + self.lease_s / 2)
        else:
            self._missed = self._missed or now >= self._answered + self._suspect_s
            self._check_at(now + self.beat_s)

    def check_failed(self, now: float) -> None:
        """Note that a check could not be made. It says nothing; the next one may be made."""
        self._checking = False
        self._check_at(now + self.beat_s)

    def verdict(self, now: float) -> str | None:
        """Return why what depends on the peer must end, None while it may go on."""
        if self._missed and now >= self._answered + self.lease_s:
            return (
                f"{self._who} was silent for {self.seconds(now):.3g} s, and so was its machine for "
                f"{now - self._answered:.3g} s: the network between here and there is cut"
            )
        if self.seconds(now) >= self.grace_s:
            return f"{self._who} was silent for {self.seconds(now):.3g} s, although its machine answers"
        return None

    def next_deadline(self) -> float:
        """Return when `should_check` or `verdict` has a new answer, infinity for never."""
        times = [self.last + self.grace_s]
        if not self._checking:
            times.append(self._next_check)
        if self._missed:
            times.append(self._answered + self.lease_s)
        return min(times)

    def _check_at(self, at: float) -> None:
        if self._checks:
            self._next_check = at

    @property
    def _suspect_s(self) -> float:
        return min(SUSPECT_BEATS * self.beat_s, self.lease_s / 2)


HELLO_TIMEOUT_S = 5.0
"""Most seconds that a hello waits for its answer."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 3.0
"""Bounds of the pause between two attempts. It doubles each time and is shortened by up to a half at random, so that
processes that lost the head at one moment do not all come back at one moment."""
REMIND_S = 60.0
"""Seconds between two log lines about one outage."""


class ReconnectBackoff:
    """When to try again to reach a head that is away, and what to log; *random* returns a number from 0 to 1."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._pause = RETRY_MIN_S
        self._since: float | None = None
        self._logged = 0.0

    def attempt_timeout(self, lease_s: float) -> float:
        """Return the seconds that this attempt may take.

        A lost attempt must leave time in the lease for another; a head that is slow to answer gets more each time.
        """
        return min(HELLO_TIMEOUT_S, lease_s / 4 * self._pause / RETRY_MIN_S)

    def pause(self) -> float:
        """Return the seconds until the next attempt."""
        pause = self._pause * (1 - self._random() / 2)
        self._pause = min(self._pause * 2, RETRY_MAX_S)
        return pause

    def failed(self, now: float, text: str) -> str:
        """Note a failed attempt, or a long silence. Return the line to log, "" for none."""
        if self._since is None:
            self._since = self._logged = now
            return text
        if now - self._logged < REMIND_S:
            return ""
        self._logged = now
        return f"{text} (for {now - self._since:.0f} s now)"

    def recovered(self, now: float) -> float | None:
        """Note that the head is there. Return how long it was away, None if nothing was logged about that."""
        since, self._since = self._since, None
        self._pause = RETRY_MIN_S
        return None if since is None else now - since
