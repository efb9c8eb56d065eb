"""The first seconds of a head that was restarted: what it cannot answer yet waits until its nodes are back. Pure.

Agents, drivers and workers come back in any order. Until every node that was registered has said what it has, or
one lease has passed, this head knows a part only: a name that it does not know may well be in use. Of a rank that
ended before, its group's owner alone may know.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlinf_actors.head.commands import Asked, Told
from rlinf_actors.wire.clients import FindGroup, GetNodes, Handles, Launch, StopGroup
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.session import ClientHello


class Settling:
    """Holds what comes too early.

    Args:
        until: when it is over at the latest.
        missing: whether nodes are still to come back.
        whole: whether a group, by namespace and name, is known with all its workers.
        worker_known: whether a worker, by its id, is known.
        owner_away: whether the owner of a group, by namespace and name, is still to say what it knows of it.
    """

    def __init__(
        self,
        until: float,
        missing: Callable[[], bool],
        whole: Callable[[str, str], bool],
        worker_known: Callable[[str], bool],
        owner_away: Callable[[str, str], bool],
    ) -> None:
        self.until = until
        self.over = not missing()
        self._missing = missing
        self._whole = whole
        self._worker_known = worker_known
        self._owner_away = owner_away
        self._late = False
        self._held: list[Asked | Told] = []

    def holds(self, event: Asked | Told) -> bool:
        """Whether an event is too early; it is kept for `take` then."""
        if not self._too_early(event):
            return False
        if isinstance(event.body, ClientHello):  # said again and again until it is answered: the last one counts
            self._held = [e for e in self._held if e.peer != event.peer or not isinstance(e.body, ClientHello)]
        self._held.append(event)
        return True

    def look(self, now: float) -> bool:
        """Whether the waiting has ended just now."""
        self._late = now >= self.until
        if not self.over and (self._late or not self._missing()):
            self.over = True
            return True
        return False

    def take(self) -> list[Asked | Told]:
        """What was held and can go on, in the order in which it came.

        Looks at groups come last: what others hold handles of, or launch, may tell of ranks that no agent has any more.
        """
        ready = [event for event in self._held if not self._too_early(event)]
        self._held = [event for event in self._held if event not in ready]
        return sorted(ready, key=lambda event: isinstance(event.body, FindGroup))

    def forget(self, peer: bytes) -> None:
        """A client has ended: nobody waits there any more."""
        self._held = [event for event in self._held if event.peer != peer]

    def stalled(self, seconds: float) -> None:
        """The head stood still: nobody was silent."""
        self.until += seconds

    def next_deadline(self) -> float:
        """When it is over at the latest, infinity if it is."""
        return math.inf if self.over and not self._held else self.until

    def _too_early(self, event: Asked | Told) -> bool:
        body = event.body
        if isinstance(body, FindGroup) and not self._late and not self._whole(body.namespace, body.group):
            return not self.over or self._owner_away(body.namespace, body.group)
        if self.over:
            return False
        if isinstance(body, ClientHello):
            # a worker is a member if an agent has it; a new driver must not be given a token that is not the job's
            return not self._worker_known(body.worker_id) if body.role == "worker" else not body.token
        if isinstance(body, StopGroup) and any(e.peer == event.peer and _launches(e.body, body) for e in self._held):
            return True  # what is to stop has not begun
        if isinstance(body, StopGroup):
            return not self._whole(body.namespace, body.group)
        if isinstance(body, GetNodes):
            return not body.num_nodes
        return isinstance(body, (Launch, Handles))


def _launches(body: Body, stop: StopGroup) -> bool:
    return isinstance(body, Launch) and (body.namespace, body.group) == (stop.namespace, stop.group)
