"""What the head keeps of nodes, clients, workers, groups and jobs.

The life cycles of nodes and workers, as tables. What is not in a table is an error that names the state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

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
    """How a node is; the value is what people see."""

    REGISTERING = "registering"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


class WorkerLife(str, enum.Enum):
    """How a worker is; the value is what travels."""

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
"""A lost node does not come back: its agent comes as a new incarnation, which is a new record."""

WORKER: Mapping[WorkerLife, Mapping[str, WorkerLife]] = {
    WorkerLife.RESTARTING: {  # the next incarnation of one that failed, before its process is there
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
        "ready": WorkerLife.RUNNING,  # said again after a reconnect
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


def step(table: Mapping[S, Mapping[str, S]], state: S, event: str) -> S:
    """The state after *event*.

    Raises:
        ProtocolError: the event is not expected in this state.
    """
    try:
        return table[state][event]
    except KeyError:
        raise ProtocolError(f"{event!r} is not expected of a {type(state).__name__} while {state.value}") from None


@dataclass
class Node:
    """One incarnation of an agent. `since` is when its state last changed, `log_name` what its LogLines call it,
    `draining` why it takes no new workers; with `keeps` its workers may outlive it, for its next incarnation. `jobs`
    are the namespaces that have, or had, workers there. Its session speaks `protocol`.
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
        """Stays the same when the agent restarts."""
        return self.report.node_id

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.report.hostname} ({self.report.ip})" if self.report.ip else self.report.hostname

    @property
    def alive(self) -> bool:
        """Whether workers may be running there."""
        return self.life in (NodeLife.READY, NodeLife.SUSPECT, NodeLife.DRAINING)

    @property
    def usable(self) -> bool:
        """Whether it counts when a driver asks for nodes."""
        return self.life in (NodeLife.READY, NodeLife.SUSPECT)

    @property
    def condition(self) -> str:
        """Why it cannot be used, for people."""
        return f"draining: {self.draining}" if self.life is NodeLife.DRAINING else self.life.value

    def step(self, event: str, now: float) -> None:
        """Follow the table."""
        life = step(NODE, self.life, event)
        if life is not self.life:
            self.life, self.since = life, now

    def registered(self) -> RegisteredNode:
        """What its rank depends on."""
        return RegisteredNode(
            self.id,
            self.report.rank,
            self.is_head,
            accelerator_type_of(self.report.resources),
            self.report.ip,
        )

    def state(self, rank: int, now: float) -> NodeState:
        """As others see it; *rank* -1 if it has none."""
        life, seen = self.life.value, now - self.last_seen
        return NodeState(self.report, self.incarnation, rank, life, seen, self.is_head, self.draining)


@dataclass
class Client:
    """A driver or worker process. `watchers` are the nodes whose agents hold its pidfd, by id, with the agents' peers;
    without any it lives by beats. `given_up` counts the workers that it named and that nobody has. Its session speaks
    `protocol`. `answered` is the latest time at which the head said something that the client has heard. A child of a
    worker has that worker's id as `parent`, and ends with it at the latest.
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
    given_up: int = 0
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
        """Unique in the cluster."""
        return self.spec.id

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self.life is WorkerLife.GONE

    def step(self, event: str) -> None:
        """Follow the table."""
        self.life = step(WORKER, self.life, event)

    def state(self) -> WorkerState:
        """As others see it."""
        return WorkerState(
            self.id,
            self.spec.rank,
            self.spec.node_rank,
            self.node_ip,
            self.life.value,
            self.pid,
            self.endpoint,
            self.port,
            self.master_port,
            self.exit,
            self.spec.incarnation,
            None if self.gone else self.pulse,
        )


@dataclass
class Group:
    """A name and its workers.

    `living` are the ids of those that are not gone, `waiting` the StopGroup requests to answer when there are none.
    The owner of a `detached` one did not launch it; without any it ends by name. `unclaimed`: agents say whose it is,
    and the owner did not yet. `orphaned` says whose end ends the group, for those who use it; "" while its owner lives.
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
        """Whether no worker is left."""
        return not self.living

    @property
    def launch(self) -> set[str]:
        """What is this launch's own: the ids of its ranks, whichever incarnation of each is there."""
        return {rank_id(id) for id in self.workers}

    @property
    def whole(self) -> bool:
        """Whether all its workers are known; a head that was restarted learns of them node by node."""
        return len(self.workers) >= self.world_size

    @property
    def ranks(self) -> set[int]:
        """Those that are known."""
        return {worker.spec.rank for worker in self.workers.values()}

    @property
    def world_size(self) -> int:
        """How many ranks it has, known or not."""
        return max((worker.spec.world_size for worker in self.workers.values()), default=0)

    @property
    def summary(self) -> str:
        """One word for all workers."""
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
        """As others see it."""
        workers = sorted(self.workers.values(), key=lambda worker: worker.spec.rank)
        states = [worker.state() for worker in workers]
        return GroupState(
            self.namespace, self.name, self.cls, self.owner, self.summary, states, token, self.detail, not self.owner
        )
