"""Clients of which this head has heard, but not from. Pure.

They own workers that agents tell of, or others wait for their end. Each has a time to say hello itself, and longer
while an agent says that it watches the process.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from rlinf_actors.head.commands import Timing
from rlinf_actors.head.givenup import label
from rlinf_actors.security.members import Member

MAX_AWAITED = 16384
"""Clients that one member may name which this head has not heard of."""
SOON_S = 4.0
"""Within so many seconds a client that lives is back at a head that was restarted: it tries every 3 s at most."""


@dataclass
class Stranger:
    """One of them.

    Attributes:
        incarnation: of the client.
        by: who named it.
        until: when its time is over.
        said_gone: whether an agent said that its process has ended.
    """

    incarnation: str
    by: Member
    until: float
    said_gone: bool = False


class Awaited:
    """All of them.

    Args:
        timing: the head's timers.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._strangers: dict[str, Stranger] = {}
        self._named_by: Counter[str] = Counter()
        self._seen: dict[str, set[str]] = {}

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._strangers

    def may_name(self, member: Member) -> bool:
        """Whether a member may name another one."""
        return self._named_by[label(member)] < MAX_AWAITED

    def add(self, incarnation: str, now: float, by: Member) -> None:
        """Give it `patience_s` to say hello; nothing new if it is awaited already."""
        if incarnation not in self._strangers:
            self._strangers[incarnation] = Stranger(incarnation, by, now + self._timing.patience_s)
            self._named_by[label(by)] += 1

    def is_here(self, incarnation: str) -> None:
        """It has said hello."""
        self._pop(incarnation)
        self._seen.pop(incarnation, None)

    def seen(self, node_id: str, incarnation: str) -> None:
        """The agent of this node watches its process, since an earlier head asked it to."""
        self._seen.setdefault(incarnation, set()).add(node_id)

    def said_gone(self, node_id: str, incarnation: str, now: float) -> None:
        """The agent of this node says that its process has ended: it has SOON_S to say otherwise."""
        if incarnation in self._seen:
            self._unsee(incarnation, node_id)
        stranger = self._strangers.get(incarnation)
        if stranger is not None:
            stranger.until = min(stranger.until, now + SOON_S)
            stranger.said_gone = True

    def node_gone(self, node_id: str, heard: float) -> None:
        """An agent that was last heard at *heard* watches nobody any more; its clients have a lease from then on."""
        for incarnation in [i for i, nodes in self._seen.items() if node_id in nodes]:
            stranger = self._strangers.get(incarnation)
            if self._unsee(incarnation, node_id) and stranger is not None:
                stranger.until = max(stranger.until, heard + self._timing.lease_s)

    def overdue(self, now: float) -> list[Stranger]:
        """Take those whose time is over, and whom no agent watches."""
        due = [one.incarnation for one in self._unwatched() if now >= one.until]
        return [one for one in map(self._pop, due) if one is not None]

    def stalled(self, seconds: float) -> None:
        """The head stood still, and heard nobody."""
        for stranger in self._strangers.values():
            stranger.until += seconds

    def next_deadline(self) -> float:
        """When somebody is overdue, infinity for never."""
        return min((one.until for one in self._unwatched()), default=math.inf)

    def _unwatched(self) -> list[Stranger]:
        return [one for one in self._strangers.values() if one.incarnation not in self._seen]

    def _pop(self, incarnation: str) -> Stranger | None:
        stranger = self._strangers.pop(incarnation, None)
        if stranger is not None:
            self._named_by[label(stranger.by)] -= 1
            if not self._named_by[label(stranger.by)]:
                del self._named_by[label(stranger.by)]
        return stranger

    def _unsee(self, incarnation: str, node_id: str) -> bool:
        """That node's agent does not watch it any more; whether nobody does now."""
        nodes = self._seen[incarnation]
        nodes.discard(node_id)
        if not nodes:
            del self._seen[incarnation]
        return not nodes
