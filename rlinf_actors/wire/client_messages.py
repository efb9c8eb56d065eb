"""Control messages of clients and the head: nodes, launches, groups; the command line's queries; keys. No secrets."""

from __future__ import annotations

from typing import Literal, Union

from rlinf_actors.wire.protocol import ControlMessage, Number
from rlinf_actors.wire.values import (
    ClusterEvent,
    GroupHandle,
    GroupState,
    HardwareAnswer,
    HardwareQuestion,
    LeaseState,
    NodeState,
    RobotStop,
    Value,
    WorkerSpec,
    WorkerState,
)


class GetNodes(ControlMessage, frozen=True):
    """Wait until `num_nodes` nodes are there (0: answer at once), then fix and return their ranks.
    Answered by Nodes, or by Failed(kind=timeout) naming the missing after `timeout_s`.
    """

    num_nodes: int = 0
    timeout_s: Union[Number, None] = None


class Nodes(ControlMessage, frozen=True):
    nodes: list[NodeState]
    warnings: list[str] = []


class EnumerateHardware(ControlMessage, frozen=True):
    """Have a node look for the hardware that a node group has there. Answered by Enumerated, or by Failed when the node
    is lost (node_lost) or gives no answer in time (timeout).
    """

    node_id: str
    question: HardwareQuestion


class Enumerated(ControlMessage, frozen=True):
    answer: HardwareAnswer


class Launch(ControlMessage, frozen=True):
    """Reserve the name and start the workers. Answered at once by Launched; each worker's fate
    follows as WorkerChanged. The sender owns the group and is subscribed to it. `detached`: the job's first
    driver owns it, if there is one, and the sender is subscribed. `wait_s`: seconds that it may wait for robots
    that others hold; a StopGroup of its name withdraws it.

    Since protocol 7: `outlives`: the sender will give the group up (Detach) once it is constructed; refused where that
    cannot be. `get_if_exists`: where a group of that name and class is there, it is described instead, and the sender
    is subscribed to it. An older head knows neither, and is not asked.
    """

    namespace: str
    group: str
    cls: str
    workers: list[WorkerSpec]
    detail: str = ""
    detached: bool = False
    wait_s: Number = 0.0
    outlives: bool = False
    get_if_exists: bool = False


class Launched(ControlMessage, frozen=True):
    group: GroupState


class FindGroup(ControlMessage, frozen=True):
    """Describe a group and subscribe to it. Answered by Launched or Failed(kind=not_found). `ended`: one that has
    ended is described too, if the head remembers it. `launch`: only the group of this launch, and no namesake (what ids
    of workers begin with; "" for any). `wait_s`: a group that is not there is answered once it was launched, within so
    many seconds: the sender knows that its launch is on the way. Both since protocol 7; an older head looks at neither.
    """

    namespace: str
    group: str
    ended: bool = False
    launch: str = ""
    wait_s: Number = 0.0


class Detach(ControlMessage, frozen=True):
    """The owner of a group, which has constructed it, gives it up: a worker to its job's first driver, if there is one;
    else no client owns it from now on, and it ends by name alone. The sender stays subscribed. `workers` are their ids.
    Answered by Done, again if it is asked again. Since protocol 7.
    """

    namespace: str
    group: str
    workers: list[str]


class Handles(ControlMessage, frozen=True):
    """Notice of a client to a head that has taken it back: the groups that it has handles of, with all their workers as
    far as it knows them. Its subscriptions are renewed, and it hears of every worker that has ended meanwhile.

    `launching` are ids of workers of launches whose answer it waits for. A group that agents say is the client's, and
    that is in neither, was shut down or given up while no head listened: it is stopped.
    """

    groups: list[GroupHandle]
    launching: list[str] = []


class StopGroup(ControlMessage, frozen=True):
    """SIGTERM, after `grace_s` SIGKILL, for all workers of a group. Answered by Done when all are gone. `workers` are
    ids of its workers: a namesake, which has none of them, is left alone; [] stops whichever group has the name.
    """

    namespace: str
    group: str
    grace_s: Number
    workers: list[str] = []


class WorkerChanged(ControlMessage, frozen=True):
    """Notice to all who hold a handle: the new state of workers of one group."""

    namespace: str
    group: str
    workers: list[WorkerState]


class WatchClients(ControlMessage, frozen=True):
    """Notice of a client to the head: say ClientGone when one of these clients of my namespace ends. Those that
    the head does not know have one lease to say hello. Sent again, whole, to a head that was restarted.
    """

    incarnations: list[str]


class ClientGone(ControlMessage, frozen=True):
    """Notice to who watches: that client has ended, and will not be let in again."""

    incarnation: str


class Warn(ControlMessage, frozen=True):
    """Notice for a person; shown once."""

    text: str


class StopCluster(ControlMessage, frozen=True):
    """End the cluster: every group first, then the head. Answered by Done when the groups have ended. `stay`: end the
    groups only; the head and its agentd go on until they are asked again.

    A driver may end its own private cluster; of any other cluster the administrator may, without a session. `by` and
    `reason` are for people.
    """

    stay: bool = False
    by: str = ""
    reason: str = ""


class Done(ControlMessage, frozen=True):
    """The request was carried out and has no other result."""


class GetStatus(ControlMessage, frozen=True):
    """Answered by Status. `namespace` None: every namespace."""

    namespace: Union[str, None] = None


class Status(ControlMessage, frozen=True):
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


class GetEvents(ControlMessage, frozen=True):
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


class Events(ControlMessage, frozen=True):
    """`next` is the `since` of the next question; `missing` entries up to there are not kept
    any more; `more` says that there are further ones now. `at` is the head's clock, in seconds since the epoch.
    """

    log: str
    at: Number
    events: list[ClusterEvent]
    next: int
    missing: int = 0
    more: bool = False


class EStop(ControlMessage, frozen=True):
    """Emergency stop of all robots, or of those of one namespace; `release` lifts it. Anybody whom the head's sockets
    let in may ask. Until it is lifted no group that uses robots is launched there. Answered by EStopped. `by` is who
    asks, for people.
    """

    by: str
    reason: str = ""
    namespace: Union[str, None] = None
    release: bool = False


class EStopped(ControlMessage, frozen=True):
    """Which workers were told to make their robots safe. `stopped` is what is in force now, a line each. `warning`: it
    is in force, but a head that is restarted would not know. `lifted` is the stop that a release has ended, "" where
    none was in force; None of a head before protocol 6, which does not say.
    """

    hits: list[RobotStop] = []
    stopped: list[str] = []
    warning: str = ""
    lifted: Union[str, None] = None


class EndGroup(ControlMessage, frozen=True):
    """End a group, whoever owns it: SIGTERM, after `grace_s` SIGKILL. Answered by Done when all workers are gone, or by
    Failed(kind=not_found). A driver's key may end groups of its own jobs. `by` is who asks, for people. Since
    protocol 7.
    """

    namespace: str
    group: str
    grace_s: Number
    by: str
    reason: str = ""


class DrainNode(ControlMessage, frozen=True):
    """Start no new workers on a node; what runs there goes on until its owners end it. `undo` lifts it. Anybody whom
    the head's sockets let in may ask; `by` is who asks, for people. Answered by Drained.
    """

    node_id: str
    by: str
    reason: str = ""
    undo: bool = False


class Drained(ControlMessage, frozen=True):
    """The node as it is now; None where it is away and its drain was lifted. `warning`: what went wrong beside that."""

    node: Union[NodeState, None] = None
    warning: str = ""


KeyRole = Literal["agent", "driver"]
"""What keys are listed for."""


class KeyState(Value, frozen=True):
    """One key that the head knows; times are in seconds since the epoch, by the head's clock.

    Attributes:
        public: 40 characters of Z85.
        role: what its holder is; for a join token, what its holder will be.
        name: of that node or driver.
        added_at: when it was listed.
        added_by: by whom.
        token: whether it is a join token's: all that it is good for is listing another.
        expires_at: when it ends by itself, None for never.
        ended_at: when it ended, None for one that is good.
        why: it ended.
    """

    public: str
    role: KeyRole
    name: str
    added_at: Number
    added_by: str
    token: bool = False
    expires_at: Union[Number, None] = None
    ended_at: Union[Number, None] = None
    why: str = ""


class Enroll(ControlMessage, frozen=True):
    """The one thing that the holder of a join token may say: list this key of mine. Answered by Enrolled, and the
    token is used up.
    """

    public: str


class RotateKey(ControlMessage, frozen=True):
    """An agent or driver has another key from now on. The one that it says this with stays good for `keep_s` seconds,
    for what runs with it. Answered by Enrolled.
    """

    public: str
    keep_s: Number = 0.0


class Enrolled(ControlMessage, frozen=True):
    """The key is listed. `warning`: it is, but a head that is restarted would not know."""

    role: KeyRole
    name: str
    warning: str = ""


class AddKey(ControlMessage, frozen=True):
    """List a key, or, with `token_s`, a join token for one that is made later, good for so many seconds. A name has
    one key: the token before it is void. `by` is who asks, for people. Answered by Keys, with that key.
    """

    public: str
    role: KeyRole
    name: str
    by: str
    token_s: Union[Number, None] = None


class RevokeKey(ControlMessage, frozen=True):
    """End all keys and tokens of a name, and the sessions that have come with them. `role` None: whatever it is.
    Answered by Keys, with those that ended.
    """

    name: str
    by: str
    role: Union[KeyRole, None] = None


class GetKeys(ControlMessage, frozen=True):
    """Answered by Keys."""


class Keys(ControlMessage, frozen=True):
    """`head` is the head's public key ("" for one without keys), `listens` its TCP endpoints, `at` its clock.
    `warning`: it is so, but a head that is restarted would not know.
    """

    keys: list[KeyState]
    head: str
    listens: list[str]
    at: Number
    warning: str = ""
