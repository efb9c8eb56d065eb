"""Records of nodes, clients, workers and groups, and the life cycles of nodes and workers as tables.

An event that is not in a table is an error that names the state.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from rlinf_actors.errors import ProtocolError
from rlinf_actors.hardware.probe_report import accelerator_type_of
from rlinf_actors.model.restart import rank_id
from rlinf_actors.placement.node_order import RegisteredNode
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.protocol import OLDEST
from rlinf_actors.wire.values import (
    Endpoint,
    ExitReport,
    GroupState,
    NodeReport,
    NodeState,
    WorkerPulse,
    WorkerSpec,
    WorkerState,
)


class NodeLife(str, enum.Enum):
    """State of a node; people see the value."""

    REGISTERING = "registering"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


class WorkerLife(str, enum.Enum):
    """State of a worker; the value goes over the wire."""

    RESTARTING = "restarting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


NODE: Mapping[NodeLife, Mapping[str, NodeLife]] = {
    NodeLife.REGISTERING: {"hello": NodeLife.READY, "expired": NodeLife.LOST},
    NodeLife.READY: {
        "hello": NodeLife.READY,
        "heard": NodeLife.READY,
        "silent": NodeLife.SUSPECT,
        "drain": NodeLife.DRAINING,
        "expired": NodeLife.LOST,
        "left": NodeLife.LOST,
        "replaced": NodeLife.LOST,
    },
    NodeLife.SUSPECT: {
        "hello": NodeLife.READY,
        "heard": NodeLife.READY,
        "drain": NodeLife.DRAINING,
        "expired": NodeLife.LOST,
        "left": NodeLife.LOST,
        "replaced": NodeLife.LOST,
    },
    NodeLife.DRAINING: {
        "hello": NodeLife.DRAINING,
        "heard": NodeLife.DRAINING,
        "drain": NodeLife.DRAINING,
        "undrain": NodeLife.READY,
        "expired": NodeLife.LOST,
        "left": NodeLife.LOST,
        "replaced": NodeLife.LOST,
    },
    NodeLife.LOST: {},
}
"""A lost node does not come back: its agent registers as a new incarnation, which is a new record."""

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
    """Return the state after *event*.

    Raises:
        ProtocolError: the event is not expected in this state.
    """
    try:
        return table[state][event]
    except KeyError:
        raise ProtocolError(f"{event!r} is not expected of a {type(state).__name__} while {state.value}") from None


class Index(Generic[V]):
    """Values under keys that several of them share, in the order in which they were added."""

    def __init__(self) -> None:
        self._values: dict[Hashable, dict[Hashable, V]] = {}

    def add(self, key: Hashable, id: Hashable, value: V) -> None:
        self._values.setdefault(key, {})[id] = value

    def discard(self, key: Hashable, id: Hashable) -> None:
        values = self._values.get(key)
        if values is not None and values.pop(id, None) is not None and not values:
            del self._values[key]

    def of(self, key: Hashable) -> list[V]:
        return list(self._values.get(key, {}).values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values


@dataclass
class Node:
    """One incarnation of an agent.

    Attributes:
        since: when its state last changed.
        keeps: its workers may outlive it, for its next incarnation.
        log_name: the node's name in its LogLines.
        draining: why it takes no new workers, "" if it does.
        jobs: namespaces that have, or had, workers there.
        protocol: what its session speaks.
    """

    report: NodeReport
    incarnation: str
    peer: bytes
    is_head: bool
    last_seen: float
    since: float
    keeps: bool = False
    life: NodeLife = NodeLife.REGISTERING
    log_name: str = ""
    draining: str = ""
    member: Member = LOCAL
    jobs: set[str] = field(default_factory=set)
    protocol: int = OLDEST

    @property
    def id(self) -> str:
        """The node's id, which stays the same when its agent restarts."""
        return self.report.node_id

    @property
    def name(self) -> str:
        """Host name and address, for people."""
        return f"{self.report.hostname} ({self.report.ip})" if self.report.ip else self.report.hostname

    @property
    def alive(self) -> bool:
        """True if workers may be running there."""
        return self.life in (NodeLife.READY, NodeLife.SUSPECT, NodeLife.DRAINING)

    @property
    def usable(self) -> bool:
        """True if it counts when a driver asks for nodes."""
        return self.life in (NodeLife.READY, NodeLife.SUSPECT)

    @property
    def condition(self) -> str:
        """Why it cannot be used, for people."""
        return f"draining: {self.draining}" if self.life is NodeLife.DRAINING else self.life.value

    def step(self, event: str, now: float) -> None:
        life = step(NODE, self.life, event)
        if life is not self.life:
            self.life, self.since = life, now

    @cached_property
    def registered(self) -> RegisteredNode:
        """What its rank depends on."""
        kind = accelerator_type_of(self.report.resources)
        return RegisteredNode(self.id, self.report.rank, self.is_head, kind, self.report.ip)

    def state(self, rank: int, now: float) -> NodeState:
        """Return its state for the wire; *rank* is -1 if it has none."""
        life, seen = self.life.value, now - self.last_seen
        return NodeState(self.report, self.incarnation, rank, life, seen, self.is_head, self.draining)


@dataclass
class Client:
    """A driver or worker process.

    Attributes:
        watchers: the nodes whose agents hold its pidfd, by id, with the agents' peers. A driver without any lives by
            its beats.
        protocol: what its session speaks.
        answered: the latest time at which the head sent something that the client has received.
        parent: of a child of a worker, that worker's id; the child ends with the worker at the latest.
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
    watchers: dict[str, bytes] = field(default_factory=dict)
    member: Member = LOCAL
    protocol: int = OLDEST
    answered: float = 0.0
    parent: str = ""

    def __str__(self) -> str:
        return f"{self.role} {self.incarnation[:8]}, process {self.pid}, namespace {self.namespace!r}"


@dataclass
class WorkerRecord:
    """One worker process of a group. `exit` is how it ended, or, before, how the incarnation before it did."""

    spec: WorkerSpec
    node_id: str
    node_ip: str
    life: WorkerLife = WorkerLife.STARTING
    pid: int = 0
    endpoint: Endpoint | None = None
    port: int = 0
    master_port: int = 0
    exit: ExitReport | None = None
    pulse: WorkerPulse | None = None

    @property
    def id(self) -> str:
        """Its id, unique in the cluster."""
        return self.spec.id

    @property
    def gone(self) -> bool:
        """True if its process has ended."""
        return self.life is WorkerLife.GONE

    def step(self, event: str) -> None:
        self.life = step(WORKER, self.life, event)

    def state(self) -> WorkerState:
        """Return its state for the wire."""
        return WorkerState(
            self.id, self.spec.rank, self.spec.node_rank, self.node_ip, self.life.value, self.pid, self.endpoint,
            self.port, self.master_port, self.exit, self.spec.incarnation, None if self.gone else self.pulse,
        )  # fmt: skip


@dataclass
class Group:
    """A name and its workers.

    Attributes:
        living: ids of the workers that are not gone.
        subscribers: incarnations of the clients that hold a handle, beside the owner.
        waiting: StopGroup requests to answer when no worker is left.
        changed: workers whose state is to be sent to the owner and the subscribers.
        detached: its owner did not launch it; without an owner it ends by name.
        unclaimed: agents say who owns it, and the owner has not confirmed that yet.
        orphaned: whose end ends the group, for those who use it; "" while its owner lives.
    """

    namespace: str
    name: str
    cls: str
    owner: str
    detail: str = ""
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    living: set[str] = field(default_factory=set)
    subscribers: dict[str, None] = field(default_factory=dict)
    waiting: list[tuple[bytes, int]] = field(default_factory=list)
    changed: dict[str, WorkerRecord] = field(default_factory=dict)
    stopping: bool = False
    detached: bool = False
    unclaimed: bool = False
    orphaned: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def gone(self) -> bool:
        """True if no worker is left."""
        return not self.living

    @property
    def launch(self) -> set[str]:
        """Ids of the ranks, without their incarnations: no other launch has these."""
        return {rank_id(id) for id in self.workers}

    @property
    def whole(self) -> bool:
        """True if all its workers are known; a restarted head learns of them node by node."""
        return len(self.workers) >= self.world_size

    @property
    def ranks(self) -> set[int]:
        """The ranks that are known."""
        return {worker.spec.rank for worker in self.workers.values()}

    @property
    def world_size(self) -> int:
        """How many ranks it has, known or not."""
        return max((worker.spec.world_size for worker in self.workers.values()), default=0)

    @property
    def summary(self) -> str:
        """One word for the state of all workers."""
        lives = {worker.life for worker in self.workers.values()}
        if lives == {WorkerLife.GONE}:
            return "gone"
        if self.stopping:
            return "stopping"
        if WorkerLife.GONE in lives:
            return "degraded"
        if WorkerLife.RESTARTING in lives:
            return "restarting"
        return "running" if lives == {WorkerLife.RUNNING} else "starting"

    def state(self, token: str) -> GroupState:
        """Return its state for the wire."""
        workers = sorted(self.workers.values(), key=lambda worker: worker.spec.rank)
        states = [worker.state() for worker in workers]
        return GroupState(
            self.namespace, self.name, self.cls, self.owner, self.summary, states, token, self.detail, not self.owner
        )
