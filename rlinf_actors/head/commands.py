"""The events that the coordinator receives and the commands that it returns. Pure.

A `Persist` command contains a change of the state that survives a restart of the head; `head.store` writes it to disk.
All other state is reported again to a restarted head by the agentds and clients that reconnect.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Union

import msgspec

from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.event_values import ClusterEvent, EventKind
from rlinf_actors.wire.key_messages import KeyState
from rlinf_actors.wire.values import ExitReport, NodeReport

NODE, REPLACED, CLIENT, WORKER = "node", "replaced", "client", "worker"
"""Kinds of tombstones. The ids are incarnations of lost agentds, of replaced agentds and of clients, and worker ids."""
KEPT = 4096
"""Largest number of tombstones of each kind, and of ended keys; the head drops the oldest."""

# --- persistent state ---


class KnownNode(msgspec.Struct, frozen=True):
    """Change that adds or replaces the record of a registered node.

    `rank` is None until the node's rank is fixed. A restarted head does not wait for a `lost` node. `member` is the
    name of the agentd's key, "" without a key, and `user` the user that the key is limited to. `proof` is a hash of the
    agentd's secret, "" if it has none.
    """

    report: NodeReport
    incarnation: str
    is_head: bool = False
    rank: Union[int, None] = None
    lost: bool = False
    member: str = ""
    user: str = ""
    proof: str = ""


class ForgetNode(msgspec.Struct, frozen=True):
    """Change that drops the record of a node. Its rank becomes free."""

    id: str


class ForgetKey(msgspec.Struct, frozen=True):
    """Change that drops an ended key from the list of keys. The head still refuses the key, as it is not listed."""

    public: str


class KnownJob(msgspec.Struct, frozen=True):
    """Change that adds or replaces the record of a job. Only heads with keys make such records.

    `proof` is a hash of the job's token, `owner` the name of its driver's key.
    """

    namespace: str
    proof: str
    owner: str


class ForgetJob(msgspec.Struct, frozen=True):
    """Change that drops the record of a job that has ended."""

    namespace: str


class Tombstone(msgspec.Struct, frozen=True):
    """Change that adds a tombstone: the head declared this process ended without proof, and refuses its return."""

    kind: str
    id: str
    reason: str


class ForgetTombstone(msgspec.Struct, frozen=True):
    """Change that drops a tombstone, to make room for newer tombstones."""

    kind: str
    id: str


class StopPressed(msgspec.Struct, frozen=True):
    """Change that puts an emergency stop in force.

    `key` is the namespace whose robots stop, or `robots.ALL` for all robots. `text` is for people.
    """

    key: str
    text: str


class StopReleased(msgspec.Struct, frozen=True):
    """Change that releases an emergency stop. `key` is its namespace, or `robots.ALL` for the stop of all robots."""

    key: str


class NodeDrained(msgspec.Struct, frozen=True):
    """Change that drains a node: the head places no new workers on it until a NodeUndrained. `why` is for people."""

    id: str
    why: str


class NodeUndrained(msgspec.Struct, frozen=True):
    """Change that lets a drained node take new workers again."""

    id: str


Change = Union[
    KnownNode, ForgetNode, Tombstone, ForgetTombstone, StopPressed, StopReleased, NodeDrained, NodeUndrained,
    KeyState, ForgetKey, KnownJob, ForgetJob,
]  # fmt: skip


class KeptEvent(msgspec.Struct, frozen=True, gc=False):
    """An entry of the event log, with what the head needs to keep it.

    Attributes:
        event: the entry.
        whose: the share in which it counts (event_log.EventLog.add).
        owner: name of the driver's key that owns the entry's job, "" if none is known.
    """

    event: ClusterEvent
    whose: str = ""
    owner: str = ""


class PastEvents(msgspec.Struct):
    """The event log that earlier heads left.

    Attributes:
        log: id of the log; all heads that go on with it have the same.
        run: how many heads have written to this log, this head included.
        events: the entries by number, the oldest first.
        ends: run -> number of the last entry that was on disk when that run began. Entries with larger numbers, which
            readers may have seen in earlier runs, are lost; the run has given their numbers to other entries.
    """

    log: str
    run: int = 1
    events: list[KeptEvent] = msgspec.field(default_factory=list)
    ends: dict[int, int] = msgspec.field(default_factory=dict)


class Snapshot(msgspec.Struct):
    """The persistent state that the earlier head left.

    Attributes:
        epoch: how many heads have started in this directory, this head included.
        nodes: the nodes that had registered.
        given_up: the tombstones: (kind, id) -> reason, the oldest first.
        stops: the emergency stops in force: namespace or robots.ALL -> text.
        drained: node id -> why the node takes no new workers.
        keys: the public keys and join tokens, ended ones included.
        jobs: the jobs; empty for a head without keys.
        events: the event log; None if this head does not write its event log to disk.
    """

    epoch: int = 0
    nodes: list[KnownNode] = msgspec.field(default_factory=list)
    given_up: dict[tuple[str, str], str] = msgspec.field(default_factory=dict)
    stops: dict[str, str] = msgspec.field(default_factory=dict)
    drained: dict[str, str] = msgspec.field(default_factory=dict)
    keys: list[KeyState] = msgspec.field(default_factory=list)
    jobs: list[KnownJob] = msgspec.field(default_factory=list)
    events: Union[PastEvents, None] = None


# --- events ---


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """Event: a peer, which was authenticated as `member`, sent a request."""

    peer: bytes
    id: int
    body: Body
    member: Member = LOCAL


class NoticeReceived(msgspec.Struct, frozen=True, gc=False):
    """Event: a peer, which was authenticated as `member`, sent a notice."""

    peer: bytes
    body: Body
    member: Member = LOCAL


class ConnectionRejected(msgspec.Struct, frozen=True):
    """Event: a socket rejected `times` connections from `address`.

    `public` is the public key that the peers presented, "" for none. `why` is the reason, for people.
    """

    public: str
    address: str
    why: str = ""
    times: int = 1


class MessageRefused(msgspec.Struct, frozen=True):
    """Event: a socket did not decode a message of `member`, because a value in it is too long. The sender was told.

    `verb` is the name of the message, `text` the reason.
    """

    member: Member
    verb: str
    text: str


class LongMessage(msgspec.Struct, frozen=True):
    """Event: `peer` sent a long message. `decoding` decodes it in steps, and returns None if it is malformed."""

    peer: bytes
    decoding: Generator[None, None, Union[RequestReceived, NoticeReceived, None]]
    member: Member = LOCAL


class TimerDue(msgspec.Struct, frozen=True):
    """Event: the time that `Coordinator.next_deadline` returned has come, so scheduled actions are due."""


class SliceDue(msgspec.Struct, frozen=True):
    """Event: other events had their turn, so the next slice of long work is due (head.slices)."""


class HeadStalled(msgspec.Struct, frozen=True):
    """Event: the head did not run for `seconds`. The tables then do not count the silence of peers in that time."""

    seconds: float


class PeerUnreachable(msgspec.Struct, frozen=True):
    """Event: a message could not be sent, because `peer` is not connected."""

    peer: bytes


class StoreStatus(msgspec.Struct, frozen=True):
    """Event: a file of the head was written, or could not be. `trouble` says why it cannot be, "" if it can."""

    trouble: str
    file: str = "state"


# --- commands ---


class Notify(msgspec.Struct, frozen=True, gc=False):
    peer: bytes
    body: Body


class Answer(msgspec.Struct, frozen=True, gc=False):
    peer: bytes
    id: int
    body: Body


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Command to answer a request with a `Failed` message, whose fields have the same names."""

    peer: bytes
    id: int
    kind: str
    text: str
    missing_ranks: tuple[int, ...] = ()
    path: str = ""


class HoldBack(msgspec.Struct, frozen=True, gc=False):
    """Command to hand out no messages of a connection until its work is done, except beats and emergency stops.

    `held` is False to go on with it.
    """

    peer: bytes
    held: bool


class EndCluster(msgspec.Struct, frozen=True):
    """Command to end the head and its agentd: a member was allowed to end the cluster, and all groups have ended."""

    reason: str


class LogEvent(msgspec.Struct, frozen=True, gc=False):
    """Command to add an entry to the event log and a line to the head's own log file.

    The fields are those of the ClusterEvent that readers of the event log receive. `at` is when it happened, in seconds
    since the epoch, None for now.
    """

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
    at: Union[float, None] = None


class Persist(msgspec.Struct, frozen=True, gc=False):
    """Command to write a change to disk and then send `then`, or `instead` if the change cannot be written now."""

    change: Change
    then: Union[Answer, None] = None
    instead: Union[Answer, None] = None


Event = Union[
    RequestReceived, NoticeReceived, LongMessage, ConnectionRejected, MessageRefused, TimerDue, SliceDue, HeadStalled,
    PeerUnreachable, StoreStatus,
]  # fmt: skip
Message = Union[RequestReceived, NoticeReceived]
Command = Union[Notify, Answer, Refuse, HoldBack, EndCluster, LogEvent, Persist]
Emit = Callable[[Command], None]


class Refused(Exception):
    """Raised inside the coordinator to refuse the present request. The sender gets a `Failed` message as answer.

    `kind`, `text` and `path` become the fields of that message. `advice` is sent after the text, but is not logged.
    `robot` is the key of the robot that is in use, if that is the reason. `logged` says whether the refusal becomes an
    entry of the event log: None if its kind and the request decide that, False if it has one already.
    """

    def __init__(
        self, kind: str, text: str, path: str = "", advice: str = "", robot: str = "", logged: bool | None = None
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.path = path
        self.advice = advice
        self.robot = robot
        self.logged = logged


class Identity(msgspec.Struct, frozen=True):
    """The identity of a head: `epoch` differs at each start of a head; an `embedded` head belongs to one driver."""

    epoch: str
    version: str
    embedded: bool = False


class Timing(msgspec.Struct, frozen=True):
    """The head's timers, in seconds.

    Attributes:
        beat_s: interval of the heartbeats of agentds and clients.
        suspect_beats: number of missed beats after which a node is shown as suspect.
        lease_s: silence after which a node is lost, and a client that no agentd watches has ended.
        robot_lease_s: how long a robot worker goes on without a message from the head, or from its owner.
        robot_settle_s: how long after its start a head starts no robot worker. A worker that the head does not know yet
            may use the robot until its agentd has reported it or its lease has ended.
        head_grace_s: how long agentds and clients wait for a head that is down while its machine answers.
        return_s: how long a restarted head waits for its nodes, and for the owners that they name; if the lease is
            longer, it waits for the lease. Nodes and owners try to reconnect every 3 s; a busy machine delays them.
        rank_hold_s: how long the rank of a lost node is not given to another node: the longer of the lease and the time
            for which cut-off workers may live while a head restarts (`head_grace_s` of agentd).
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
        """Return the corrected *last_seen* time of a peer after the head did not run for the *seconds* until *now*.

        The messages that the peer sent in that time are still unread. So the corrected time makes the peer suspect at
        most, never lost.
        """
        return min(now, max(last_seen + seconds, now - self.suspect_s))
