"""The first seconds of a head that was restarted: what it cannot answer yet waits until its nodes are back. Pure.

Agents, drivers and workers come back in any order. Until every node that was registered has said what it has, or
one lease has passed, this head knows a part only: a name that it does not know may well be in use. Of a rank that
ended before, its group's owner alone may know.

House rule: what is held is bounded. Requests are (`head.underway`), of hellos and handles each peer has one, and who
has no session yet has nothing else to ask.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from rlinf_actors.head.commands import Asked, Event, Told, TurnedAway
from rlinf_actors.wire.agents import FlushLogs, LogCredit, LogLines, WorkerReady, WorkersHealth
from rlinf_actors.wire.clients import FindGroup, GetNodes, Handles, Launch, StopCluster, StopGroup
from rlinf_actors.wire.operators import EndGroup, GetEvents, GetStatus
from rlinf_actors.wire.session import Beat, ClientHello

_TELLS_NOTHING = (Beat, LogLines, LogCredit, FlushLogs, WorkerReady, WorkersHealth, GetStatus, GetEvents, GetNodes)


class Settling:
    """Holds what comes too early.

    Args:
        until: when it is over at the latest.
        missing: whether nodes are still to come back.
        whole: whether a group, by namespace and name, is known with all its workers.
        worker_known: whether a worker, by its id, is known.
        owner_away: whether the owner of a group, by namespace and name, is still to say what it knows of it.
        has_session: whether a peer said hello, and was welcomed.
        dropped: called with an event that a later one of its peer has taken the place of.
    """

    def __init__(
        self,
        until: float,
        missing: Callable[[], bool],
        whole: Callable[[str, str], bool],
        worker_known: Callable[[str], bool],
        owner_away: Callable[[str, str], bool],
        has_session: Callable[[bytes], bool],
        dropped: Callable[[Asked | Told], None],
    ) -> None:
        self.until = until
        self.over = not missing()
        self._missing = missing
        self._whole = whole
        self._worker_known = worker_known
        self._owner_away = owner_away
        self._late = False
        self._has_session = has_session
        self._dropped = dropped
        self._numbers = itertools.count()
        self._held: dict[int, Asked | Told] = {}
        self._last: dict[tuple[bytes, type[object]], int] = {}
        self._launches: Counter[tuple[bytes, str, str]] = Counter()

    def holds(self, event: Asked | Told) -> bool:
        """Whether an event is too early; it is kept for `take` then."""
        if not self._too_early(event):
            return False
        number = next(self._numbers)
        self._held[number] = event
        if isinstance(event.body, Launch):
            self._launches[_launch(event)] += 1
        if isinstance(event.body, (ClientHello, Handles)):
            # said again until there is an answer, or whole: the last one counts
            before = self._last.pop((event.peer, type(event.body)), None)
            if before is not None:
                self._dropped(self._release(before))
            self._last[event.peer, type(event.body)] = number
        return True

    def look(self, now: float) -> bool:
        """Whether the waiting has ended just now."""
        self._late = now >= self.until
        if not self.over and (self._late or not self._missing()):
            self.over = True
            return True
        return False

    def take(self, after: Sequence[Event]) -> list[Asked | Told]:
        """What was held and can go on after these events, in the order in which it came.

        Looks at groups come last: what others hold handles of, or launch, may tell of ranks that no agent has any more.
        """
        if not self._held or all(map(_tells_nothing, after)):
            return []
        ready = [number for number, event in self._held.items() if not self._too_early(event)]
        return sorted(map(self._release, ready), key=lambda event: isinstance(event.body, FindGroup))

    def forget(self, peer: bytes) -> None:
        """A client has ended: nobody waits there any more."""
        for number in [number for number, event in self._held.items() if event.peer == peer]:
            self._release(number)

    def stalled(self, seconds: float) -> None:
        """The head stood still: nobody was silent."""
        self.until += seconds

    def next_deadline(self) -> float:
        """When it is over at the latest, infinity if it is."""
        return math.inf if self.over and not self._held else self.until

    def _release(self, number: int) -> Asked | Told:
        event = self._held.pop(number)
        if isinstance(event.body, Launch):
            self._launches[_launch(event)] -= 1
            if not self._launches[_launch(event)]:
                del self._launches[_launch(event)]
        if self._last.get((event.peer, type(event.body))) == number:
            del self._last[event.peer, type(event.body)]
        return event

    def _too_early(self, event: Asked | Told) -> bool:
        body = event.body
        if isinstance(body, (StopCluster, EndGroup)):
            return not self.over  # groups of nodes that are not back yet end too
        if not isinstance(body, ClientHello) and not self._has_session(event.peer):
            return False  # it is told to say hello first
        if isinstance(body, FindGroup) and not self._late and not self._whole(body.namespace, body.group):
            return not self.over or self._owner_away(body.namespace, body.group)
        if self.over:
            return False
        if isinstance(body, ClientHello):
            # a worker is a member if an agent has it; a new driver must not be given a token that is not the job's
            return not self._worker_known(body.parent or body.worker_id) if body.role == "worker" else not body.token
        if isinstance(body, StopGroup) and self._launches[event.peer, body.namespace, body.group]:
            return True  # what is to stop has not begun
        if isinstance(body, StopGroup):
            return not self._whole(body.namespace, body.group)
        if isinstance(body, GetNodes):
            return not body.num_nodes
        return isinstance(body, (Launch, Handles))


def _tells_nothing(event: Event) -> bool:
    """Whether what was too early still is after an event."""
    said = isinstance(event, (Asked, Told)) and isinstance(event.body, _TELLS_NOTHING)
    return said or isinstance(event, TurnedAway)


def _launch(event: Asked | Told) -> tuple[bytes, str, str]:
    assert isinstance(event.body, Launch)
    return event.peer, event.body.namespace, event.body.group
