"""The sequence of faults, from the seed alone. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rlinf_actors.errors import ConfigError

KINDS: Mapping[str, int] = MappingProxyType(
    {
        "kill worker": 6,
        "kill template": 2,
        "kill agentd": 2,
        "kill head": 2,
        "kill driver": 2,
        "stop worker": 2,
        "stop agentd": 1,
        "stop head": 1,
        "stop driver": 1,
        "slow worker": 1,
        "slow agentd": 1,
        "slow head": 1,
        "slow driver": 1,
        "cut agentd": 1,
    }
)
"""Kinds of faults with their relative frequencies. Killed agentds, heads and drivers are restarted."""

STOP_S = (0.1, 1.5)
SLOW_S = (0.5, 2.0)
AWAY_S = (0.1, 2.0)
"""Seconds for which a process is stopped, slow, or absent before its restart."""
LATE_S = 0.2
"""Delay of a slow process's messages."""
CUT_S = (1.0, 3.0)
"""Seconds by which a cut outlasts the lease: what a shorter one loses, TCP would send again."""


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        kind: one of KINDS.
        pick: chooses among the possible targets: a number from 0 to below 1.
        seconds: its duration.
    """

    kind: str
    pick: float
    seconds: float

    @property
    def how(self) -> str:
        """Kill, stop, slow or cut."""
        return self.kind.partition(" ")[0]

    @property
    def whom(self) -> str:
        """Worker, template, agentd, head or driver."""
        return self.kind.partition(" ")[2]


class Plan:
    """The faults of a run, one after the other.

    Args:
        seed: the same seed gives the same faults; their targets depend on the processes that run then.
        kinds: kinds of faults, all by default.
        lease_s: the lease of the cluster's nodes.

    Raises:
        ConfigError: there is no such kind.
    """

    def __init__(self, seed: int, kinds: Sequence[str] = (), lease_s: float = 0.0) -> None:
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(f"{kind!r} is no kind of fault; known: {', '.join(KINDS)}", path="--chaos-kinds")
        self._random = random.Random(seed)
        self._kinds = list(kinds or KINDS)
        self._lease_s = lease_s

    def next(self) -> Strike:
        """The next fault."""
        kind = self._random.choices(self._kinds, [KINDS[kind] for kind in self._kinds])[0]
        how = kind.partition(" ")[0]
        low, high = {"kill": AWAY_S, "stop": STOP_S, "slow": SLOW_S, "cut": CUT_S}[how]
        seconds = self._random.uniform(low, high) + (self._lease_s if how == "cut" else 0.0)
        return Strike(kind, self._random.random(), seconds)
