"""Writes events to the head's own log file. Workers of a group that start or stop together on a node share a line.

The event log has an entry for each worker. A line costs about 10 us, which a head that starts 10,000 workers needs for
other messages.
"""

from __future__ import annotations

import logging

from rlinf_actors.head.commands import LogEvent
from rlinf_actors.head.event_log import level
from rlinf_actors.model.readable import ranges

log = logging.getLogger("rlinf_actors.head")

SHARED = {"worker_started": "are up", "worker_stopped": "were stopped"}
"""Kinds of events that share a line, and what the line says of the workers."""


class LogLines:
    """Writes events as lines of the log, in their order. The caller calls `flush` after each turn of the loop."""

    def __init__(self) -> None:
        self._together: list[LogEvent] = []

    def add(self, event: LogEvent) -> None:
        """Write the event; or keep it until `flush`, or until an event that cannot share a line with it."""
        if self._together and not _alike(event, self._together[0]):
            self.flush()
        if event.kind in SHARED:
            self._together.append(event)
        else:
            log.log(level(event.kind), "%s", event.text)

    def flush(self) -> None:
        """Write the line of the events that were kept."""
        events, self._together = self._together, []
        if len(events) == 1:
            log.log(level(events[0].kind), "%s", events[0].text)
        elif events:
            first = events[0]
            why = f": {first.exit.reason}" if first.exit is not None and first.exit.reason else ""
            log.log(
                level(first.kind), "%d workers of group %r of job %r on node %s %s%s: ranks %s",
                len(events), first.group, first.namespace, first.node, SHARED[first.kind], why,
                ranges(event.rank or 0 for event in events),
            )  # fmt: skip


def _alike(event: LogEvent, first: LogEvent) -> bool:
    return (
        event.kind == first.kind
        and event.node_id == first.node_id
        and event.group == first.group
        and event.namespace == first.namespace
        and event.exit == first.exit
    )
