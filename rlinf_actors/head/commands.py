"""The events that the coordinator receives and the commands that it returns. Pure.

A `Persist` command contains a change of the state that survives a restart of the head; `head.store` writes it to disk.
All other state is reported again to a restarted head by the agents and clients that reconnect.
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
"""Kinds of tombstones. The ids are incarnations of lost agents, of replaced agents and of clients, and worker ids."""
KEPT = 4096
"""Largest number of tombstones of each kind; the oldest are dropped."""

# --- persistent state ---


class KnownNode(msgspec.Struct, frozen=True):
    """Add or replace the record of a registered node.

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
    """Drop the record of a node, whose rank becomes free."""

    id: str


class ForgetKey(msgspec.Struct, frozen=True):
    """Drop a key that ended long ago from the list. An unlisted key is refused too."""

    public: str


class KnownJob(msgspec.Struct, frozen=True):
    """Add or replace the record of a job. `proof` is a hash of its token, `owner` the name of its driver's key.

    Only heads with keys write these records.
    """

    namespace: str
    proof: str
    owner: str


class ForgetJob(msgspec.Struct, frozen=True):
    """Drop the record of a job that has ended."""

    namespace: str


class Tombstone(msgspec.Struct, frozen=True):
    """Add a tombstone: the head declared this process dead without proof, and refuses it if it returns."""

    kind: str
    id: str
    reason: str


class ForgetTombstone(msgspec.Struct, frozen=True):
    """Drop a tombstone, to make room for newer ones."""

    kind: str
    id: str


class StopPressed(msgspec.Struct, frozen=True):
    """Put an emergency stop in force. `key` is a namespace or robots.ALL, `text` a line for people."""

    key: str
    text: str


class StopReleased(msgspec.Struct, frozen=True):
    """Release an emergency stop. `key` is a namespace or robots.ALL."""

    key: str


class NodeDrained(msgspec.Struct, frozen=True):
    """Drain a node: it takes no new workers until a NodeUndrained. `why` is the reason, for people."""

    id: str
    why: str


class NodeUndrained(msgspec.Struct, frozen=True):
    """Let a drained node take new workers again."""

    id: str


Change = Union[
    KnownNode, ForgetNode, Tombstone, ForgetTombstone, StopPressed, StopReleased, NodeDrained, NodeUndrained,
    KeyState, ForgetKey, KnownJob, ForgetJob,
]  # fmt: skip


@dataclass
class Snapshot:
    """The persistent state that the earlier head left.

    Attributes:
        epoch: how many heads have started in this directory, this one included.
        nodes: the nodes that had registered.
        given_up: the tombstones: (kind, id) -> reason, the oldest first.
        stops: the emergency stops in force: namespace or robots.ALL -> text.
        drained: node id -> why the node takes no new workers.
        keys: the public keys and join tokens, ended ones included.
        jobs: the jobs; empty for a head without keys.
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
    """A socket rejected `times` connections; fields as the arguments of security.members.Gate.refused."""

    public: str
    address: str
    why: str = ""
    times: int = 1


class TimerDue(msgspec.Struct, frozen=True):
    """The time that `Coordinator.next_deadline` returned has come."""


class HeadStalled(msgspec.Struct, frozen=True):
    """The head itself did not run for `seconds`, so the silence of its peers in that time does not count."""

    seconds: float


class PeerUnreachable(msgspec.Struct, frozen=True):
    """A message was sent to a peer that is not connected."""

    peer: bytes


class StoreStatus(msgspec.Struct, frozen=True):
    """The store reports why it cannot write; `trouble` is "" if it can."""

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
    """End the head and its agent, because a cluster that was asked to end has no worker left."""

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
    """The identity of a head. `epoch` differs at each start of a head. An `embedded` head belongs to one driver."""

    epoch: str
    version: str
    embedded: bool = False


class Timing(msgspec.Struct, frozen=True):
    """The head's timers, in seconds.

    Attributes:
        beat_s: interval of the heartbeats of agents and clients.
        suspect_beats: beats missed before a node is shown as suspect.
        lease_s: silence after which a node is lost and an unwatched client has ended.
        robot_lease_s: how long a robot worker goes on without a message from the head, or from its owner.
        robot_settle_s: how long after its start a head starts no robot worker. A worker that the head does not know
            yet may use the robot until its agent has reported it or its lease has ended.
        head_grace_s: how long clients wait for a head that is down while its machine answers; as agentd's.
        return_s: how long a restarted head waits for its nodes, and for the owners that they name; the lease if that
            is longer. They try to reconnect every 3 s, on a machine that may be busy with its own restart.
        rank_hold_s: how long the rank of a lost node is not given to another node: the longer of the lease and the
            time for which cut-off workers may live while a head restarts (`head_grace_s` of agentd).
        orphan_grace_s: time between SIGTERM and SIGKILL for workers whose owner is gone. It is short because their
            robots must be free within 0.5 s.
        stop_grace_s: time between SIGTERM and SIGKILL when the whole cluster is stopped.
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
        """Seconds for which a restarted head waits for nodes and owners to reconnect."""
        return max(self.lease_s, self.return_s)

    @property
    def suspect_s(self) -> float:
        """Seconds of silence after which a node is suspect."""
        return self.beat_s * self.suspect_beats

    def after_stall(self, last_seen: float, seconds: float, now: float) -> float:
        """Return a peer's new *last_seen* time, corrected for the *seconds* until *now* in which the head did not run.

        The corrected time makes the peer at most suspect, because messages that it sent meanwhile are still unread.
        """
        return min(now, max(last_seen + seconds, now - self.suspect_s))
