"""Control messages: everything that agents, drivers, workers and the head say to one another.

House rules: a message is a frozen struct in this file; user data never rides in one. Decoding
validates types, so that a message that got past the door is well formed. `Notice` needs no
answer; a `Request` gets exactly one `Reply` or `Failed`.
"""

from __future__ import annotations

from typing import Union

import msgspec

from rlinf_actors.wire.values import (
    ClusterEvent,
    Endpoint,
    ExitReport,
    GroupHandle,
    GroupState,
    HardwareAnswer,
    HardwareQuestion,
    LeaseState,
    NodeReport,
    NodeState,
    RobotStop,
    RunningWorker,
    WorkerHealth,
    WorkerSpec,
    WorkerState,
)

PROTOCOL = 4
"""Raised whenever two versions of this file, of values.py or of frames.py, would not understand one another."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages; the tag is the class's name."""


# --- session ----------------------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """First message of an agent; answered by Welcome or Failed. `workers` is all it has: a head that
    was restarted learns its groups from there.

    `keeps`: workers without robots go on for a lease when this agent ends, and the next incarnation lists them. `ended`
    are ids of workers of an earlier one that it could not take over and ended, and why. `watched` are the clients whose
    processes it watches, for this head or the one before: they are there, however long they are silent.
    """

    protocol: int
    version: str
    incarnation: str
    node: NodeReport
    is_head: bool = False
    workers: list[RunningWorker] = []
    keeps: bool = False
    ended: dict[str, str] = {}
    watched: list[str] = []


class ClientHello(Message, frozen=True):
    """First message of a driver or worker. `pid` and `pid_start` (clock ticks since boot, field
    22 of /proc/PID/stat) let the agent on the same host watch the process. `token` is the job's: a worker was given it
    when it was started, a driver that comes back has it from its first Welcome.
    """

    protocol: int
    version: str
    incarnation: str
    role: str
    namespace: str
    host: str
    pid: int
    pid_start: int
    worker_id: str = ""
    token: str = ""


class Welcome(Message, frozen=True):
    """The head's answer to a hello. `token` is the job's membership token (clients only). Agents with robot workers
    and owners of such beat four times in `robot_lease_s`. `head_grace_s` is how long the head may be silent while its
    machine answers.
    """

    epoch: str
    version: str
    beat_s: float
    lease_s: float
    token: str = ""
    robot_lease_s: float = 2.0
    head_grace_s: float = 120.0


class Goodbye(Message, frozen=True):
    """Sent by whoever ends a session on purpose. `lost`: the head has given up on the process that it is sent to."""

    reason: str = ""
    lost: bool = False


HELLO_AGAIN = "hello?"
"""The `incarnation` of the head's Beat to a peer that it does not know: it is to say hello (again)."""


class Beat(Message, frozen=True):
    """Sent every beat by agents and clients; the head answers with a Beat of its own (`incarnation`: its epoch).

    `at` is the sender's monotonic clock, in seconds; the answer repeats it. What a robot worker may still do is
    counted from then, when the head was certainly not yet silent, and not from when the answer came.
    """

    incarnation: str = ""
    at: float = 0.0


# --- requests of clients -----------------------------------------------------------------------


class GetNodes(Message, frozen=True):
    """Wait until `num_nodes` nodes are there (0: answer at once), then fix and return their ranks.
    Answered by Nodes, or by Failed(kind=timeout) naming the missing after `timeout_s`.
    """

    num_nodes: int = 0
    timeout_s: Union[float, None] = None


class Nodes(Message, frozen=True):
    nodes: list[NodeState]
    warnings: list[str] = []


class EnumerateHardware(Message, frozen=True):
    """Have a node look for the hardware that a node group has there. Answered by Enumerated, or by Failed when the node
    is lost (node_lost) or gives no answer in time (timeout).
    """

    node_id: str
    question: HardwareQuestion


class Enumerated(Message, frozen=True):
    answer: HardwareAnswer


class Launch(Message, frozen=True):
    """Reserve the name and start the workers. Answered at once by Launched; each worker's fate
    follows as WorkerChanged. The sender owns the group and is subscribed to it. `detached`: the job's first
    driver owns it, if there is one, and the sender is subscribed. `wait_s`: seconds that it may wait for robots
    that others hold; a StopGroup of its name withdraws it.
    """

    namespace: str
    group: str
    cls: str
    workers: list[WorkerSpec]
    detail: str = ""
    detached: bool = False
    wait_s: float = 0.0


class Launched(Message, frozen=True):
    group: GroupState


class FindGroup(Message, frozen=True):
    """Describe a group and subscribe to it. Answered by Launched or Failed(kind=not_found). `ended`: one that has
    ended is described too, if the head remembers it.
    """

    namespace: str
    group: str
    ended: bool = False


class Handles(Message, frozen=True):
    """Notice of a client to a head that has taken it back: the groups that it has handles of, with all their workers as
    far as it knows them. Its subscriptions are renewed, and it hears of every worker that has ended meanwhile.

    `launching` are ids of workers of launches whose answer it waits for. A group that agents say is the client's, and
    that is in neither, was shut down or given up while no head listened: it is stopped.
    """

    groups: list[GroupHandle]
    launching: list[str] = []


class StopGroup(Message, frozen=True):
    """SIGTERM, after `grace_s` SIGKILL, for all workers of a group. Answered by Done when all are gone. `workers` are
    ids of its workers: a namesake, which has none of them, is left alone; [] stops whichever group has the name.
    """

    namespace: str
    group: str
    grace_s: float
    workers: list[str] = []


class GetStatus(Message, frozen=True):
    """Answered by Status. `namespace` None: every namespace."""

    namespace: Union[str, None] = None


class Status(Message, frozen=True):
    """What a head knows. `at` is its clock, in seconds since the epoch."""

    epoch: str
    version: str
    uptime_s: float
    nodes: list[NodeState]
    groups: list[GroupState]
    clients: list[str]
    leases: list[LeaseState] = []
    stopped: list[str] = []
    trouble: list[str] = []
    at: float = 0.0


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
    wait_s: float = 0.0


class Events(Message, frozen=True):
    """`next` is the `since` of the next question; `missing` entries between the asked one and the oldest are not kept
    any more; `more` says that there are further ones now. `at` is the head's clock, in seconds since the epoch.
    """

    log: str
    at: float
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
    is in force, but a head that is restarted would not know.
    """

    hits: list[RobotStop] = []
    stopped: list[str] = []
    warning: str = ""


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


class StopCluster(Message, frozen=True):
    """End the cluster (embedded clusters only). Answered by Done."""


class Done(Message, frozen=True):
    """The request was carried out and has no other result."""


# --- head to agent, agent to head --------------------------------------------------------------


class StartWorkers(Message, frozen=True):
    """Notice to an agent. Its answer, per worker, is WorkerReady or WorkerExited; ids it knows are
    ignored. `owner` is the incarnation of the client that owns the group, `cls` and `detail` are its Launch's.
    `detached`: another client launched it, and the owner may have no handle of it.
    """

    workers: list[WorkerSpec]
    owner: str = ""
    cls: str = ""
    detail: str = ""
    detached: bool = False


class StopWorkers(Message, frozen=True):
    """Notice to an agent: SIGTERM, and SIGKILL after `grace_s`. Unknown ids are ignored. Robot workers lose their
    lease instead. `reason`: why, where it is not the owner's wish.
    """

    ids: list[str]
    grace_s: float
    reason: str = ""


class LookForHardware(Message, frozen=True):
    """Notice to an agent, which answers with HardwareFound of the same id."""

    id: str
    question: HardwareQuestion


class HardwareFound(Message, frozen=True):
    """Notice of an agent; an id that nobody waits for any more is ignored."""

    id: str
    answer: HardwareAnswer


class StopLooking(Message, frozen=True):
    """Notice to an agent: nobody waits for that answer any more. Unknown ids are ignored."""

    id: str


class Watch(Message, frozen=True):
    """Notice to an agent: say ProcessGone when this process of your host ends."""

    incarnation: str
    pid: int
    pid_start: int


class Unwatch(Message, frozen=True):
    """Notice to an agent: that client is gone, although its process may go on. Unknown ones are ignored."""

    incarnation: str


class ProcessGone(Message, frozen=True):
    incarnation: str


class WorkerReady(Message, frozen=True):
    """A worker's runtime listens; its class is not constructed yet."""

    id: str
    pid: int
    endpoint: Endpoint
    port: int = 0
    master_port: int = 0


class WorkerExited(Message, frozen=True):
    id: str
    exit: ExitReport


class WorkersHealth(Message, frozen=True):
    """Notice of an agent: these workers answer or do not answer, or are in one call for long, other than before."""

    workers: list[WorkerHealth]


class LogLines(Message, frozen=True):
    """Lines that workers wrote, on their way agent -> head -> owner. `entries` are
    (group:rank, stream, text); `skipped` says that lines were left out here (never in the files).
    """

    owner: str
    node: str
    entries: list[tuple[str, str, str]]
    skipped: int = 0


class LogCredit(Message, frozen=True):
    """The owner's answer to LogLines: that many characters were shown; send more."""

    owner: str
    node: str
    chars: int


# --- head to clients ---------------------------------------------------------------------------


class WorkerChanged(Message, frozen=True):
    """Notice to all who hold a handle: the new state of workers of one group."""

    namespace: str
    group: str
    workers: list[WorkerState]


class WatchClients(Message, frozen=True):
    """Notice of a client to the head: say ClientGone when one of these clients of my namespace ends. Those that
    the head does not know have one lease to say hello. Sent again, whole, to a head that was restarted.
    """

    incarnations: list[str]


class ClientGone(Message, frozen=True):
    """Notice to who watches: that client has ended, and will not be let in again."""

    incarnation: str


class Warn(Message, frozen=True):
    """Notice for a person; shown once."""

    text: str


Body = Union[
    AgentHello, ClientHello, Welcome, Goodbye, Beat,
    GetNodes, Nodes, Launch, Launched, FindGroup, Handles, StopGroup, GetStatus, Status, EStop, EStopped, StopCluster,
    Done, DrainNode, Drained, GetEvents, Events, EnumerateHardware, Enumerated, LookForHardware, HardwareFound,
    StopLooking,
    StartWorkers, StopWorkers, Watch, Unwatch, ProcessGone, WorkerReady, WorkerExited, WorkersHealth, LogLines,
    LogCredit, WorkerChanged, WatchClients, ClientGone, Warn,
]  # fmt: skip
"""Every control message."""


# --- envelopes ---------------------------------------------------------------------------------


class Request(Message, frozen=True, tag="req"):
    id: int
    body: Body


class Reply(Message, frozen=True, tag="rep"):
    id: int
    body: Body


class Failed(Message, frozen=True, tag="err"):
    """A request that was refused. `kind` names the error class at the asker (net.rpc.refusal):
    hello (say hello first, then ask again), config, placement, timeout,
    name_in_use, hardware_in_use, not_found, unreachable, authentication, protocol, usage, node_lost.
    """

    id: int
    kind: str
    text: str
    missing_ranks: list[int] = []
    path: str = ""


class Notice(Message, frozen=True, tag="not"):
    body: Body


Envelope = Union[Request, Reply, Failed, Notice]
