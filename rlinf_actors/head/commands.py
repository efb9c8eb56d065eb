"""What goes into the supervisor and what comes out.

What a head cannot learn again from agents and drivers: values, and how they change. Pure.

`head.store` keeps it on disk. Everything else that a head knows is told again by those who come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Union

import msgspec

from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.client_messages import KeyState
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.values import EventKind, ExitReport, NodeReport

NODE, REPLACED, CLIENT, WORKER = "node", "replaced", "client", "worker"
"""Kinds of what a head gives up on: incarnations of agents and of clients, and ids of workers."""
KEPT = 4096
"""So many of each kind are remembered; the oldest are forgotten."""


class KnownNode(msgspec.Struct, frozen=True):
    """A node that has registered. `rank` is None until it is frozen; a `lost` one is not waited for; `member` is the
    name of the agent's key, "" without one.
    """

    report: NodeReport
    incarnation: str
    is_head: bool = False
    rank: Union[int, None] = None
    lost: bool = False
    member: str = ""


class ForgetNode(msgspec.Struct, frozen=True):
    """Its rank is free."""

    id: str


class ForgetKey(msgspec.Struct, frozen=True):
    """A key that has ended long ago: it is not listed any more, which is refused too."""

    public: str


class KnownJob(msgspec.Struct, frozen=True):
    """A job of a head with keys: `proof` tells its token from others, `owner` is the name of the driver's key."""

    namespace: str
    proof: str
    owner: str


class ForgetJob(msgspec.Struct, frozen=True):
    """A job has ended."""

    namespace: str


class Tombstone(msgspec.Struct, frozen=True):
    """Others were told that this one has ended; if it is still there, it is refused for that reason."""

    kind: str
    id: str
    reason: str


class ForgetTombstone(msgspec.Struct, frozen=True):
    """That is too long ago, or too many came after it."""

    kind: str
    id: str


class StopPressed(msgspec.Struct, frozen=True):
    """An emergency stop is in force; `key` is a namespace or robots.ALL, `text` a line for people."""

    key: str
    text: str


class StopReleased(msgspec.Struct, frozen=True):
    """An emergency stop was released."""

    key: str


class NodeDrained(msgspec.Struct, frozen=True):
    """A node takes no new workers, and why, until somebody lifts that: also while it is away."""

    id: str
    why: str


class NodeUndrained(msgspec.Struct, frozen=True):
    """The node takes new workers again."""

    id: str


Change = Union[
    KnownNode, ForgetNode, Tombstone, ForgetTombstone, StopPressed, StopReleased, NodeDrained, NodeUndrained,
    KeyState, ForgetKey, KnownJob, ForgetJob,
]  # fmt: skip


@dataclass
class Snapshot:
    """What an earlier head at this place knew.

    Attributes:
        epoch: how many heads have started here, this one included.
        nodes: those that had registered.
        given_up: (kind, id) to the reason, the oldest first.
        stops: emergency stops in force.
        drained: ids of the nodes that take no new workers, and why.
        keys: public keys, also those that have ended.
        jobs: of a head with keys.
    """

    epoch: int = 0
    nodes: list[KnownNode] = field(default_factory=list)
    given_up: dict[tuple[str, str], str] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)
    drained: dict[str, str] = field(default_factory=dict)
    keys: list[KeyState] = field(default_factory=list)
    jobs: list[KnownJob] = field(default_factory=list)


class RequestReceived(msgspec.Struct, frozen=True):
    """A peer sent a request; `member` is who that is."""

    peer: bytes
    id: int
    body: Body
    member: Member = LOCAL


class NoticeReceived(msgspec.Struct, frozen=True):
    """A peer sent a notice; `member` is who that is."""

    peer: bytes
    body: Body
    member: Member = LOCAL


class ConnectionRejected(msgspec.Struct, frozen=True):
    """Connections were not let in; fields as the arguments of security.gate.Gate.refused."""

    public: str
    address: str
    why: str = ""
    times: int = 1


class TimerDue(msgspec.Struct, frozen=True):
    """`next_deadline` has come."""


class HeadStalled(msgspec.Struct, frozen=True):
    """The head itself stood still for so many seconds: nobody's silence in that time counts."""

    seconds: float


class PeerUnreachable(msgspec.Struct, frozen=True):
    """Something was sent to a peer that is not connected."""

    peer: bytes


class StoreStatus(msgspec.Struct, frozen=True):
    """What is to be remembered could not be written, and why; "": it is by now."""

    trouble: str


class Notify(msgspec.Struct, frozen=True):
    """Send a notice."""

    peer: bytes
    body: Body


class Answer(msgspec.Struct, frozen=True):
    """Answer a request."""

    peer: bytes
    id: int
    body: Body


class Refuse(msgspec.Struct, frozen=True):
    """Answer a request with an error; fields as in messages.Failed."""

    peer: bytes
    id: int
    kind: str
    text: str
    missing_ranks: tuple[int, ...] = ()
    path: str = ""


class EndCluster(msgspec.Struct, frozen=True):
    """Everything is stopped: end the head and its agent."""

    reason: str


class LogEvent(msgspec.Struct, frozen=True):
    """Something happened: an entry of the event log and a line of the head's own log. Fields as in ClusterEvent."""

    kind: EventKind
    text: str
    node: str = ""
    node_id: str = ""
    namespace: str = ""
    group: str = ""
    rank: Union[int, None] = None
    worker_id: str = ""
    pid: int = 0
    exit: Union[ExitReport, None] = None


class Persist(msgspec.Struct, frozen=True):
    """Remember a change across restarts of the head. Once it is durable, do `then`; `instead` if it cannot be now."""

    change: Change
    then: Union[Answer, None] = None
    instead: Union[Answer, None] = None


Event = Union[RequestReceived, NoticeReceived, ConnectionRejected, TimerDue, HeadStalled, PeerUnreachable, StoreStatus]
Command = Union[Notify, Answer, Refuse, EndCluster, LogEvent, Persist]
Emit = Callable[[Command], None]


class Refusal(Exception):
    """Raised inside the supervisor to refuse the request at hand; fields as in messages.Failed.

    `advice` goes to whoever asked, behind the text, and not into the log.
    """

    def __init__(self, kind: str, text: str, path: str = "", advice: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.path = path
        self.advice = advice


class Identity(msgspec.Struct, frozen=True):
    """What a head says of itself. `epoch` differs each time one is started."""

    epoch: str
    version: str
    embedded: bool = False


class Timing(msgspec.Struct, frozen=True):
    """The head's timers, in seconds.

    Attributes:
        beat_s: how often agents and clients say that they are there.
        suspect_beats: beats missed before a node is shown as suspect.
        lease_s: silence after which a node is lost and an unwatched client has ended.
        robot_lease_s: how long a robot worker goes on without our word, and without a word of its owner.
        robot_settle_s: how long after its start a head starts no worker on a robot: one that it does not know of yet
            may hold the robot on another node, until its agent has said so or its lease is over.
        head_grace_s: how long clients wait for a head whose machine answers; as agentd's.
        return_s: how long a restarted head waits for its nodes, and for owners that they name, at least; the lease if
            that is longer. They try again every 3 s at most, on a machine that may be busy with its own restart.
        rank_hold_s: how long the rank of a lost node is kept from others. The longer of the lease and the time
            that cut-off workers may live while a head is restarting (`head_grace_s` of agentd).
        orphan_grace_s: between SIGTERM and SIGKILL for the workers of an owner that is gone; a robot that one of
            them holds is to be free within 0.5 s.
        stop_grace_s: the same when the whole cluster is stopped.
    """

    beat_s: float = 1.0
    suspect_beats: int = 3
    lease_s: float = 10.0
    robot_lease_s: float = 2.0
    robot_settle_s: float = 0.0
    head_grace_s: float = 120.0
    return_s: float = 10.0
    rank_hold_s: float = 120.0
    orphan_grace_s: float = 0.4
    stop_grace_s: float = 3.0

    @property
    def patience_s(self) -> float:
        """How long a restarted head waits for those who are to come back."""
        return max(self.lease_s, self.return_s)

    @property
    def suspect_s(self) -> float:
        """Silence after which a node is suspect."""
        return self.beat_s * self.suspect_beats

    def after_stall(self, last_seen: float, seconds: float, now: float) -> float:
        """When somebody counts as last seen, after the head itself stood still for so many *seconds* until *now*.

        Suspect at most: the stall began before the timer was due that showed it, and what they sent waits to be read.
        """
        return min(now, max(last_seen + seconds, now - self.suspect_s))
