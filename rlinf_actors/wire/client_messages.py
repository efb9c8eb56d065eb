"""Control messages between clients and the head: nodes, launches, groups, command-line queries. No secrets."""

from __future__ import annotations

from typing import Union

from rlinf_actors.wire import event_values, values
from rlinf_actors.wire.bounds import (
    Document,
    Few,
    Name,
    OfCluster,
    OfGroup,
    OfLaunch,
    OfNode,
    Some,
    Text,
    Watched,
)
from rlinf_actors.wire.hook_values import HookState
from rlinf_actors.wire.key_messages import AddKey, Enroll, Enrolled, GetKeys, Keys, RevokeKey, RotateKey
from rlinf_actors.wire.launch_messages import FindWorker, FoundWorker, LaunchPart
from rlinf_actors.wire.program import DriverState
from rlinf_actors.wire.protocol import ControlMessage, Number
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup


class GetNodes(ControlMessage, frozen=True):
    """Wait until `num_nodes` nodes have registered (0: do not wait), then fix and return the ranks of the nodes.

    Answered by Nodes. After `timeout_s` seconds (None: no limit) answered by Failed(kind=timeout) with the missing
    ranks.
    """

    num_nodes: int = 0
    timeout_s: Union[Number, None] = None


class Nodes(ControlMessage, frozen=True):
    """Reply to GetNodes: the nodes by rank, and warnings for the user."""

    nodes: OfCluster[values.NodeState]
    warnings: Some[Text] = []


class EnumerateHardware(ControlMessage, frozen=True):
    """Ask the head to have the node `node_id` enumerate the hardware of a node group, as `question` says.

    Answered by Enumerated, or by Failed: kind node_lost if the node is lost, kind timeout if the node does not answer
    in time.
    """

    node_id: Name
    question: values.HardwareQuestion


class Enumerated(ControlMessage, frozen=True):
    answer: values.HardwareAnswer


class Launch(ControlMessage, frozen=True):
    """Reserve the group's name and start its workers. The sender is subscribed to the group.

    Answered by Launched: at once, or when the robots are free. WorkerChanged then reports the state of each worker.

    Attributes:
        cls: "module:qualname" of the worker class.
        detail: description of the group in JSON (placements and the like), for clients that attach to it later.
        detached: True to make the job's first driver the owner of the group. The sender owns the group if this is False
            or the job has no driver.
        wait_s: seconds that the launch may wait for robots that other groups hold. A StopGroup of the name withdraws a
            waiting launch.
        outlives: True if the sender will send Detach once the group is constructed. The head refuses the launch if the
            group could not be detached.
        get_if_exists: True to return a running group of this name instead, and to subscribe the sender to it.
            Failed(kind=name_in_use) if that group's class has another qualname.
        parts: number of LaunchParts that the sender has sent before, with all workers but the one in `workers`; 0 if
            `workers` has all.
    """

    namespace: Name
    group: Name
    cls: Name
    workers: OfLaunch[values.WorkerSpec]
    detail: Document = ""
    detached: bool = False
    wait_s: Number = 0.0
    outlives: bool = False
    get_if_exists: bool = False
    parts: int = 0


class Launched(ControlMessage, frozen=True):
    """Reply to Launch and FindGroup: the state of the group that was launched or found.

    If the group has many workers, `workers` has the first of them, and WorkerChanged notices with the others follow.
    """

    group: values.GroupState


class FindGroup(ControlMessage, frozen=True):
    """Return a group and subscribe the sender to it. Answered by Launched or Failed(kind=not_found).

    Attributes:
        ended: True to return also a group that has ended, if the head remembers it.
        launch: common beginning of the worker ids of the wanted launch (model.restart.launch_of).
            Another group of the same name then counts as not found. "" accepts any group of the name.
        wait_s: seconds to wait for the launch of a group that does not exist yet.
    """

    namespace: Name
    group: Name
    ended: bool = False
    launch: Name = ""
    wait_s: Number = 0.0


class Detach(ControlMessage, frozen=True):
    """Let a constructed group outlive the sender, which owns it and stays subscribed.

    If the sender is a worker and its job has a driver, the job's first driver becomes the owner. Otherwise no client
    owns the group any longer, and the group ends only by a request that names it. `workers` are the ids of the group's
    workers. Answered by Done, also when sent twice.
    """

    namespace: Name
    group: Name
    workers: OfGroup[Name]


class Handles(ControlMessage, frozen=True):
    """Notice of a client to a head that has restored the client's session: the groups of which the client has handles.

    The head renews the client's subscriptions, and reports every worker that has ended since. If agentds report a group
    that this client owns and that neither list names, the head stops the group, because the client has shut it down.
    Detached groups are not stopped.

    Attributes:
        groups: the groups with all their workers, as far as the client knows them.
        launching: ids of the workers of launches whose reply the client waits for.
    """

    groups: OfCluster[values.GroupHandle]
    launching: OfGroup[Name] = []


class StopGroup(ControlMessage, frozen=True):
    """End the workers of a group: SIGTERM, and SIGKILL after `grace_s` seconds. Answered by Done when all have ended.

    `workers` are ids of the group's workers, of which the first names the launch; another group of the same name is not
    stopped. With an empty list any group of the name is stopped.
    """

    namespace: Name
    group: Name
    grace_s: Number
    workers: OfGroup[Name] = []


class WorkerChanged(ControlMessage, frozen=True):
    """Notice to the owner of a group and every subscribed client: the new states of the workers that have changed.

    `world_size` is the group's number of ranks. `detail` is the group's new description after a change of that number,
    else "".
    """

    namespace: Name
    group: Name
    workers: OfGroup[values.WorkerState]
    world_size: int = 0
    detail: Document = ""


class WatchClients(ControlMessage, frozen=True):
    """Notice of a client to the head: send ClientGone when one of these clients of the sender's namespace ends.

    The head adds these clients to those of earlier notices. A client that the head does not know counts as ended if it
    sends no hello in time (head.commands.Timing.patience_s). The sender repeats the whole list to a restarted head.
    """

    incarnations: Watched[Name]


class ClientGone(ControlMessage, frozen=True):
    """Notice to the clients that watch a client: it has ended, and the head will not accept it again."""

    incarnation: Name


class Warn(ControlMessage, frozen=True):
    """Notice to a client or an agentd: a warning that the receiver logs once."""

    text: Text


class StopCluster(ControlMessage, frozen=True):
    """End every group, then the head. Answered by Done when the groups have ended.

    A driver may end its own private cluster. Any other cluster can be ended only by the administrator, without a
    session.

    Attributes:
        stay: True to end the groups only. The head and its agentd continue until the next StopCluster.
        by: the sender's name, for people.
        reason: the sender's reason, for people.
    """

    stay: bool = False
    by: Name = ""
    reason: Text = ""


class Done(ControlMessage, frozen=True):
    """Reply to a request that has no other result."""


class GetStatus(ControlMessage, frozen=True):
    """Return the state of the cluster. Answered by Status. `namespace` is the job to report, None for all jobs."""

    namespace: Union[Name, None] = None


class Status(ControlMessage, frozen=True):
    """Reply to GetStatus: the state of the cluster, as far as the sender of GetStatus may see it.

    Attributes:
        epoch: id of this run of the head.
        version: the head's version of rlinf-actors.
        uptime_s: seconds since the head's start.
        nodes: all nodes, lost ones included.
        groups: the groups, without their jobs' tokens.
        clients: the connected drivers and workers, one line of text for people each: role, incarnation, process,
            namespace.
        leases: robots that groups hold.
        stopped: emergency stops in force, one line each.
        trouble: problems of the head that need a person, one line each.
        at: the head's clock, in seconds since the epoch.
        protocol: the protocol that the head speaks.
        key_ends_at: time at which the key of the sender of GetStatus ends, in seconds since the epoch by the head's
            clock; None for never.
        drivers: the connected drivers.
        hooks: the head's hooks, for its administrator and local processes.
    """

    epoch: Name
    version: Name
    uptime_s: Number
    nodes: OfCluster[values.NodeState]
    groups: OfCluster[values.GroupState]
    clients: OfCluster[Text]
    leases: OfCluster[values.LeaseState] = []
    stopped: OfCluster[Text] = []
    trouble: Some[Text] = []
    at: Number = 0.0
    protocol: int = 0
    key_ends_at: Union[Number, None] = None
    drivers: OfCluster[DriverState] = []
    hooks: Few[HookState] = []


class GetEvents(ControlMessage, frozen=True):
    """Return entries of the event log. Answered by Events as soon as there is an entry, else after `wait_s` seconds.

    Attributes:
        since: return entries after this number; 0 for all that the head keeps, -1 for future entries only.
        log: the `log` of the Events that `since` comes from. If that is another head's log, the numbers differ, and the
            head answers from its first entry on.
        namespace: return entries of this job and of the whole cluster; None for all jobs. Clients ask for their own
            job.
        limit: largest number of entries.
        wait_s: seconds to wait for an entry.
    """

    since: int = 0
    log: Name = ""
    namespace: Union[Name, None] = None
    limit: int = 1000
    wait_s: Number = 0.0


class Events(ControlMessage, frozen=True):
    """Reply to GetEvents: entries of the event log.

    Attributes:
        log: id of this head's event log.
        at: the head's clock, in seconds since the epoch.
        next: the value of `since` for the next GetEvents.
        missing: number of entries between `since` and `next` that the head no longer keeps.
        more: True if further entries are ready.
    """

    log: Name
    at: Number
    events: OfNode[event_values.ClusterEvent]
    next: int
    missing: int = 0
    more: bool = False


class EStop(ControlMessage, frozen=True):
    """Stop all robots at once, or those of one namespace; with `release`, lift that stop. Answered by EStopped.

    Every peer may stop robots; only a driver, the head's own key or a local process may lift a stop. While a stop is in
    force, the head refuses to launch groups that use robots in that namespace.

    Attributes:
        by: the sender's name, for people.
        reason: the sender's reason, for people.
        namespace: the job whose robots stop, None for the whole cluster.
        release: True to lift the stop of that job or of the whole cluster.
        wait: True to stop nothing, but to answer when the end of each of these robot workers is confirmed, or when
            `EStopped.wait_s` is over.
    """

    by: Name
    reason: Text = ""
    namespace: Union[Name, None] = None
    release: bool = False
    wait: bool = False


class EStopped(ControlMessage, frozen=True):
    """Reply to EStop.

    Attributes:
        hits: the robot workers whose end no node has confirmed.
        stopped: the stops that are now in force, one line each.
        warning: text if the change is in effect but could not be saved, so that a restarted head would not know it.
        lifted: the text of the stop that `release` lifted, "" if it lifted none.
        wait_s: seconds after which all leases are over, and the ends that are confirmed at all have been.
    """

    hits: OfGroup[values.RobotStop] = []
    stopped: OfCluster[Text] = []
    warning: Text = ""
    lifted: Text = ""
    wait_s: Number = 0.0


class EndGroup(ControlMessage, frozen=True):
    """End a group, whichever client owns it: SIGTERM, and SIGKILL after `grace_s` seconds.

    Answered by Done when all workers have ended, or by Failed(kind=not_found). The holder of a driver's key may end
    groups of its own jobs only. `by` is the sender's name, for people.
    """

    namespace: Name
    group: Name
    grace_s: Number
    by: Name
    reason: Text = ""


class KillWorker(ControlMessage, frozen=True):
    """Kill one worker: SIGTERM and at once SIGKILL; a robot worker makes its robots safe before.

    Answered by WorkerKilled when its agentd has reported its end, or by Failed(kind=not_found). It is not started
    again. The holder of a driver's key may kill workers of its own jobs only. `by` is the sender's name, for people.
    """

    namespace: Name
    group: Name
    worker_id: Name
    by: Name
    reason: Text = ""


class WorkerKilled(ControlMessage, frozen=True):
    """Reply to KillWorker. `exit` says how the worker ended; kind node_lost if nobody can say."""

    exit: Union[values.ExitReport, None] = None


class DrainNode(ControlMessage, frozen=True):
    """Start no new workers on a node; running workers continue until their owners end them. Answered by Drained.

    A local process and the head's own key may drain every node, an agentd's key its own node. `undo` lifts the drain.
    `by` is the sender's name, for people.
    """

    node_id: Name
    by: Name
    reason: Text = ""
    undo: bool = False


class Drained(ControlMessage, frozen=True):
    """Reply to DrainNode. `node` is the node's new state; None if the request lifted the drain of an unknown node.

    `warning` is text if the change is in effect but could not be saved, so that a restarted head would not know it.
    """

    node: Union[values.NodeState, None] = None
    warning: Text = ""


ClientMessage = Union[
    GetNodes, Nodes, EnumerateHardware, Enumerated, Launch, Launched, FindGroup, Handles, Detach,
    StopGroup, WorkerChanged, WatchClients, ClientGone, Warn, StopCluster, Done, GetStatus, Status, GetEvents, Events,
    EStop, EStopped, EndGroup, KillWorker, WorkerKilled, DrainNode, Drained, Enroll, RotateKey, Enrolled, AddKey,
    RevokeKey, GetKeys, Keys, AddRanks, ResizeGroup, LaunchPart, FindWorker, FoundWorker,
]  # fmt: skip
"""Every control message between clients and the head."""
