"""Control messages for people: what they ask the head by `rlinf-actors`, a Cluster, or an emergency stop."""

from __future__ import annotations

from typing import Union

from rlinf_actors.wire.bounds import Number
from rlinf_actors.wire.protocol import Message
from rlinf_actors.wire.values import ClusterEvent, GroupState, LeaseState, NodeState, RobotStop


class GetStatus(Message, frozen=True):
    """Answered by Status. `namespace` None: every namespace."""

    namespace: Union[str, None] = None


class Status(Message, frozen=True):
    """What a head knows. `at` is its clock, in seconds since the epoch. It serves protocols `oldest` to `protocol`."""

    epoch: str
    version: str
    uptime_s: Number
    nodes: list[NodeState]
    groups: list[GroupState]
    clients: list[str]
    leases: list[LeaseState] = []
    stopped: list[str] = []
    trouble: list[str] = []
    at: Number = 0.0
    protocol: int = 5  # a head of protocol 5 does not say
    oldest: int = 5


class GetEvents(Message, frozen=True):
    """The entries of the event log after `since` (0: all that the head keeps, -1: none of the past), `limit` at most.
    Answered by Events: at once if there are any, else when there is one, or after `wait_s` seconds without any.

    `log` is the Events' that `since` comes from; another head's numbers mean nothing, so that one answers from its
    first entry on. `namespace` None: every job's; a client asks for its own, and is told of the cluster's too.
    """

    since: int = 0
    log: str = ""
    namespace: Union[str, None] = None
    limit: int = 1000
    wait_s: Number = 0.0


class Events(Message, frozen=True):
    """`next` is the `since` of the next question; `missing` entries up to there are not kept
    any more; `more` says that there are further ones now. `at` is the head's clock, in seconds since the epoch.
    """

    log: str
    at: Number
    events: list[ClusterEvent]
    next: int
    missing: int = 0
    more: bool = False


class EStop(Message, frozen=True):
    """Emergency stop of all robots, or of those of one namespace; `release` lifts it. Anybody whom the head's sockets
    let in may ask. Until it is lifted no group that uses robots is launched there. Answered by EStopped. `by` is who
    asks, for people.
    """

    by: str
    reason: str = ""
    namespace: Union[str, None] = None
    release: bool = False


class EStopped(Message, frozen=True):
    """Which workers were told to make their robots safe. `stopped` is what is in force now, a line each. `warning`: it
    is in force, but a head that is restarted would not know. `lifted` is the stop that a release has ended, "" where
    none was in force; None of a head before protocol 6, which does not say.
    """

    hits: list[RobotStop] = []
    stopped: list[str] = []
    warning: str = ""
    lifted: Union[str, None] = None


class EndGroup(Message, frozen=True):
    """End a group, whoever owns it: SIGTERM, after `grace_s` SIGKILL. Answered by Done when all workers are gone, or by
    Failed(kind=not_found). A driver's key may end groups of its own jobs. `by` is who asks, for people. Since
    protocol 7.
    """

    namespace: str
    group: str
    grace_s: Number
    by: str
    reason: str = ""


class DrainNode(Message, frozen=True):
    """Start no new workers on a node; what runs there goes on until its owners end it. `undo` lifts it. Anybody whom
    the head's sockets let in may ask; `by` is who asks, for people. Answered by Drained.
    """

    node_id: str
    by: str
    reason: str = ""
    undo: bool = False


class Drained(Message, frozen=True):
    """The node as it is now; None where it is away and its drain was lifted. `warning`: what went wrong beside that."""

    node: Union[NodeState, None] = None
    warning: str = ""
