"""A coordinator with a clock that the test moves, and shortcuts for messages to it."""

from __future__ import annotations

import copy
import itertools
from typing import Any, TypeVar

import msgspec
from head_status import status_of

from rlinf_actors.head.commands import (
    Answer,
    Change,
    Command,
    EndCluster,
    ForgetJob,
    ForgetKey,
    ForgetNode,
    ForgetTombstone,
    HeadStalled,
    Identity,
    KnownJob,
    KnownNode,
    LogEvent,
    NodeDrained,
    NoticeReceived,
    Notify,
    PeerUnreachable,
    Persist,
    Refuse,
    RequestReceived,
    Snapshot,
    StopPressed,
    StopReleased,
    TimerDue,
    Timing,
    Tombstone,
)
from rlinf_actors.head.coordinator import Coordinator
from rlinf_actors.head.key_registry import OwnKeys
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.agent_messages import AgentHello, Beat, ClientHello, ProcessGone, WorkerExited, WorkerReady
from rlinf_actors.wire.client_messages import GetNodes, Launch
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.key_messages import KeyState
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint, ExitReport, NodeReport, RunningWorker, WorkerSpec

T = TypeVar("T")


def node_report(id: str, ip: str = "", **more: Any) -> NodeReport:
    fields = {"hostname": id, "ip": ip or "10.0.0.1", "host": f"host-{id}", "num_cpus": 4, "memory_bytes": 1 << 30}
    return NodeReport(node_id=id, **{**fields, "python": "3.11.0", "interpreter": "/usr/bin/python3", **more})


def agent_hello(id: str, incarnation: str = "", **more: Any) -> AgentHello:
    said = ("is_head", "workers", "watched", "protocol", "version", "user", "secret", "pid", "program")
    hello = {name: more.pop(name) for name in said if name in more}
    return AgentHello(
        **{
            "protocol": PROTOCOL,
            "version": "1.0",
            "secret": f"of {id}",
            **hello,
            "incarnation": incarnation or f"{id}-1",
        },
        node=node_report(id, **more),
    )


def client_hello(incarnation: str, **more: Any) -> ClientHello:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": "1.0",
        "role": "driver",
        "namespace": "ns",
        "host": "elsewhere",
    }
    return ClientHello(incarnation=incarnation, **{**fields, "pid": 100, "pid_start": 5, **more})


def specs(group: str, nodes: list[int], namespace: str = "ns", launch: str = "") -> list[WorkerSpec]:
    return [
        WorkerSpec(f"{launch or group}-{rank}", group, namespace, rank, len(nodes), node, {})
        for rank, node in enumerate(nodes)
    ]


class HeadKit:
    """Peers are named by text: agents "a:<id>", clients by incarnation. `disk` has the head's stored state.

    Peers in `keyed` have a public key; the others are local.
    """

    def __init__(self, embedded: bool = False, own: OwnKeys | None = None, **timing: float) -> None:
        self.now = 1000.0
        self.own = own or OwnKeys()
        self.keyed: dict[str, str] = {}
        self.words: dict[str, float] = {}
        self.disk = Snapshot()
        self.full = False
        self.ids = itertools.count(1)
        self.tokens = (f"token{n}" for n in itertools.count(1))
        self.timing = Timing(**timing)
        self.embedded = embedded
        self.out: list[Command] = []
        self.start()

    def start(self) -> None:
        """Start a new head with the stored state of the one before."""
        self.disk.epoch += 1
        epoch = "epoch" if self.disk.epoch == 1 else f"epoch{self.disk.epoch}"
        identity = Identity(epoch, "1.0", self.embedded)
        before = copy.deepcopy(self.disk)
        tokens = lambda: next(self.tokens)  # noqa: E731
        self.head = Coordinator(identity, self.timing, tokens, self.now, before, self.own, job_key)
        if self.own.public:
            self.out = self._keep(self.head.started(["ipc:///run/head", "tcp://10.0.0.1:6380"], self.wall))

    @property
    def wall(self) -> float:
        """The head's wall clock, for the times of keys."""
        return self.now + 1_000_000 if self.own.public else 0.0

    def member(self, peer: str) -> Member | None:
        """The member that the transport reports for a peer."""
        return self.head.admit(self.keyed[peer], self.wall) if peer in self.keyed else LOCAL

    restart = start

    def _keep(self, commands: list[Command]) -> list[Command]:
        """Carry out Persist like the head's shell, and replace it by the commands that follow."""
        done: list[Command] = []
        for command in commands:
            if not isinstance(command, Persist):
                done.append(command)
                continue
            answer = command.instead if self.full else command.then
            if not self.full:
                keep(self.disk, command.change)
            if answer is not None:
                done.append(answer)
        return done

    # --- in ---

    def ask(self, peer: str, body: Body, id: int = 0) -> Body | Refuse | None:
        """Send a request; return its answer if it came at once. All other commands are in `out`.

        Args:
            id: the number of an earlier request of this peer, which it repeats; 0 for the next number.
        """
        id, member = id or next(self.ids), self.member(peer)
        if member is None:
            self.out = []  # dropped, as by the transport
            return None
        self.out = self._keep(self.head.handle(RequestReceived(peer.encode(), id, body, member), self.now, self.wall))
        for command in self.out:
            if isinstance(command, (Answer, Refuse)) and command.id == id:
                return command.body if isinstance(command, Answer) else command
        return None

    def tell(self, peer: str, body: Body) -> list[Command]:
        member = self.member(peer)
        told = (
            [] if member is None else self.head.handle(NoticeReceived(peer.encode(), body, member), self.now, self.wall)
        )
        self.out = self._keep(told)
        return self.out

    def beat(self, peer: str) -> list[Command]:
        """Send a peer's beat. A client's beat repeats the head's last answer."""
        self.tell(peer, Beat(peer, word=self.words.get(peer, 0.0)))
        for answer in self.sent(Beat, peer):
            self.words[peer] = answer.word
        return self.out

    def beats(self, *peers: str, seconds: int) -> None:
        """Let time pass in which these peers beat every second, and others are silent."""
        for _ in range(seconds):
            for peer in peers:
                self.beat(peer)
            self.wait(1)

    def wait(self, seconds: float) -> list[Command]:
        """Let time pass, ticking at each deadline on the way as the server does."""
        end, everything = self.now + seconds, []
        while self.head.next_deadline() <= end:
            self.now = self.head.next_deadline()
            everything += self._keep(self.head.handle(TimerDue(), self.now, self.wall))
        self.now = end
        self.out = everything
        return everything

    def stall(self, seconds: float) -> None:
        self.now += seconds
        out = [
            *self.head.handle(HeadStalled(seconds), self.now),
            *self.head.handle(TimerDue(), self.now),
        ]  # as the server
        self.out = self._keep(out)

    def unreachable(self, peer: str) -> None:
        self.out = self._keep(self.head.handle(PeerUnreachable(peer.encode()), self.now))

    def killed(self, client: str, *agents: str) -> None:
        """A client's process and connection end, and these agents report it."""
        for agent in agents:
            self.tell(agent, ProcessGone(client))
        assert self.sent(Beat, client)
        self.unreachable(client)

    # --- shortcuts ---

    def node(self, id: str, incarnation: str = "", **more: Any) -> Body | Refuse | None:
        return self.ask(f"a:{id}{incarnation}", agent_hello(id, incarnation, **more))

    def driver(self, incarnation: str = "d1", **more: Any) -> Body | Refuse | None:
        return self.ask(incarnation, client_hello(incarnation, **more))

    def nodes(self, count: int = 0, timeout: float | None = None, peer: str = "d1") -> Body | Refuse | None:
        return self.ask(peer, GetNodes(count, timeout))

    def launch(self, group: str, nodes: list[int], peer: str = "d1", namespace: str = "ns", launch: str = "") -> Any:
        return self.ask(peer, Launch(namespace, group, "m:C", specs(group, nodes, namespace, launch)))

    def ready(self, node: str, id: str) -> list[Command]:
        return self.tell(node, WorkerReady(id, 77, Endpoint("h", "ipc://x"), 0, 4000))

    def exited(self, node: str, id: str, **report: Any) -> list[Command]:
        return self.tell(node, WorkerExited(id, ExitReport(**{"kind": "exited", "exit_code": 0, **report})))

    def cluster(self, count: int = 1) -> None:
        """Nodes n0, n1, ... with ranks, and driver d1."""
        for n in range(count):
            self.node(f"n{n}", ip=f"10.0.0.{n + 1}", is_head=n == 0)
        self.driver()
        self.nodes(count)

    # --- out ---

    def sent(self, kind: type[T], peer: str | None = None) -> list[T]:
        """The notices of this kind in the last commands."""
        return [
            c.body
            for c in self.out
            if isinstance(c, Notify) and isinstance(c.body, kind) and peer in (None, c.peer.decode())
        ]

    def answers(self) -> list[tuple[str, Body]]:
        return [(c.peer.decode(), c.body) for c in self.out if isinstance(c, Answer)]

    def refusals(self) -> list[Refuse]:
        return [c for c in self.out if isinstance(c, Refuse)]

    def records(self) -> list[str]:
        return [c.text for c in self.out if isinstance(c, LogEvent)]

    def ended(self) -> bool:
        return any(isinstance(c, EndCluster) for c in self.out)

    def node_states(self) -> dict[str, str]:
        return {state.report.node_id: state.state for state in status_of(self.head, self.now).nodes}

    def ranks(self) -> dict[str, int]:
        return {state.report.node_id: state.rank for state in status_of(self.head, self.now).nodes}

    def group_states(self) -> dict[str, str]:
        return {group.name: group.state for group in status_of(self.head, self.now).groups}

    def clients(self) -> int:
        return len(status_of(self.head, self.now).clients)


def job_key(token: str) -> str:
    return f"key of {token}"


def running(spec: WorkerSpec, owner: str, **more: Any) -> RunningWorker:
    return RunningWorker(msgspec.structs.replace(spec, token="old"), owner, "m:C", **more)


def keep(disk: Snapshot, change: Change) -> None:
    """Apply a write to `disk`, as the store does to its file."""
    if isinstance(change, (KnownNode, ForgetNode)):
        id = change.report.node_id if isinstance(change, KnownNode) else change.id
        disk.nodes = [node for node in disk.nodes if node.report.node_id != id]
        disk.nodes += [change] if isinstance(change, KnownNode) else []
    elif isinstance(change, Tombstone):
        disk.given_up[change.kind, change.id] = change.reason
    elif isinstance(change, ForgetTombstone):
        disk.given_up.pop((change.kind, change.id), None)
    elif isinstance(change, StopPressed):
        disk.stops[change.key] = change.text
    elif isinstance(change, StopReleased):
        disk.stops.pop(change.key, None)
    elif isinstance(change, NodeDrained):
        disk.drained[change.id] = change.why
    elif isinstance(change, (KeyState, ForgetKey)):
        disk.keys = [key for key in disk.keys if key.public != change.public]
        disk.keys += [change] if isinstance(change, KeyState) else []
    elif isinstance(change, (KnownJob, ForgetJob)):
        disk.jobs = [job for job in disk.jobs if job.namespace != change.namespace]
        disk.jobs += [change] if isinstance(change, KnownJob) else []
    else:
        disk.drained.pop(change.id, None)
