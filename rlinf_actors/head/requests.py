"""What the head answers: who asks for what, and who may. Pure; a Request gets exactly one answer, now or later."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from rlinf_actors.head import clipped
from rlinf_actors.head.checks import check_agent, check_names, own_namespace
from rlinf_actors.head.commands import Answer, Asked, EndCluster, Notify, Refuse, Refused
from rlinf_actors.head.happenings import of_driver, of_node
from rlinf_actors.head.keyrequests import KeyRequests, who
from rlinf_actors.head.records import Client
from rlinf_actors.head.tables import Tables
from rlinf_actors.net.admission import known_as
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.agents import Flushing, FlushLogs
from rlinf_actors.wire.bounds import printable
from rlinf_actors.wire.clients import (
    Detach,
    Done,
    EnumerateHardware,
    FindGroup,
    GetNodes,
    Launch,
    StopCluster,
    StopGroup,
)
from rlinf_actors.wire.keys import AddKey, Enroll, GetKeys, RevokeKey, RotateKey
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.operators import DrainNode, EndGroup, EStop, GetEvents, GetStatus
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL, agreed, spoken, what_to_upgrade
from rlinf_actors.wire.session import HELLO_AGAIN, AgentHello, Beat, ClientHello, Welcome

Signed = TypeVar("Signed", DrainNode, EndGroup, EStop, StopCluster)
MAX_NODES = 100_000
"""More than any cluster has: a wait names each that is missing."""


class Requests:
    """Answers requests.

    Args:
        tables: of the head.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._keys = KeyRequests(tables)
        self._ending: list[tuple[bytes, int, bool]] = []
        self._why_ending = "a driver ended it"

    def answer(self, event: Asked) -> None:
        """Answer *event*, now or later."""
        tables = self._tables
        try:
            answer = self._answer(event)
        except Refused as error:
            tables.emit(Refuse(event.peer, event.id, error.kind, error.text, (), error.path))
            if isinstance(event.body, (AgentHello, ClientHello)):
                who = known_as(event.peer) if event.member == LOCAL else str(event.member)
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

    def _answer(self, event: Asked) -> Body | None:
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
            raise Refused("hello", "the head does not know this process: it was restarted, or no hello was sent")
        tables.clients.heard(event.peer, tables.now)
        return self._client_asked(client, event)

    def _client_asked(self, client: Client, event: Asked) -> Body | None:
        tables = self._tables
        body = event.body
        if isinstance(body, GetNodes):
            if not 0 <= body.num_nodes <= MAX_NODES:
                raise Refused("usage", f"num_nodes is {body.num_nodes}; it must be 0 to {MAX_NODES}")
            tables.nodes.wait(event.peer, event.id, body, tables.now)
            return None
        if isinstance(body, Launch):
            if self._ending:
                raise Refused("usage", "the cluster is being stopped")
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
                raise Refused("usage", "this cluster is not the driver's own: `rlinf-actors head stop` ends it")
            self._end_all(event, body)
            return None
        raise Refused("protocol", f"the head does not answer a {type(body).__name__}")

    def _flush_logs(self, client: Client, body: FlushLogs) -> Flushing:
        """Pass it on to the nodes of the client's job; lines go to the job's first driver alone."""
        tables = self._tables
        nodes = [node for node in tables.nodes.alive() if client.namespace in node.jobs]
        if tables.clients.driver_of(client.namespace) is not client:
            nodes = []
        for node in nodes:
            tables.emit(Notify(node.peer, FlushLogs(client.namespace, body.wait_s)))
        return Flushing(len(nodes))

    def _stop_for_good(self, event: Asked, body: StopCluster) -> None:
        """`rlinf-actors head stop`.

        Raises:
            Refused: a driver owns this cluster, or whoever asks is not the administrator.
        """
        if self._tables.identity.embedded:
            raise Refused("usage", "this is the private cluster of a script: it ends with that script")
        if event.member.role not in ("local", "head"):
            raise Refused("authentication", f"{event.member} may not end the cluster: the head's own key may")
        asked = _signed(event, body)
        self._why_ending = f"{asked.by or 'somebody'} ended the cluster" + (f": {asked.reason}" if asked.reason else "")
        self._end_all(event, body)

    def _end_all(self, event: Asked, body: StopCluster) -> None:
        self._ending.append((event.peer, event.id, body.stay))
        self._tables.launches.stop_all()

    def _agent_hello(self, event: Asked, hello: AgentHello) -> Welcome:
        tables = self._tables
        protocol = self._protocol("this agentd", hello)
        check_agent(hello)
        hello = clipped.hello(hello)
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

    def _client_hello(self, event: Asked, hello: ClientHello) -> Welcome:
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
            Refused: there is none in common.
        """
        protocol = agreed(hello.protocol, hello.newest)
        if not protocol:
            theirs, ours = spoken(hello.protocol, hello.newest), spoken(OLDEST, PROTOCOL)
            raise Refused(
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


def _signed(event: Asked, body: Signed) -> Signed:
    """What a person asks, with who that is by the key, and in words that can be shown."""
    return replace(body, by=who(event.member, body.by), reason=printable(body.reason))
