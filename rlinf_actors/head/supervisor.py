"""The head's decisions: an event and the time in, commands out. No sockets, no clock, no loop.

House rules: a Request gets exactly one answer, now or later; what is not expected of a peer is
counted and dropped, and a peer that is not known is asked to say hello.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlinf_actors.errors import ProtocolError
from rlinf_actors.head.checks import own_namespace
from rlinf_actors.head.clients import ClientTable, given_up
from rlinf_actors.head.commands import (
    Answer,
    Asked,
    Command,
    EndCluster,
    Event,
    Notify,
    NotWritten,
    Record,
    Refuse,
    Refused,
    Stalled,
    Timing,
    Told,
    Unreachable,
)
from rlinf_actors.head.drains import DrainTable
from rlinf_actors.head.groups import GroupTable
from rlinf_actors.head.happenings import of_driver, of_node
from rlinf_actors.head.health import HealthNotes
from rlinf_actors.head.journal import Journal
from rlinf_actors.head.launches import Launches
from rlinf_actors.head.looks import HardwareLooks
from rlinf_actors.head.nodes import NodeTable
from rlinf_actors.head.reconcile import Reconciler
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.remembered import Remembered
from rlinf_actors.head.robots import RobotTable
from rlinf_actors.head.settling import Settling
from rlinf_actors.head.transitions import NodeLife
from rlinf_actors.wire.agents import (
    HardwareFound,
    LogCredit,
    LogLines,
    ProcessGone,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.clients import (
    Done,
    EnumerateHardware,
    FindGroup,
    GetNodes,
    Handles,
    Launch,
    StopCluster,
    StopGroup,
    WatchClients,
)
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.operators import DrainNode, EStop, GetEvents, GetStatus, Status
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.session import HELLO_AGAIN, AgentHello, Beat, ClientHello, Goodbye, Welcome


@dataclass(frozen=True)
class Identity:
    """What a head says of itself. `epoch` differs each time one is started."""

    epoch: str
    version: str
    embedded: bool = False


class Supervisor:
    """The whole state of a head.

    Args:
        identity: of this head.
        timing: its timers.
        new_token: makes a secret; the only thing here that is random.
        now: when it started.
        before: what an earlier head at this place knew.
    """

    def __init__(
        self,
        identity: Identity,
        timing: Timing,
        new_token: Callable[[], str],
        now: float,
        before: Remembered | None = None,
    ) -> None:
        before = before or Remembered()
        self.identity = identity
        self.timing = timing
        self.unexpected = 0
        self._started = now
        self._now = now
        self._out: list[Command] = []
        self._ending: list[tuple[bytes, int]] = []
        self._deadline: float | None = None
        self._trouble: list[str] = []
        self._wall = 0.0
        self._journal = Journal(identity.epoch, self._emit)
        self._nodes = NodeTable(timing, self._emit, self._node_lost, before, now)
        self._looks = HardwareLooks(identity.epoch, self._emit, self._nodes)
        self._clients = ClientTable(timing, self._emit, new_token, self._client_gone, before)
        self._groups = GroupTable(
            timing,
            self._emit,
            self._nodes,
            self._clients,
            self._worker_gone,
            lambda: self._settling.over,
            before,
            now,
        )
        self._settling = Settling(
            now + timing.patience_s,
            lambda: bool(self._nodes.missing()),
            self._groups.whole,
            lambda worker_id: self._groups.namespace_of(worker_id) is not None,
            self._groups.unclaimed,
        )
        self._reconciler = Reconciler(timing, self._emit, self._clients, self._groups)
        self._launches = Launches(
            timing, self._emit, self._nodes, self._clients, self._groups, lambda asked: self._robots.check(asked)
        )
        self._robots = RobotTable(timing, self._emit, self._nodes, self._clients, self._groups, before)
        self._health = HealthNotes(self._emit, self._groups)
        self._drains = DrainTable(self._emit, self._nodes, self._clients, self._groups)

    def started(self, wall: float) -> None:
        """The head listens: the first event, and no line in its own log. *wall* as in `handle`."""
        self._journal.add(Record("head_started", f"the head has started: rlinf-actors {self.identity.version}"), wall)

    def handle(self, event: Event, now: float, wall: float = 0.0) -> list[Command]:
        """What to do about *event*, in order.

        Args:
            event: what happened.
            now: the observer's monotonic time, in seconds.
            wall: seconds since the epoch, for the event log alone.
        """
        self._now, self._wall = now, wall
        self._out = []
        if not self._is_routine(event):
            self._deadline = None
        if isinstance(event, (Asked, Told)):
            if not self._settling.holds(event):
                self._said(event)
        elif isinstance(event, NotWritten):
            self._trouble = [event.trouble] if event.trouble else []
        elif isinstance(event, Unreachable):
            self._nodes.unreachable(event.peer, now)
        elif isinstance(event, Stalled):
            self._nodes.stalled(event.seconds, now)
            self._clients.stalled(event.seconds, now)
            self._robots.stalled(event.seconds)
            self._settling.stalled(event.seconds)
        else:
            self._nodes.tick(now)
            self._clients.tick(now)
            self._robots.tick(now)
            self._looks.tick(now)
        self._settle()
        self._groups.restart_due(now)
        self._journal.tick(now, wall)
        self._groups.flush()
        self._launches.tick(now)
        if self._ending and not len(self._groups):
            for peer, id in self._ending:
                self._emit(Answer(peer, id, Done()))
            self._ending = []
            self._emit(EndCluster("a driver ended it"))
        self._drains.flush()
        self._journal.flush(wall)
        return self._out

    def _said(self, event: Asked | Told) -> None:
        """A peer said something, now or when it was too early to answer."""
        if isinstance(event, Told):
            self._told(event.peer, event.body)
            return
        try:
            answer = self._answer(event)
        except Refused as error:
            self._emit(Refuse(event.peer, event.id, error.kind, error.text, (), error.path))
            if isinstance(event.body, (AgentHello, ClientHello)):
                who = event.peer.decode(errors="replace")
                self._emit(Record("refused", f"refused {who} ({error.kind}): {error.text}"))
        else:
            if answer is not None:
                self._emit(Answer(event.peer, event.id, answer))

    def _settle(self) -> None:
        """Go on with what was too early."""
        if self._settling.look(self._now):
            self._nodes.give_up_missing(self._now - self._started, self._now)
            self._groups.settle()
            self._groups.flush()  # what ended meanwhile: its name is free for a launch that was held
        while ready := self._settling.take():  # what one says may be what another waits for
            for event in ready:
                self._said(event)

    def next_deadline(self) -> float:
        """When a Tick is due, infinity for never; may be too early, for a beat does not cost a look at everybody."""
        if self._deadline is None:
            tables = (
                self._nodes,
                self._clients,
                self._groups,
                self._launches,
                self._looks,
                self._settling,
                self._journal,
            )
            deadlines = [table.next_deadline() for table in tables]
            self._deadline = min(*deadlines, self._robots.next_deadline(self._now))
        return self._deadline

    def _is_routine(self, event: Event) -> bool:
        """Whether an event can only put deadlines off: a beat of somebody who is well."""
        if not isinstance(event, Told) or not isinstance(event.body, (Beat, LogLines, LogCredit)):
            return False
        node = self._nodes.of_peer(event.peer)
        return node is None or node.life is NodeLife.READY

    def status(self, namespace: str | None, now: float) -> Status:
        """Everything, for people."""
        return Status(
            self.identity.epoch,
            self.identity.version,
            now - self._started,
            self._nodes.states(now),
            self._groups.states(namespace),
            [str(client) for client in self._clients.alive() if namespace in (None, client.namespace)],
            self._groups.leases(now),
            self._robots.stopped(),
            self._trouble,
            self._wall,
        )

    def farewell(self, reason: str) -> list[Command]:
        """The head ends on purpose, and the cluster with it: tell the clients."""
        return [Notify(client.peer, Goodbye(reason)) for client in self._clients.alive()]

    # --- requests ---

    def _answer(self, event: Asked) -> Body | None:
        """The answer, or None when it comes later."""
        body = event.body
        if isinstance(body, AgentHello):
            return self._agent_hello(event.peer, body)
        if isinstance(body, ClientHello):
            return self._client_hello(event.peer, body)
        if isinstance(body, GetStatus):
            return self.status(body.namespace, self._now)
        if isinstance(body, DrainNode):
            self._drains.ask(event.peer, event.id, body, self._now)
            return None
        if isinstance(body, EStop):
            self._robots.estop(event.peer, event.id, body)
            return None
        if isinstance(body, EnumerateHardware):  # of an observer too: `rlinf-actors plan` has no session
            self._looks.ask(event.peer, event.id, body, self._now)
            return None
        client = self._clients.of_peer(event.peer)
        if isinstance(body, GetEvents):  # of an observer too: `rlinf-actors events`
            if client is not None:
                own_namespace(client, body.namespace or "")
            return self._journal.ask(event.peer, event.id, body, self._now, self._wall)
        if client is None:
            self._emit(Notify(event.peer, Beat(HELLO_AGAIN)))
            raise Refused("hello", "the head does not know this process: it was restarted, or no hello was sent")
        self._clients.heard(event.peer, self._now)
        return self._client_asked(client, event)

    def _client_asked(self, client: Client, event: Asked) -> Body | None:
        body = event.body
        if isinstance(body, GetNodes):
            self._nodes.wait(event.peer, event.id, body, self._now)
            return None
        if isinstance(body, Launch):
            if self._ending:
                raise Refused("usage", "the cluster is being stopped")
            return self._launches.launch(client, event.peer, event.id, body, self._now)
        if isinstance(body, FindGroup):
            return self._launches.find(client, body)
        if isinstance(body, StopGroup):
            self._launches.stop(client, event.peer, event.id, body)
            return None
        if isinstance(body, StopCluster):
            if not self.identity.embedded:
                raise Refused("usage", "this cluster is not the driver's own: stop its agentds instead")
            self._ending.append((event.peer, event.id))
            self._launches.stop_all()
            return None
        raise Refused("protocol", f"the head does not answer a {type(body).__name__}")

    def _agent_hello(self, peer: bytes, hello: AgentHello) -> Welcome:
        self._check_protocol("agentd", hello.protocol, hello.version)
        known = self._nodes.get(hello.node.node_id)
        node = self._nodes.hello(peer, hello, self._now)
        same = known is not None and known.incarnation == node.incarnation
        if not same:
            self._emit(of_node("node_joined", node, f"is here, incarnation {node.incarnation}"))
        else:
            self._clients.unwatch(node.id, self._now)  # a head's watch may have been lost with its connection
        self._clients.seen(node.id, hello.watched)
        self._reconciler.reconcile(node, hello.workers, same, self._now)
        self._robots.node_back(node)
        self._drains.node_back(node)
        self._clients.watch(self._nodes.alive())
        return self._welcome("")

    def _client_hello(self, peer: bytes, hello: ClientHello) -> Welcome:
        self._check_protocol(f"this {hello.role}", hello.protocol, hello.version)
        known = self._clients.get(hello.incarnation) is not None
        client = self._clients.hello(peer, hello, self._now, self._groups.namespace_of(hello.worker_id))
        if client.role == "driver" and not known:
            self._emit(of_driver("driver_joined", client, "is here"))
        self._groups.tell_all(client)
        self._clients.watch(self._nodes.alive())
        return self._welcome(self._clients.token(client.namespace))

    def _check_protocol(self, who: str, protocol: int, version: str) -> None:
        if protocol != PROTOCOL:
            raise Refused(
                "protocol",
                f"{who} is rlinf-actors {version} (protocol {protocol}), the head is {self.identity.version} "
                f"(protocol {PROTOCOL}): install the same version on both",
            )

    def _welcome(self, token: str) -> Welcome:
        timing = self.timing
        return Welcome(
            epoch=self.identity.epoch,
            version=self.identity.version,
            beat_s=timing.beat_s,
            lease_s=timing.lease_s,
            token=token,
            robot_lease_s=timing.robot_lease_s,
            head_grace_s=timing.head_grace_s,
        )

    # --- notices ---

    def _told(self, peer: bytes, body: Body) -> None:
        node, client = self._nodes.of_peer(peer), self._clients.of_peer(peer)
        if node is not None:
            self._nodes.heard(peer, self._now)
            self._agent_told(node, body)
        elif client is not None:
            self._clients.heard(peer, self._now)
            self._client_told(client, body)
        elif isinstance(body, Beat) and (reason := self._clients.ended(body.incarnation)) is not None:
            self._emit(Notify(peer, given_up(reason)))
        elif not isinstance(body, Goodbye):
            self._emit(Notify(peer, Beat(HELLO_AGAIN)))

    def _agent_told(self, node: Node, body: Body) -> None:
        if isinstance(body, Beat):
            self._emit(Notify(node.peer, Beat(self.identity.epoch, body.at)))
            self._groups.remind(node)
        elif isinstance(body, WorkerReady):
            self._guard(lambda: self._groups.ready(node, body))
        elif isinstance(body, WorkerExited):
            self._guard(lambda: self._groups.exited(node, body.id, body.exit, self._now))
        elif isinstance(body, ProcessGone):
            client = self._clients.get(body.incarnation)
            if client is None:
                self._clients.never_returns(body.incarnation)
            elif client.watcher == node.id:
                self._clients.gone(client, "its process ended")
        elif isinstance(body, WorkersHealth):
            self._health.said(node, body, self._wall)
        elif isinstance(body, LogLines):
            self._route_lines(node, body)
        elif isinstance(body, HardwareFound):
            self._looks.found(node, body)
        elif isinstance(body, Goodbye):
            self._nodes.left(node, body.reason, self._now)
        else:
            self.unexpected += 1

    def _client_told(self, client: Client, body: Body) -> None:
        if isinstance(body, Beat):
            self._emit(Notify(client.peer, Beat(self.identity.epoch)))
        elif isinstance(body, LogCredit):
            for node in self._nodes.alive():
                if node.log_name == body.node:
                    self._emit(Notify(node.peer, body))
        elif isinstance(body, WatchClients):
            self._clients.subscribe(client, body.incarnations, self._now)
        elif isinstance(body, Handles):
            self._reconciler.handles(client, body)
        elif isinstance(body, Goodbye):
            self._clients.gone(client, body.reason or "it said goodbye")
        else:
            self.unexpected += 1

    def _route_lines(self, node: Node, lines: LogLines) -> None:
        """To the job's driver; without one they are dropped, and more may come (they stay in the files)."""
        node.log_name = lines.node
        driver = self._clients.driver_of(lines.owner)
        if driver is not None:
            self._emit(Notify(driver.peer, lines))
        else:
            chars = sum(len(text) for _, _, text in lines.entries)
            self._emit(Notify(node.peer, LogCredit(lines.owner, lines.node, chars)))

    def _guard(self, act: Callable[[], None]) -> None:
        """A report that does not fit the state is a fault of that agent; it must not end the head."""
        try:
            act()
        except ProtocolError:
            self.unexpected += 1

    # --- ends ---

    def _node_lost(self, node: Node, reason: str, certain: bool, next: AgentHello | None) -> None:
        self._looks.node_lost(node, reason)
        if next is None:
            self._emit(of_node("node_left" if certain else "node_lost", node, f"is gone: {reason}"))
            self._groups.node_lost(node, reason, certain, self._now)
        else:
            self._reconciler.replaced(node, next, self._now)
        self._clients.unwatch(node.id, node.last_seen)
        self._clients.watch(self._nodes.alive())

    def _client_gone(self, incarnation: str, client: Client | None) -> None:
        self._groups.client_gone(incarnation)
        if client is not None:
            if client.role == "driver":
                self._emit(of_driver("driver_ended", client, f"has ended: {self._clients.ended(incarnation)}"))
            self._journal.forget(client.peer)
            self._nodes.forget(client.peer)
            self._settling.forget(client.peer)
            self._looks.forget(client.peer)
            self._groups.forget_job(client.namespace)

    def _worker_gone(self, worker_id: str) -> None:
        client = self._clients.of_worker(worker_id)
        if client is not None:
            self._clients.gone(client, "its worker has ended")

    def _emit(self, command: Command) -> None:
        if isinstance(command, Record):
            self._journal.add(command, self._wall)
        self._out.append(command)
