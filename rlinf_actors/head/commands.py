"""Values that go into and come out of the coordinator. Pure.

Events go in, commands come out. A `Persist` command carries a change of the state that survives a restart of the head;
`head.store` keeps it on disk. Everything else that a head knows is reported again by agents and clients that reconnect.
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
"""Kinds of tombstones: incarnations of agents (two kinds) and of clients, and ids of workers."""
KEPT = 4096
"""Tombstones that are kept of each kind; the oldest are forgotten."""

# --- persistent state ---


class KnownNode(msgspec.Struct, frozen=True):
    """A node that has registered.

    `rank` is None until it is frozen. A restarted head does not wait for a `lost` node. `member` is the name of the
    agent's key, "" without one.
    """

    report: NodeReport
    incarnation: str
    is_head: bool = False
    rank: Union[int, None] = None
    lost: bool = False
    member: str = ""


class ForgetNode(msgspec.Struct, frozen=True):
    """The rank of a lost node is free."""

    id: str


class ForgetKey(msgspec.Struct, frozen=True):
    """A key ended long ago and leaves the list. Unlisted keys are refused too."""

    public: str


class KnownJob(msgspec.Struct, frozen=True):
    """A job of a head with keys: `proof` is a hash of its token, `owner` the name of the driver's key."""

    namespace: str
    proof: str
    owner: str


class ForgetJob(msgspec.Struct, frozen=True):
    """A job has ended."""

    namespace: str


class Tombstone(msgspec.Struct, frozen=True):
    """The head declared a process dead without proof. If it is still there, it is refused for this reason."""

    kind: str
    id: str
    reason: str


class ForgetTombstone(msgspec.Struct, frozen=True):
    """A tombstone made room for newer ones."""

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
    """A node takes no new workers until the drain is undone, also while the node is away."""

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
    """The persistent state that the head before this one left.

    Attributes:
        epoch: how many heads have started in this directory, this one included.
        nodes: nodes that had registered.
        given_up: tombstones: (kind, id) to the reason, the oldest first.
        stops: emergency stops in force.
        drained: ids of the nodes that take no new workers, and why.
        keys: public keys, ended ones too.
        jobs: jobs of a head with keys.
    """

    epoch: int = 0
    nodes: list[KnownNode] = field(default_factory=list)
    given_up: dict[tuple[str, str], str] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)
    drained: dict[str, str] = field(default_factory=dict)
    keys: list[KeyState] = field(default_factory=list)
    jobs: list[KnownJob] = field(default_factory=list)


# --- events ---


class RequestReceived(msgspec.Struct, frozen=True):
    """A peer, authenticated as `member`, sent a request."""

    peer: bytes
    id: int
    body: Body
    member: Member = LOCAL


class NoticeReceived(msgspec.Struct, frozen=True):
    """A peer, authenticated as `member`, sent a notice."""

    peer: bytes
    body: Body
    member: Member = LOCAL


class ConnectionRejected(msgspec.Struct, frozen=True):
    """The sockets rejected connections; fields as the arguments of security.members.Gate.refused."""

    public: str
    address: str
    why: str = ""
    times: int = 1


class TimerDue(msgspec.Struct, frozen=True):
    """`Coordinator.next_deadline` has come."""


class HeadStalled(msgspec.Struct, frozen=True):
    """The head itself did not run for so many seconds: silence of others in that time does not count."""

    seconds: float


class PeerUnreachable(msgspec.Struct, frozen=True):
    """A message was sent to a peer that is not connected."""

    peer: bytes


class StoreStatus(msgspec.Struct, frozen=True):
    """The store cannot write, and why; "" when it can again."""

    trouble: str


# --- commands ---


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
    """Answer a request with an error; fields as in wire.control_codec.Failed."""

    peer: bytes
    id: int
    kind: str
    text: str
    missing_ranks: tuple[int, ...] = ()
    path: str = ""


class EndCluster(msgspec.Struct, frozen=True):
    """All workers have stopped: end the head and its agent."""

    reason: str


class LogEvent(msgspec.Struct, frozen=True):
    """Add an entry to the event log and a line to the head's own log; fields as in wire.values.ClusterEvent."""

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
    """Write a change to disk, then send `then`, or `instead` if it cannot be written now."""

    change: Change
    then: Union[Answer, None] = None
    instead: Union[Answer, None] = None


Event = Union[RequestReceived, NoticeReceived, ConnectionRejected, TimerDue, HeadStalled, PeerUnreachable, StoreStatus]
Message = Union[RequestReceived, NoticeReceived]
Command = Union[Notify, Answer, Refuse, EndCluster, LogEvent, Persist]
Emit = Callable[[Command], None]


class Refused(Exception):
    """Raised inside the coordinator to refuse the request at hand; fields as in wire.control_codec.Failed.

    `advice` goes to the sender of the request, after the text, and not into the log.
    """

    def __init__(self, kind: str, text: str, path: str = "", advice: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.path = path
        self.advice = advice


class Identity(msgspec.Struct, frozen=True):
    """The identity of a head; `epoch` differs each time one starts. A driver owns an `embedded` head."""

    epoch: str
    version: str
    embedded: bool = False


class Timing(msgspec.Struct, frozen=True):
    """The head's timers, in seconds.

    Attributes:
        beat_s: interval of the heartbeats of agents and clients.
        suspect_beats: beats missed before a node is shown as suspect.
        lease_s: silence after which a node is lost and an unwatched client has ended.
        robot_lease_s: how long a robot worker goes on without a word of the head, and of its owner.
        robot_settle_s: how long after its start a head starts no robot worker: a worker that the head does not know
            yet may use the robot on another node, until its agent has reported it or its lease is over.
        head_grace_s: how long clients wait for a head whose machine answers; as agentd's.
        return_s: how long a restarted head waits at least for its nodes, and for owners that they name; the lease if
            that is longer. They reconnect every 3 s at most, on a machine that may be busy with its own restart.
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
        """How long a restarted head waits for nodes and owners to come back."""
        return max(self.lease_s, self.return_s)

    @property
    def suspect_s(self) -> float:
        """Silence after which a node is suspect."""
        return self.beat_s * self.suspect_beats

    def after_stall(self, last_seen: float, seconds: float, now: float) -> float:
        """Return when a peer counts as last seen, after the head did not run for *seconds* until *now*.

        The peer is suspect at most: the stall began before the timer was due that would have shown it, and what the
        peer sent meanwhile waits to be read.
        """
        return min(now, max(last_seen + seconds, now - self.suspect_s))
