"""The state of a cluster as its head answers GetStatus, at once."""

from __future__ import annotations

from rlinf_actors.head.coordinator import Coordinator
from rlinf_actors.wire.client_messages import Status


def status_of(head: Coordinator, now: float) -> Status:
    """Return the state of the whole cluster at *now*, in monotonic seconds."""
    head.now = max(head.now, now)
    work = head.describe(lambda namespace: True, lambda states: states)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
