"""What the head answers: who asks for what, and who may. Pure; a Request gets exactly one answer, now or later.

What agents and clients tell the head, and who else is to know. Pure; what is not expected is counted and dropped.

What is asked about keys: members for themselves, the administrator for all. Pure.

Who may ask is decided before (head.authority): members change their own key, join tokens list one, and the rest is for
who sits at the head's machine: on its unix socket, or with its own key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from rlinf_actors.errors import ProtocolError
from rlinf_actors.head import validation
from rlinf_actors.head.client_table import given_up
from rlinf_actors.head.cluster_state import ClusterState
from rlinf_actors.head.commands import (
    Answer,
    EndCluster,
    NoticeReceived,
    Notify,
    Refusal,
    Refuse,
    RequestReceived,
)
from rlinf_actors.head.event_log import of_driver, of_node
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.validation import check_agent, check_names, own_namespace
from rlinf_actors.net.link import peer_name
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    AgentHello,
    Beat,
    ClientHello,
    Flushing,
    FlushLogs,
    Goodbye,
    HardwareFound,
    LogCredit,
    LogLines,
    ProcessGone,
    RefusalReport,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.client_messages import (
    AddKey,
    Detach,
    Done,
    DrainNode,
    EndGroup,
    Enroll,
    Enrolled,
    EnumerateHardware,
    EStop,
    FindGroup,
    GetEvents,
    GetKeys,
    GetNodes,
    GetStatus,
    Handles,
    Keys,
    KeyState,
    Launch,
    RevokeKey,
    RotateKey,
    StopCluster,
    StopGroup,
    WatchClients,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL, agreed, printable, spoken, what_to_upgrade

NOT_KEPT = (
    "the head could not write that down: one that is restarted will not know it. Its log and `rlinf-actors status` "
    "say why"
)


class KeyRequests:
    """Answers them.

    Args:
        tables: of the head.
    """

    def __init__(self, tables: ClusterState) -> None:
        self._tables = tables

    def answer(self, event: RequestReceived) -> Keys | None:
        """The answer, or None when it comes once what was changed is durable.

        Raises:
            Refusal: it cannot be, and why.
        """
        tables, body = self._tables, event.body
        if isinstance(body, GetKeys):
            return self._keys(tables.keys.all())
        if isinstance(body, AddKey):
            self._done(event, [tables.keys.add(body, who(event.member, body.by), tables.wall)])
        elif isinstance(body, RevokeKey):
            self._done(event, tables.keys.revoke(body, who(event.member, body.by), tables.wall))
        elif isinstance(body, Enroll):
            self._enrolled(event, tables.keys.enroll(event.member, body, tables.wall))
        elif isinstance(body, RotateKey):
            self._enrolled(event, tables.keys.rotate(event.member, body, tables.wall))
        return None

    def _done(self, event: RequestReceived, changed: list[KeyState]) -> None:
        self._tables.keys.flush(
            Answer(event.peer, event.id, self._keys(changed)),
            Answer(event.peer, event.id, self._keys(changed, NOT_KEPT)),
        )

    def _enrolled(self, event: RequestReceived, key: KeyState) -> None:
        self._tables.keys.flush(
            Answer(event.peer, event.id, Enrolled(key.role, key.name)),
            Answer(event.peer, event.id, Enrolled(key.role, key.name, NOT_KEPT)),
        )

    def _keys(self, keys: list[KeyState], warning: str = "") -> Keys:
        own, listens = self._tables.keys.own.public, self._tables.listens
        return Keys(keys, own, listens, self._tables.wall, warning)


def who(member: Member, said: str) -> str:
    """Who asks, for people: what it says of itself, and what its key says."""
    said = printable(said)
    return said if member.role == "local" else f"{said} ({member})"


Signed = TypeVar("Signed", DrainNode, EndGroup, EStop, StopCluster)
MAX_NODES = 100_000
"""More than any cluster has: a wait names each that is missing."""


class RequestHandlers:
    """Answers requests.

    Args:
        tables: of the head.
    """

    def __init__(self, tables: ClusterState) -> None:
        self._tables = tables
        self._keys = KeyRequests(tables)
        self._ending: list[tuple[bytes, int, bool]] = []
        self._why_ending = "a driver ended it"

    def answer(self, event: RequestReceived) -> None:
        """Answer *event*, now or later."""
        tables = self._tables
        try:
            answer = self._answer(event)
        except Refusal as error:
            tables.emit(Refuse(event.peer, event.id, error.kind, error.text, (), error.path))
            if isinstance(event.body, (AgentHello, ClientHello)):
                who = peer_name(event.peer) if event.member == LOCAL else str(event.member)
                text = f"refused {who} ({error.kind}): {error.text}"
                tables.refusals.note(who, error.kind, text, tables.now)
        else:
            if answer is not None:
                tables.emit(Answer(event.peer, event.id, answer))

    def answer_ending(self) -> None:
        """Once everything has stopped after StopCluster: answer that, and end the head."""
        tables = self._tables
        if self._ending and not len(tables.groups):
            for peer, id, _ in self._ending:
                tables.emit(Answer(peer, id, Done()))
            if not all(stay for _, _, stay in self._ending):
                tables.emit(EndCluster(self._why_ending))
            self._ending = []

    def _answer(self, event: RequestReceived) -> Body | None:
        """The answer, or None when it comes later."""
        tables = self._tables
        body = event.body
        if isinstance(body, AgentHello):
            return self._agent_hello(event, body)
        if isinstance(body, ClientHello):
            return self._client_hello(event, body)
        if isinstance(body, GetStatus):
            sees = tables.authority.sees(event)
            # who knows of another's machine could pose as an agent there, who sees the ends of its drivers
            hosts = event.member.role != "agent"
            return tables.status(tables.now, lambda name: body.namespace in (None, name) and sees(name), hosts)
        if isinstance(body, DrainNode):
            tables.drains.ask(event.peer, event.id, _signed(event, body), tables.now)
            return None
        if isinstance(body, EStop):
            tables.robots.estop(event.peer, event.id, _signed(event, body))
            return None
        if isinstance(body, EndGroup):
            tables.launches.end(event.peer, event.id, _signed(event, body))
            return None
        if isinstance(body, (Enroll, RotateKey, AddKey, RevokeKey, GetKeys)):
            return self._keys.answer(event)
        if isinstance(body, EnumerateHardware):  # of an observer too: `rlinf-actors plan` has no session
            tables.looks.ask(event.peer, event.id, body, tables.now)
            return None
        client = tables.clients.of_peer(event.peer)
        if isinstance(body, StopCluster) and client is None:
            self._stop_for_good(event, body)
            return None
        if isinstance(body, GetEvents):  # of an observer too: `rlinf-actors events`
            if client is not None:
                own_namespace(client, body.namespace or "")
            sees = tables.authority.sees(event) if client is None else _everything
            return tables.journal.ask(event.peer, event.id, body, tables.now, tables.wall, sees, event.member.key)
        if client is None:
            tables.emit(Notify(event.peer, Beat(HELLO_AGAIN)))
            raise Refusal("hello", "the head does not know this process: it was restarted, or no hello was sent")
        tables.clients.heard(event.peer, tables.now)
        return self._client_asked(client, event)

    def _client_asked(self, client: Client, event: RequestReceived) -> Body | None:
        tables = self._tables
        body = event.body
        if isinstance(body, GetNodes):
            if not 0 <= body.num_nodes <= MAX_NODES:
                raise Refusal("usage", f"num_nodes is {body.num_nodes}; it must be 0 to {MAX_NODES}")
            tables.nodes.wait(event.peer, event.id, body, tables.now)
            return None
        if isinstance(body, Launch):
            if self._ending:
                raise Refusal("usage", "the cluster is being stopped")
            return tables.launches.launch(client, event.peer, event.id, body, tables.now)
        if isinstance(body, FindGroup):
            return tables.launches.find(client, event.peer, event.id, body, tables.now)
        if isinstance(body, Detach):
            return tables.launches.detach(client, body)
        if isinstance(body, StopGroup):
            tables.launches.stop(client, event.peer, event.id, body)
            return None
        if isinstance(body, FlushLogs):
            return self._flush_logs(client, body)
        if isinstance(body, StopCluster):
            if not tables.identity.embedded:
                raise Refusal("usage", "this cluster is not the driver's own: `rlinf-actors head stop` ends it")
            self._end_all(event, body)
            return None
        raise Refusal("protocol", f"the head does not answer a {type(body).__name__}")

    def _flush_logs(self, client: Client, body: FlushLogs) -> Flushing:
        """Pass it on to the nodes of the client's job; lines go to the job's first driver alone."""
        tables = self._tables
        nodes = [node for node in tables.nodes.alive() if client.namespace in node.jobs]
        if tables.clients.driver_of(client.namespace) is not client:
            nodes = []
        for node in nodes:
            tables.emit(Notify(node.peer, FlushLogs(client.namespace, body.wait_s)))
        return Flushing(len(nodes))

    def _stop_for_good(self, event: RequestReceived, body: StopCluster) -> None:
        """`rlinf-actors head stop`.

        Raises:
            Refusal: a driver owns this cluster, or whoever asks is not the administrator.
        """
        if self._tables.identity.embedded:
            raise Refusal("usage", "this is the private cluster of a script: it ends with that script")
        if event.member.role not in ("local", "head"):
            raise Refusal("authentication", f"{event.member} may not end the cluster: the head's own key may")
        asked = _signed(event, body)
        self._why_ending = f"{asked.by or 'somebody'} ended the cluster" + (f": {asked.reason}" if asked.reason else "")
        self._end_all(event, body)

    def _end_all(self, event: RequestReceived, body: StopCluster) -> None:
        self._ending.append((event.peer, event.id, body.stay))
        self._tables.launches.stop_all()

    def _agent_hello(self, event: RequestReceived, hello: AgentHello) -> Welcome:
        tables = self._tables
        protocol = self._protocol("this agentd", hello)
        check_agent(hello)
        hello = validation.hello(hello)
        known = tables.nodes.get(hello.node.node_id)
        node = tables.nodes.hello(event.peer, hello, tables.now, event.member)
        same = known is not None and known.incarnation == node.incarnation
        if not same:
            tables.emit(of_node("node_joined", node, f"is here, incarnation {node.incarnation}"))
        else:
            tables.clients.unwatch(node.id, tables.now)  # a head's watch may have been lost with its connection
        tables.clients.seen(node.id, hello.watched)
        tables.reconciler.reconcile(node, hello.workers, same, tables.now)
        tables.robots.node_back(node)
        tables.drains.node_back(node)
        tables.looks.node_back(node)
        tables.clients.watch_all(node)
        return self._welcome("", protocol)

    def _client_hello(self, event: RequestReceived, hello: ClientHello) -> Welcome:
        tables = self._tables
        protocol = self._protocol(f"this {hello.role}", hello)
        check_names(
            incarnation=hello.incarnation, namespace=hello.namespace, worker_id=hello.worker_id, host=hello.host,
            parent=hello.parent,
        )  # fmt: skip
        tables.reconciler.check_owner(hello)
        known = tables.clients.get(hello.incarnation) is not None
        namespace = tables.groups.namespace_of(hello.parent or hello.worker_id)
        client = tables.clients.hello(event.peer, hello, tables.now, namespace, event.member)
        if client.role == "driver" and not known:
            tables.emit(of_driver("driver_joined", client, "is here"))
        tables.groups.tell_all(client)
        tables.clients.watch(client, tables.nodes.alive())
        return self._welcome(tables.clients.token(client.namespace), protocol)

    def _protocol(self, who: str, hello: AgentHello | ClientHello) -> int:
        """The protocol that the session speaks.

        Raises:
            Refusal: there is none in common.
        """
        protocol = agreed(hello.protocol, hello.newest)
        if not protocol:
            theirs, ours = spoken(hello.protocol, hello.newest), spoken(OLDEST, PROTOCOL)
            raise Refusal(
                "protocol",
                f"{who} is rlinf-actors {hello.version} ({theirs}), the head is {self._tables.identity.version} "
                f"({ours}): {what_to_upgrade(hello.protocol, who, 'the head first')}",
            )
        return protocol

    def _welcome(self, token: str, protocol: int) -> Welcome:
        tables = self._tables
        timing = tables.timing
        return Welcome(
            epoch=tables.identity.epoch,
            version=tables.identity.version,
            beat_s=timing.beat_s,
            lease_s=timing.lease_s,
            token=token,
            robot_lease_s=timing.robot_lease_s,
            head_grace_s=timing.head_grace_s,
            protocol=protocol,
        )


def _everything(namespace: str) -> bool:
    """What a client sees is checked otherwise: it asks for its own namespace."""
    return True


def _signed(event: RequestReceived, body: Signed) -> Signed:
    """What a person asks, with who that is by the key, and in words that can be shown."""
    return replace(body, by=who(event.member, body.by), reason=printable(body.reason))


class NoticeHandlers:
    """Takes notices.

    Args:
        tables: of the head.

    Attributes:
        unexpected: so many did not fit what the head knows.
    """

    def __init__(self, tables: ClusterState) -> None:
        self.unexpected = 0
        self._tables = tables

    def take(self, event: NoticeReceived) -> None:
        """A peer said something; one that is not known is asked to say hello."""
        tables = self._tables
        peer, body = event.peer, event.body
        node, client = tables.nodes.of_peer(peer), tables.clients.of_peer(peer)
        if node is not None:
            tables.nodes.heard(peer, tables.now)
            self._agent_told(node, body)
        elif client is not None:
            tables.clients.heard(peer, tables.now)
            self._client_told(client, body)
        elif isinstance(body, Beat) and (reason := tables.clients.ended(body.incarnation)) is not None:
            tables.emit(Notify(peer, given_up(reason)))
        elif not isinstance(body, Goodbye):
            tables.emit(Notify(peer, Beat(HELLO_AGAIN)))

    def _agent_told(self, node: Node, body: Body) -> None:
        tables = self._tables
        if isinstance(body, Beat):
            tables.emit(Notify(node.peer, Beat(tables.identity.epoch, body.at)))
            tables.groups.remind(node)
        elif isinstance(body, WorkerReady):
            self._guard(lambda: tables.groups.ready(node, body))
        elif isinstance(body, WorkerExited):
            exit = validation.exit_report(body.exit)
            self._guard(lambda: tables.groups.exited(node, body.id, exit, tables.now))
        elif isinstance(body, ProcessGone):
            tables.clients.process_ended(node, body.incarnation, tables.now)
        elif isinstance(body, WorkersHealth):
            tables.health.said(node, validation.health(body), tables.wall)
        elif isinstance(body, LogLines):
            self._route_lines(node, body)
        elif isinstance(body, RefusalReport):
            pass  # from an agent of an earlier version: workers write refusals to their own logs now
        elif isinstance(body, HardwareFound):
            tables.looks.found(node, body)
        elif isinstance(body, Goodbye):
            tables.nodes.left(node, printable(body.reason), tables.now)
        else:
            self.unexpected += 1

    def _client_told(self, client: Client, body: Body) -> None:
        tables = self._tables
        if isinstance(body, Beat):
            client.answered = max(client.answered, min(body.word, tables.now))
            tables.emit(Notify(client.peer, Beat(tables.identity.epoch, word=tables.now)))
        elif isinstance(body, LogCredit):
            for node in tables.nodes.alive():
                if node.log_name == body.node:
                    tables.emit(Notify(node.peer, body))
        elif isinstance(body, WatchClients):
            tables.clients.subscribe(client, body.incarnations, tables.now)
        elif isinstance(body, Handles):
            tables.reconciler.handles(client, body)
        elif isinstance(body, Goodbye):
            tables.clients.gone(client, printable(body.reason) or "it said goodbye")
        else:
            self.unexpected += 1

    def _route_lines(self, node: Node, lines: LogLines) -> None:
        """To the job's driver; without one they are dropped, and more may come (they stay in the files). A node with a
        key writes to the terminals of those alone whose workers it has, or had.
        """
        tables = self._tables
        node.log_name = lines.node
        driver = tables.clients.driver_of(lines.owner)
        if driver is not None and (node.member == LOCAL or lines.owner in node.jobs):
            tables.emit(Notify(driver.peer, lines))
        else:
            tables.emit(Notify(node.peer, LogCredit(lines.owner, lines.node, lines.cost)))

    def _guard(self, act: Callable[[], None]) -> None:
        """A report that does not fit the state is a fault of that agent; it must not end the head."""
        try:
            act()
        except ProtocolError:
            self.unexpected += 1
