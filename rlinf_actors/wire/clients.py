"""Control messages between drivers or workers and the head: nodes, launches, groups, and who else is there."""

from __future__ import annotations

from typing import Union

from rlinf_actors.wire.bounds import Number
from rlinf_actors.wire.protocol import Message
from rlinf_actors.wire.values import (
    GroupHandle,
    GroupState,
    HardwareAnswer,
    HardwareQuestion,
    NodeState,
    WorkerSpec,
    WorkerState,
)


class GetNodes(Message, frozen=True):
    """Wait until `num_nodes` nodes are there (0: answer at once), then fix and return their ranks.
    Answered by Nodes, or by Failed(kind=timeout) naming the missing after `timeout_s`.
    """

    num_nodes: int = 0
    timeout_s: Union[Number, None] = None


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


class Launched(Message, frozen=True):
    group: GroupState


class FindGroup(Message, frozen=True):
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


class Detach(Message, frozen=True):
    """The owner of a group, which has constructed it, gives it up: a worker to its job's first driver, if there is one;
    else no client owns it from now on, and it ends by name alone. The sender stays subscribed. `workers` are their ids.
    Answered by Done, again if it is asked again. Since protocol 7.
    """

    namespace: str
    group: str
    workers: list[str]


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
    grace_s: Number
    workers: list[str] = []


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


class StopCluster(Message, frozen=True):
    """End the cluster: every group first, then the head. Answered by Done when the groups have ended. `stay`: end the
    groups only; the head and its agentd go on until they are asked again.

    A driver may end its own private cluster; of any other cluster the administrator may, without a session. `by` and
    `reason` are for people.
    """

    stay: bool = False
    by: str = ""
    reason: str = ""


class Done(Message, frozen=True):
    """The request was carried out and has no other result."""
