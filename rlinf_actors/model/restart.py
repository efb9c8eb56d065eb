"""RestartPolicy, which says when the head restarts a worker, and functions that split and make worker ids.

A worker id is ``LAUNCH-RANK``, and ``LAUNCH-RANK.INCARNATION`` after a restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinf_actors.errors import UsageError


@dataclass(frozen=True)
class RestartPolicy:
    """When a worker that has failed is restarted, and how often. A restart keeps the worker's node and rank.

    A failure is an end that was not requested: an exit code other than 0, a signal, or lack of memory. A worker with
    robots loses its lease by each failure. Make a policy with `on_failure` or `never`.

    Attributes:
        max_restarts: number of restarts of one rank within `within_s`. After one more failure the rank is not
            restarted.
        within_s: length in seconds of the sliding window in which restarts are counted.
        backoff_s: seconds from a failure to the restart; doubled for each earlier restart in the window.
        backoff_max_s: upper bound of that time, in seconds.
        after_lease_lost: True to restart workers with robots too. What the constructor and on_restart() do to the robot
            then happens while nobody may be watching.
    """

    max_restarts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    after_lease_lost: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.after_lease_lost, bool):
            raise UsageError(f"after_lease_lost is {self.after_lease_lost!r}; it must be True or False")
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise UsageError(f"max_restarts is {self.max_restarts!r}; it must be a whole number, 0 or more")
        for name, least in (("within_s", "more than 0"), ("backoff_s", "0 or more"), ("backoff_max_s", "0 or more")):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not (value > 0 or (value == 0 and least != "more than 0")):
                raise UsageError(f"{name} is {value!r}; it must be a number of seconds, {least}")

    @classmethod
    def never(cls) -> RestartPolicy:
        """Return the policy that restarts no worker, which is the default of a launch."""
        return cls(max_restarts=0)

    @classmethod
    def on_failure(
        cls, max_restarts: int = 3, within_s: float = 60.0, backoff_s: float = 0.5, backoff_max_s: float = 30.0,
        after_lease_lost: bool = False,
    ) -> RestartPolicy:  # fmt: skip
        """Return a policy that restarts a worker after each failure. Each argument sets the attribute of the same name.

        Raises:
            UsageError: a number is not valid.
        """
        return cls(max_restarts, within_s, backoff_s, backoff_max_s, after_lease_lost)

    @property
    def restarts(self) -> bool:
        """True if the policy allows at least one restart."""
        return self.max_restarts > 0


def next_id(worker_id: str, incarnation: int) -> str:
    """Return the worker id of another incarnation of a rank: the one with number *incarnation*.

    *worker_id* is the id of any incarnation of the rank.
    """
    return f"{rank_id(worker_id)}.{incarnation}"


def rank_id(worker_id: str) -> str:
    """Return a worker id without its incarnation.

    The result is the same text for all incarnations of one rank of one launch.
    """
    return worker_id.partition(".")[0]


def launch_of(worker_id: str) -> str:
    """Return the part of a worker id that identifies the launch.

    It is equal for all workers of one launch, and differs between two launches of groups with the same name.
    """
    return rank_id(worker_id).rpartition("-")[0]
