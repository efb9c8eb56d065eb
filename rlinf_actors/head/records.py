"""Records of nodes, clients, workers and groups, and the state tables of nodes and workers.

An event that the table does not allow in the present state raises a ProtocolError that names the state.
"""

from __future__ import annotations

import enum
import math
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from rlinf_actors.errors import ProtocolError
from rlinf_actors.hardware.probe_report import accelerator_type_of
from rlinf_actors.model.restart import launch_of, rank_id
from rlinf_actors.placement.node_order import RegisteredNode
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.shown import printable
from rlinf_actors.wire import values
from rlinf_actors.wire.program import Program


class NodeLife(str, enum.Enum):
    """State of a node. `rlinf-actors status` shows the value."""

    REGISTERING = "registering"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


class WorkerLife(str, enum.Enum):
    """State of a worker. Messages to clients contain the value."""

    RESTARTING = "restarting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


_ENDS = dict.fromkeys(("expired", "left", "replaced"), NodeLife.LOST)
NODE: Mapping[NodeLife, Mapping[str, NodeLife]] = {
    NodeLife.REGISTERING: {"hello": NodeLife.READY, "expired": NodeLife.LOST},
    NodeLife.READY: {
        "hello": NodeLife.READY,
        "heard": NodeLife.READY,
        "silent": NodeLife.SUSPECT,
        "drain": NodeLife.DRAINING,
        **_ENDS,
    },
    NodeLife.SUSPECT: {
        "hello": NodeLife.READY,
        "heard": NodeLife.READY,
        "drain": NodeLife.DRAINING,
        **_ENDS,
    },
    NodeLife.DRAINING: {
        "hello": NodeLife.DRAINING,
        "heard": NodeLife.DRAINING,
        "drain": NodeLife.DRAINING,
        "undrain": NodeLife.READY,
        **_ENDS,
    },
    NodeLife.LOST: {},
}
"""State -> event -> next state of a node. A lost node stays lost; its agentd registers a new incarnation of it."""

WORKER: Mapping[WorkerLife, Mapping[str, WorkerLife]] = {
    WorkerLife.RESTARTING: {  # the next incarnation of a failed worker, before its process exists
        "restart": WorkerLife.STARTING,
        "stop": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.STARTING: {
        "ready": WorkerLife.RUNNING,
        "stop": WorkerLife.STOPPING,
        "exited": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.RUNNING: {
        "ready": WorkerLife.RUNNING,  # reported again after a reconnect
        "stop": WorkerLife.STOPPING,
        "exited": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.STOPPING: {
        "ready": WorkerLife.STOPPING,  # the stop and the report crossed
        "stop": WorkerLife.STOPPING,
        "exited": WorkerLife.GONE,
        "node_lost": WorkerLife.GONE,
    },
    WorkerLife.GONE: {},
}

S = TypeVar("S", NodeLife, WorkerLife)
V = TypeVar("V")


def step(table: Mapping[S, Mapping[str, S]], state: S, event: str) -> S:
    """Return the state that follows *state* after *event*.

    Raises:
        ProtocolError: the table does not allow the event in this state.
    """
    try:
        return table[state][event]
    except KeyError:
        raise ProtocolError(f"{event!r} is not expected of a {type(state).__name__} while {state.value}") from None


class Index(Generic[V]):
    """A mapping from each key to several values, which the head's tables use to find, for example, a node's workers.

    Each value has an id, by which it is removed. The values of a key stay in the order of their addition.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, dict[Hashable, V]] = {}

    def add(self, key: Hashable, id: Hashable, value: V) -> None:
        self._values.setdefault(key, {})[id] = value

    def discard(self, key: Hashable, id: Hashable) -> None:
        found = self._values.get(key)
        if found is not None and found.pop(id, None) is not None and not found:
            del self._values[key]

    def of(self, key: Hashable) -> list[V]:
        return list(self._values.get(key, {}).values())

    def first(self, key: Hashable) -> V | None:
        """Return the oldest value of a key, None if the key has none. Costs the same for any number of values."""
        return next(iter(self._values.get(key, {}).values()), None)

    def pop(self, key: Hashable) -> list[V]:
        """Remove a key, and return the values that it had."""
        return list(self._values.pop(key, {}).values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values


@dataclass
class Node:
    """One incarnation of a node, which ends with its agentd. Times are monotonic seconds.

    Attributes:
        peer: the connection of the agentd.
        last_seen: when the agentd's last message arrived.
        since: when `life` last changed.
        keeps: True if the agentd's workers may outlive it and be taken over by its next incarnation.
        log_name: the node's name in the agentd's LogLines messages.
        uncredited: driver's incarnation -> cost of the lines that the driver got and has sent no LogCredit for.
        draining: why the node takes no new workers, "" if it takes them.
        jobs: the namespaces that have, or had, workers on the node.
        proof: a hash of the secret of the agentd's run directory, "" if it has none.
        warned: when the agentd was last told of a rival.
        pid, program: the agentd's process, for people; 0 until it is back after a restart of the head.
    """

    report: values.NodeReport
    incarnation: str
    peer: bytes
    is_head: bool
    last_seen: float
    since: float
    keeps: bool = False
    life: NodeLife = NodeLife.REGISTERING
    log_name: str = ""
    uncredited: Counter[str] = field(default_factory=Counter)
    draining: str = ""
    member: Member = LOCAL
    jobs: set[str] = field(default_factory=set)
    proof: str = ""
    warned: float = -math.inf
    pid: int = 0
    program: Program = field(default_factory=Program)

    @property
    def id(self) -> str:
        return self.report.node_id

    @property
    def name(self) -> str:
        """The node's host name and address, for people."""
        return f"{self.report.hostname} ({self.report.ip})" if self.report.ip else self.report.hostname

    @property
    def alive(self) -> bool:
        """True if the node is registered and not lost: its workers may be running."""
        return self.life in (NodeLife.READY, NodeLife.SUSPECT, NodeLife.DRAINING)

    @property
    def usable(self) -> bool:
        """True if the node can take new workers: it is registered, not lost, and not drained."""
        return self.life in (NodeLife.READY, NodeLife.SUSPECT)

    @property
    def condition(self) -> str:
        """The node's state for people, with the reason if it is drained."""
        return f"draining: {self.draining}" if self.life is NodeLife.DRAINING else self.life.value

    def step(self, event: str, now: float) -> None:
        life = step(NODE, self.life, event)
        if life is not self.life:
            self.life, self.since = life, now

    @cached_property
    def registered(self) -> RegisteredNode:
        """The node's id, configured rank and other facts from which the cluster's ranks are computed."""
        kind = accelerator_type_of(self.report.resources)
        return RegisteredNode(self.id, self.report.rank, self.is_head, kind, self.report.ip)

    def state(self, rank: int, now: float) -> values.NodeState:
        """Return the node's state as clients receive it; *rank* is -1 if the node has none."""
        life, seen = self.life.value, now - self.last_seen
        return values.NodeState(self.report, self.incarnation, rank, life, seen, self.is_head, self.draining)


class Client(msgspec.Struct, gc=False):
    """A driver, worker or child member, as the head knows it.

    Attributes:
        worker_id: the worker's id; "" for a driver.
        watched_on: node id -> agentd's connection, for the nodes whose agentds watch the process.
        connected: False from when the client's connection was found closed until its next hello.
        dead_at: when an agentd reported the end of the process. Without a message since then, it may be true.
        answered: when the head sent the newest message that the client has confirmed; monotonic seconds.
        parent: if the client is a child member of a worker, that worker's id, else "". The child ends with the worker
            at the latest.
        program: who runs what, if a driver says it.
    """

    incarnation: str
    role: str
    namespace: str
    host: str
    pid: int
    pid_start: int
    worker_id: str
    peer: bytes
    last_seen: float
    watched_on: dict[str, bytes] = msgspec.field(default_factory=dict)
    connected: bool = True
    dead_at: float = -math.inf
    member: Member = LOCAL
    answered: float = 0.0
    parent: str = ""
    program: Program = msgspec.field(default_factory=Program)

    @property
    def watchers(self) -> dict[str, bytes]:
        """The `watched_on` that vouch for the client while it is silent: none if its connection is closed."""
        return self.watched_on if self.connected else {}

    def __str__(self) -> str:
        who = f" ({self.program} on {printable(self.program.hostname)})" if self.program.user else ""
        return f"{self.role} {self.incarnation[:8]}{who}, process {self.pid}, job {self.namespace!r}"


class WorkerRecord(msgspec.Struct, gc=False):
    """One worker process of a group.

    `exit` says how the worker ended; before its end, how the rank's previous incarnation ended.
    """

    spec: values.WorkerSpec
    node_id: str
    node_ip: str
    life: WorkerLife = WorkerLife.STARTING
    pid: int = 0
    endpoint: values.Endpoint | None = None
    port: int = 0
    master_port: int = 0
    exit: values.ExitReport | None = None
    pulse: values.WorkerPulse | None = None

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def gone(self) -> bool:
        """True if the worker has ended or was declared lost."""
        return self.life is WorkerLife.GONE

    def step(self, event: str) -> None:
        self.life = step(WORKER, self.life, event)

    def state(self) -> values.WorkerState:
        return values.WorkerState(
            self.id, self.spec.rank, self.spec.node_rank, self.node_ip, self.life.value, self.pid, self.endpoint,
            self.port, self.master_port, self.exit, self.spec.incarnation, None if self.gone else self.pulse,
            self.spec.code,
        )  # fmt: skip


_life = operator.attrgetter("life")
DESCRIBING = 3
"""Number of nodes that keep the description of a group for a restarted head. Its owner keeps it too."""


class Group(msgspec.Struct):
    """A named group of workers.

    Only `put` and `remove` change `workers`, because both keep indexes of them.

    Attributes:
        owner: incarnation of the client with which the group ends; "" for a detached group without an owner.
        workers: the workers by id, ended ones included.
        living: ids of the workers that are not gone.
        robots: those of `workers` that claim robots.
        subscribers: incarnations of the clients, except the owner, that hold a handle of the group.
        waiting: (peer, request id) of the requests to answer when no living worker is left.
        changed: the workers whose state must be sent to the owner and the subscribers, by id.
        watches: for each answer about the group that is being made in slices, the ranks that have changed since.
        detached: True if the group outlives the client that launched it.
        unclaimed: True if a restarted head knows the owner only from agentds, and the owner has not confirmed it.
        orphaned: text that says which owner's end ended the group; "" while the owner lives.
        size: the number of ranks that `noted` or `resized` has set last.
        resizes: number of times that the group was resized; -1 before a member is known.
        redescribed: True if the clients that hold handles must get the new `detail`.
        launching: True until all workers of the launch have been added (head.launches does that in slices).
        nested: True if a worker has launched the group; a restarted head sees it by the owner alone.
        ending: True while the group is being dropped, in slices, after its last worker has gone.
    """

    namespace: str
    name: str
    cls: str
    owner: str
    detail: str = ""
    workers: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    living: set[str] = msgspec.field(default_factory=set)
    robots: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    subscribers: dict[str, None] = msgspec.field(default_factory=dict)
    waiting: list[tuple[bytes, int]] = msgspec.field(default_factory=list)
    changed: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    watches: list[set[int]] = msgspec.field(default_factory=list)
    stopping: bool = False
    detached: bool = False
    unclaimed: bool = False
    orphaned: str = ""
    size: int = 0
    resizes: int = -1
    redescribed: bool = False
    launching: bool = False
    ending: bool = False
    nested: bool = False
    _of_launch: Counter[str] = msgspec.field(default_factory=Counter)  # number of workers
    _describing: set[str] = msgspec.field(default_factory=set)  # nodes
    _at: dict[int, str] = msgspec.field(default_factory=dict)  # the worker that was added last, by rank

    def described_on(self, node_id: str) -> bool:
        """Return True if the agentd of this node keeps the group's `detail` for a restarted head, as a few nodes do.

        It has a line for each rank: sent to every node, a launch would cost the square of its size.
        """
        if len(self._describing) < DESCRIBING:
            self._describing.add(node_id)
        return node_id in self._describing

    def member(self, rank: int) -> WorkerRecord | None:
        """Return the worker of a rank of the group; None if there is no such rank, or the head does not know it."""
        return self.at(rank) if 0 <= rank < self.size else None

    def at(self, rank: int) -> WorkerRecord | None:
        """Return the worker of a rank, also if it is being added or leaves."""
        return self.workers.get(self._at.get(rank, ""))

    def put(self, worker: WorkerRecord) -> None:
        """Add a worker, or replace the record of a worker that the group has already."""
        if worker.id not in self.workers:
            self._of_launch[launch_of(worker.id)] += 1
        self.workers[worker.id] = worker
        self._at[worker.spec.rank] = worker.id
        self.noted(worker.spec)
        self.living.add(worker.id)
        if worker.spec.claims:
            self.robots[worker.id] = worker

    def remove(self, worker: WorkerRecord) -> None:
        del self.workers[worker.id]
        self.robots.pop(worker.id, None)
        if self._at.get(worker.spec.rank) == worker.id:  # else it has a successor
            del self._at[worker.spec.rank]
        launch = launch_of(worker.id)
        self._of_launch[launch] -= 1
        if not self._of_launch[launch]:
            del self._of_launch[launch]

    def has_had(self, spec: values.WorkerSpec) -> bool:
        """Return True if the group has or had this worker, or another incarnation of it."""
        worker = self.at(spec.rank)
        return worker is not None and rank_id(worker.id) == rank_id(spec.id)

    def noted(self, spec: values.WorkerSpec) -> None:
        """Learn the number of ranks from the spec of a worker of the group; that of the newest size counts."""
        if spec.resizes >= self.resizes:
            self.size = max(self.size, spec.world_size) if spec.resizes == self.resizes else spec.world_size
            self.resizes = spec.resizes

    def resized(self, world_size: int) -> None:
        """Set the number of ranks."""
        self.size, self.resizes, self.redescribed = world_size, max(self.resizes, 0) + 1, True

    def resized_spec(self, spec: values.WorkerSpec) -> values.WorkerSpec:
        """Return the spec of a worker with the group's present number of ranks, also for the next incarnations."""
        env = {**spec.env, "WORLD_SIZE": str(self.size)} if "WORLD_SIZE" in spec.env else spec.env
        return replace(spec, world_size=self.size, resizes=self.resizes, env=env)

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def gone(self) -> bool:
        return not self.living

    @property
    def launches(self) -> KeysView[str]:
        """The launches that the workers' ids name. No two groups have one in common."""
        return self._of_launch.keys()

    @property
    def whole(self) -> bool:
        """True if the head knows a worker for each rank. A restarted head may not, until all nodes have reported."""
        ranks = self._at
        return len(ranks) >= self.size and all(map(ranks.__contains__, range(self.size)))

    @property
    def ranks(self) -> KeysView[int]:
        """The ranks for which the head knows a worker."""
        return self._at.keys()

    @property
    def world_size(self) -> int:
        """The number of ranks in the group, also of ranks for which the head knows no worker."""
        return self.size

    @property
    def summary(self) -> str:
        """The state of the whole group in one word, such as running or degraded, derived from its workers' states."""
        all_are_members = max(self.ranks, default=0) < self.size
        lives = set(map(_life, self.workers.values() if all_are_members else self.members))
        if lives == {WorkerLife.GONE}:
            return "gone"
        if self.stopping:
            return "stopping"
        if WorkerLife.GONE in lives:
            return "degraded"
        if WorkerLife.RESTARTING in lives:
            return "restarting"
        return "running" if lives == {WorkerLife.RUNNING} else "starting"

    @property
    def members(self) -> list[WorkerRecord]:
        """The workers by rank, without those that are being added or that leave."""
        return list(filter(None, map(self.at, range(self.size))))

    @property
    def beyond(self) -> Iterator[WorkerRecord]:
        """The workers that are being added or that leave."""
        return (self.workers[id] for rank, id in self._at.items() if rank >= self.size)

    def state(self, token: str, states: list[values.WorkerState] | None = None) -> values.GroupState:
        """Return the group's state as clients receive it, with *token* as the job's token.

        *states* are the states of the workers that it has; None for those of all members.
        """
        if states is None:
            states = [worker.state() for worker in self.members]
        return values.GroupState(
            self.namespace,
            self.name,
            self.cls,
            self.owner,
            self.summary,
            states,
            token,
            self.detail,
            not self.owner,
            self.size,
        )
