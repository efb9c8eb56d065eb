"""Failure detection: when to check a silent peer's machine, when to give the peer up, when to reconnect.

Pure: time is an argument.

After three missed heartbeats the caller checks the machine of a silent head (`net.reachability`). If the machine
answers, even with a refusal, the network works: the head is restarting or stopped, or our old connection is stuck.
Operations that wait for the head may then go on for a grace period. If the machine does not answer for a lease, the
network is cut, and the head has given this process up as well. Drivers and workers also check the nodes of the
workers that they wait for, in the same way but without a grace period, since the head reports every death.
"""

from __future__ import annotations

import math
from collections.abc import Callable

REACHABILITY_TIMEOUT_S = 2.0
"""Seconds after which a machine that has not answered a connection attempt counts as silent. The kernel repeats a lost
SYN after 1 s."""
STALL_S = 0.5
"""Seconds. A timer that fires later than this shows that the process stood still (SIGSTOP, a suspended machine)."""
SUSPECT_BEATS = 3
"""Missed heartbeats after which the peer's machine is checked; the same number makes a node suspect at the head."""


def stalled_s(due: float, now: float) -> float:
    """Return for how many seconds this process stood still, from a timer that was due at *due* and fires at *now*.

    A delay of up to STALL_S is normal and gives 0.
    """
    return now - due if now - due > STALL_S else 0.0


class FailureDetector:
    """Decides whether a peer is lost, from its silence and from checks of its machine. Times are in seconds.

    Args:
        grace_s: how long the peer may be silent while its machine answers.
        checks: False if the caller never checks the peer's machine, so that only *grace_s* counts.
        who: name of the peer for the text of `verdict`.

    Attributes:
        grace_s: as given.
        beat_s: time between two heartbeats of the peer; the caller sets this.
        lease_s: how long the peer's machine may be silent; the caller sets this.
        last: time of the peer's last message.
    """

    def __init__(self, grace_s: float, checks: bool = True, who: str = "the head") -> None:
        self._who = who
        self.grace_s = grace_s
        self.beat_s = 1.0
        self.lease_s = 10.0
        self.last = 0.0
        self._answered = 0.0  # time at which its machine answered last
        self._next_check = math.inf
        self._checks = checks
        self._checking = False
        self._missed = False

    def seconds(self, now: float) -> float:
        """Return for how many seconds the peer has been silent."""
        return now - self.last

    def suspected(self, now: float) -> bool:
        """Return True if the peer has missed three heartbeats, or been silent for half a lease, so that its machine
        must be checked.
        """
        return self.seconds(now) >= self.suspect_s

    def heard(self, now: float) -> None:
        """Record that a message of the peer arrived."""
        self.last = self._answered = now
        self._missed = False
        self._check_at(now + self.suspect_s)

    def stalled(self, seconds: float, now: float) -> None:
        """Record that this process stood still for *seconds*. This time does not count as silence of the peer."""
        self.last = min(now, self.last + seconds)
        self._answered = min(now, max(self._answered + seconds, now - self.suspect_s))
        self._missed = False
        self._check_at(now + self.beat_s)  # what waits in the sockets is read first

    def should_check(self, now: float) -> bool:
        """Return True if the caller must check the peer's machine now. The caller reports the result by `checked` or
        `check_failed`.
        """
        if self._checking or now < self._next_check:
            return False
        self._checking = True
        return True

    @property
    def check_timeout_s(self) -> float:
        """Most seconds that a check of the peer's machine may take: short enough for several checks within a lease."""
        return min(REACHABILITY_TIMEOUT_S, self.lease_s / 4)

    def checked(self, answered: bool, now: float) -> None:
        """Record the result of a check of the peer's machine. *answered* is True if the machine answered."""
        self._checking = False
        if answered:
            self._answered, self._missed = now, False
            self._check_at(now + self.lease_s / 2)
        else:
            self._missed = self._missed or now >= self._answered + self.suspect_s
            self._check_at(now + self.beat_s)

    def check_failed(self, now: float) -> None:
        """Record that the peer's machine could not be checked, which does not count as its silence. Allow another
        check.
        """
        self._checking = False
        self._check_at(now + self.beat_s)

    def verdict(self, now: float) -> str | None:
        """Return, for people, why the peer is lost; None as long as it is not."""
        if self._missed and now >= self._answered + self.lease_s:
            return (
                f"{self._who} was silent for {self.seconds(now):.3g} s, and so was its machine for "
                f"{now - self._answered:.3g} s: the network between here and there is cut"
            )
        if self.seconds(now) >= self.grace_s:
            return f"{self._who} was silent for {self.seconds(now):.3g} s, although its machine answers"
        return None

    def next_deadline(self) -> float:
        """Return the time at which `should_check` or `verdict` can give a new result; infinity for never."""
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
    def suspect_s(self) -> float:
        """Seconds of silence after which the peer's machine must be checked."""
        return min(SUSPECT_BEATS * self.beat_s, self.lease_s / 2)


HELLO_TIMEOUT_S = 5.0
"""Most seconds to wait for the answer to a hello."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 3.0
"""RETRY_MIN_S and RETRY_MAX_S bound the pause between two attempts, in seconds. The pause doubles each time and is
shortened by up to a half at random, so that processes that lost the head together do not reconnect together."""
REMIND_S = 60.0
"""Seconds between two log lines about one outage of the head."""


class ReconnectBackoff:
    """Decides for one process when it tries again to reach a lost head, and which attempts it logs.

    *random* returns a number from 0 to 1, by which pauses differ between processes.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._pause = RETRY_MIN_S
        self._since: float | None = None
        self._logged = 0.0

    def attempt_timeout(self, lease_s: float) -> float:
        """Return for how many seconds the next attempt may wait for the head's answer.

        This is a quarter of the lease at first, and longer with each attempt, because the head may be slow.
        """
        return min(HELLO_TIMEOUT_S, lease_s / 4 * self._pause / RETRY_MIN_S)

    def pause(self) -> float:
        """Return for how many seconds to wait before the next attempt. The pause doubles each
        time, up to RETRY_MAX_S.
        """
        pause = self._pause * (1 - self._random() / 2)
        self._pause = min(self._pause * 2, RETRY_MAX_S)
        return pause

    def failed(self, now: float, text: str) -> str:
        """Record that an attempt to reach the head failed, or that the head is silent. *text* describes the failure.

        Returns:
            The line to log; "" if the last line was logged less than REMIND_S seconds ago.
        """
        if self._since is None:
            self._since = self._logged = now
            return text
        if now - self._logged < REMIND_S:
            return ""
        self._logged = now
        return f"{text} (for {now - self._since:.0f} s now)"

    def recovered(self, now: float) -> float | None:
        """Record that the head answers again. Return the seconds since the first failure, None if
        there was no failure.
        """
        since, self._since = self._since, None
        self._pause = RETRY_MIN_S
        return None if since is None else now - since
