"""When a group's workers are started again after a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinf_actors.errors import UsageError


@dataclass(frozen=True)
class RestartPolicy:
    """Whether, how often and how soon a worker that failed is started again on its node, under its rank.

    A failure is an end that nobody asked for: an exit code other than 0, a signal, no memory. Make one by
    `on_failure`, or `never`.

    Attributes:
        max_restarts: how many restarts of one rank may fall into `within_s`; one failure more, and it is gone for good.
        within_s: length of that sliding window, in seconds.
        backoff_s: seconds from a failure to the restart; doubled for every restart that the window holds already.
        backoff_max_s: at most so many.
    """

    max_restarts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise UsageError(f"max_restarts is {self.max_restarts!r}; it must be a whole number, 0 or more")
        for name, least in (("within_s", "more than 0"), ("backoff_s", "0 or more"), ("backoff_max_s", "0 or more")):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not (value > 0 or (value == 0 and least != "more than 0")):
                raise UsageError(f"{name} is {value!r}; it must be a number of seconds, {least}")

    @classmethod
    def never(cls) -> RestartPolicy:
        """A worker that has ended stays so; the default of a launch."""
        return cls(max_restarts=0)

    @classmethod
    def on_failure(
        cls, max_restarts: int = 3, within_s: float = 60.0, backoff_s: float = 0.5, backoff_max_s: float = 30.0
    ) -> RestartPolicy:
        """Start a worker again after a failure; see the attributes.

        Raises:
            UsageError: a number cannot be.
        """
        return cls(max_restarts, within_s, backoff_s, backoff_max_s)

    @property
    def restarts(self) -> bool:
        """Whether anything is ever restarted."""
        return self.max_restarts > 0


def next_id(worker_id: str, incarnation: int) -> str:
    """The id of a worker's next incarnation, which no other worker has."""
    return f"{rank_id(worker_id)}.{incarnation}"


def rank_id(worker_id: str) -> str:
    """What the ids of all incarnations of one rank of one launch have in common."""
    return worker_id.partition(".")[0]


def launch_of(worker_id: str) -> str:
    """Return what the ids of all workers of one launch begin with: it tells a group from a namesake."""
    return rank_id(worker_id).rpartition("-")[0]
