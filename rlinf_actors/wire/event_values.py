"""Entries of the event log, and their JSON for `rlinf-actors events --json` and the hooks of the head. Pure."""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from rlinf_actors.wire.bounds import Name, Text
from rlinf_actors.wire.protocol import Number, Pid
from rlinf_actors.wire.values import ExitReport, Value

EventKind = Literal[
    "head_started", "head_stopped", "events_missing",
    "node_joined", "node_suspect", "node_heard", "node_lost", "node_left",
    "node_draining", "node_drained", "node_undrained",
    "driver_joined", "driver_ended", "refused",
    "group_launched", "group_adopted", "group_ended",
    "worker_started", "worker_unresponsive", "worker_responsive", "worker_restarted", "worker_stopped", "worker_died",
    "breakpoint_reached", "breakpoint_attached", "breakpoint_left",
    "output_lost", "output_written", "lease_lost", "robot_conflict", "estop", "estop_released",
    "key_added", "key_enrolled", "key_rotated", "key_ended",
]  # fmt: skip
"""Kinds of events in a cluster.

`head_stopped` is an orderly end; before the next `head_started` it is missing if the head was killed. A reader inserts
`events_missing` in place of events that the head no longer keeps. `node_heard` ends node_suspect.
`node_drained` means that no worker is left on a draining node. `worker_stopped` is the end of a worker that was asked
to end, or of the host of a closed channel; every other end of a worker is `worker_died`.
"""


class ClusterEvent(Value, frozen=True):
    """One entry of the cluster's event log.

    Attributes:
        seq: its number in this head's log, from 1 on. Entries that are no longer kept leave gaps.
        at: time at which the head saw it, in seconds since the epoch by the head's clock.
        kind: the kind of event.
        text: one line for people.
        node: hostname of the node in question, "" for none.
        node_id: id of that node.
        namespace: name of the job, "" for an event of the whole cluster.
        group: name of the group.
        rank: rank of the worker, None for an event without a worker.
        worker_id: id of the worker; it changes with each restart.
        pid: process id of the worker or driver, 0 for none.
        exit: how the worker ended, with the last lines of its stderr.
    """

    seq: int
    at: Number
    kind: EventKind
    text: Text
    node: Name = ""
    node_id: Name = ""
    namespace: Name = ""
    group: Name = ""
    rank: Union[int, None] = None
    worker_id: Name = ""
    pid: Pid = 0
    exit: Union[ExitReport, None] = None


def event_dict(event: ClusterEvent) -> dict[str, Any]:
    """Return the JSON object of an event. Its keys are stable; new keys may be added."""
    shown: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    shown["exit"] = None if event.exit is None else msgspec.structs.asdict(event.exit)
    return shown
