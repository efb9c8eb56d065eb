"""Handlers of all messages that the head receives. Pure.

Four tables map a message class to its handler: requests that need no session, requests of clients, notices of agentds
and notices of clients. Before a handler runs, `head.authority` has checked that the member may send the message. A
request handler returns the answer, or None if the answer comes later, or raises Refused, which is sent as an error. A
notice that is in no table, or that does not fit the state, is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Union

from msgspec.structs import replace

from rlinf_actors.errors import ProtocolError
from rlinf_actors.head import validation
from rlinf_actors.head.client_table import abandoned
from rlinf_actors.head.commands import Answer, EndCluster, NoticeReceived, Notify, Refuse, Refused, RequestReceived
from rlinf_actors.head.event_log import of_driver, of_node
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.rivals import check_rotation
from rlinf_actors.head.slices import Sliced
from rlinf_actors.head.validation import own_namespace
from rlinf_actors.net.link import peer_name
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire import (
    agent_messages,
    client_messages,
    key_messages,
    launch_messages,
    node_questions,
    resize_messages,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.debug_values import DebugQuestion
from rlinf_actors.wire.protocol import PROTOCOL, printable, what_to_upgrade
from rlinf_actors.wire.values import NodeState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

NOT_KEPT = (
    "the head could not write that down: one that is restarted will not know it. Its log and `rlinf-actors status` "
    "say why"
)
MAX_NODES = 100_000
"""Largest `num_nodes` of a GetNodes. It bounds the list of missing ranks in the error after a timeout."""
OF_KEYS = (key_messages.AddKey, key_messages.RevokeKey, key_messages.Enroll, key_messages.RotateKey)
"""Requests whose refusals are entries of the event log. Those of hellos, rights and quotas are, whatever was asked."""
_Answer = Union[Body, None, Sliced[Any]]
Signed = TypeVar(
    "Signed",
    client_messages.KillWorker,
    client_messages.DrainNode,
    client_messages.EndGroup,
    client_messages.EStop,
    client_messages.StopCluster,
)


class Handlers:
    """Dispatches messages by their class. The coordinator calls it for each message that its sender may send."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._ending: list[tuple[bytes, int, bool]] = []
        self._why_ending = "a driver ended it"
        launches = head.launches
        # Command line tools have no session: `rlinf-actors status`, `plan`, `events`, `keys`.
        self._requests: Mapping[type[Any], Callable[[RequestReceived, Any], _Answer]] = {
            agent_messages.AgentHello: self._agent_hello,
            agent_messages.ClientHello: self._client_hello,
            client_messages.GetStatus: self._status,
            client_messages.GetEvents: self._events,
            client_messages.EnumerateHardware: head.queries.ask_hardware,
            node_questions.AskNode: self._ask_node,
            client_messages.DrainNode: lambda event, body: head.drains.ask(event, _signed(event, body)),
            client_messages.EStop: lambda event, body: head.robots.estop(event, _signed(event, body)),
            client_messages.EndGroup: lambda event, body: launches.end(event, _signed(event, body)),
            client_messages.KillWorker: lambda event, body: head.kills.ask(event, _signed(event, body)),
            client_messages.StopCluster: self._stop_for_good,
            key_messages.GetKeys: lambda event, body: self._keys(head.keys.all()),
            key_messages.AddKey: self._add_key,
            key_messages.RevokeKey: self._revoke_key,
            key_messages.Enroll: self._enroll,
            key_messages.RotateKey: self._rotate_key,
        }
        self._requests_of_clients: Mapping[type[Any], Callable[[Client, RequestReceived, Any], _Answer]] = {
            client_messages.GetNodes: self._get_nodes,
            client_messages.GetEvents: self._events_driver,
            client_messages.Launch: launches.launch,
            launch_messages.LaunchPart: lambda client, event, body: launches.add_part(client, body),
            launch_messages.FindWorker: lambda client, event, body: launches.find_worker(client, body),
            client_messages.FindGroup: launches.find,
            client_messages.Detach: lambda client, event, body: launches.detach(client, body),
            client_messages.StopGroup: launches.stop,
            resize_messages.AddRanks: lambda client, event, body: head.resizes.add(client, body),
            resize_messages.ResizeGroup: head.resizes.resize,
            agent_messages.FlushLogs: lambda client, event, body: head.output.flush(client, body),
            client_messages.StopCluster: self._stop_own,
        }
        self._notices_of_agents: Mapping[type[Any], Callable[[Node, Any], Sliced[None] | None]] = {
            agent_messages.Beat: self._agent_beat,
            agent_messages.WorkerReady: head.groups.ready,
            agent_messages.WorkerExited: self._worker_exited,
            agent_messages.LeaseEnded: lambda node, body: self._head.groups.lease_ended(node, body.id, body.text),
            agent_messages.ProcessGone: lambda node, body: head.clients.process_ended(node, body.incarnation),
            agent_messages.WorkersHealth: head.health.report,
            agent_messages.OutputLost: head.health.output_lost,
            agent_messages.LogLines: head.output.lines,
            agent_messages.HardwareFound: head.queries.found,
            node_questions.AgentAnswered: head.queries.found,
            agent_messages.Goodbye: lambda node, body: head.nodes.left(node, printable(body.reason)),
        }
        self._notices_of_clients: Mapping[type[Any], Callable[[Client, Any], Sliced[None] | None]] = {
            agent_messages.Beat: self._client_beat,
            agent_messages.LogCredit: head.output.credit,
            client_messages.WatchClients: lambda client, body: head.clients.subscribe(client, body.incarnations),
            client_messages.Handles: head.reconciler.handles,
            node_questions.AgentAnswered: head.queries.found,
            agent_messages.Goodbye: lambda client, body: head.clients.gone(
                client, printable(body.reason) or "it said goodbye"
            ),
        }

    def request(self, event: RequestReceived) -> None:
        """Handle a request, and send its answer or error unless the answer comes later."""
        try:
            found = self._answer(event)
        except Refused as error:
            self._refuse(event, error)
        else:
            if isinstance(found, Generator):
                self._head.slices.start(self._sliced(event, found), self._head.keys_of(event), event.member)
            elif found is not None:
                self._head.emit(Answer(event.peer, event.id, found))

    def _sliced(self, event: RequestReceived, work: Sliced[Body | None]) -> Sliced[None]:
        try:
            answer = yield from work
        except Refused as error:
            self._refuse(event, error)
        else:
            if answer is not None:
                self._head.emit(Answer(event.peer, event.id, answer))

    def _refuse(self, event: RequestReceived, error: Refused) -> None:
        self._head.emit(Refuse(event.peer, event.id, error.kind, error.text, (), error.path))
        hello = isinstance(event.body, (agent_messages.AgentHello, agent_messages.ClientHello))
        logged = hello or error.kind == "authentication" or isinstance(event.body, OF_KEYS)
        if logged if error.logged is None else error.logged:
            who = peer_name(event.peer) if event.member == LOCAL else str(event.member)
            kind = error.kind if hello else node_questions.verb(event.body)
            self._head.refusals.note(who, kind, f"refused {who} ({kind}): {error.text}")

    def _answer(self, event: RequestReceived) -> _Answer:
        head, kind = self._head, type(event.body)
        client = head.clients.of_peer(event.peer)
        if client is not None:
            client.last_seen = head.now
            if kind in self._requests_of_clients:
                return self._requests_of_clients[kind](client, event, event.body)
        if kind in self._requests:
            return self._requests[kind](event, event.body)
        if client is not None:
            raise Refused("protocol", f"the head does not answer a {kind.__name__}")
        head.emit(Notify(event.peer, agent_messages.Beat(agent_messages.HELLO_AGAIN)))
        raise Refused("hello", "the head does not know this process: it was restarted, or no hello was sent")

    def notice(self, event: NoticeReceived) -> None:
        """Handle a notice. A peer without a session is asked to say hello."""
        head, peer, body = self._head, event.peer, event.body
        node, client = head.nodes.of_peer(peer), head.clients.of_peer(peer)
        work: Sliced[None] | None = None
        try:
            if node is not None:
                head.nodes.heard(node)
                work = self._notices_of_agents.get(type(body), _unexpected)(node, body)
            elif client is not None:
                client.last_seen = head.now
                work = self._notices_of_clients.get(type(body), _unexpected)(client, body)
            elif isinstance(body, agent_messages.Beat) and (reason := head.clients.ended(body.incarnation)) is not None:
                head.emit(Notify(peer, abandoned(reason)))
            elif not isinstance(body, agent_messages.Goodbye):
                head.emit(Notify(peer, agent_messages.Beat(agent_messages.HELLO_AGAIN)))
        except ProtocolError:  # a fault of that peer must not end the head
            head.unexpected += 1
        if work is not None:
            head.slices.start(self._sliced_notice(work), head.keys_of(event), event.member)

    def _sliced_notice(self, work: Sliced[None]) -> Sliced[None]:
        try:
            yield from work
        except ProtocolError:  # as in `notice`
            self._head.unexpected += 1

    # --- sessions ---

    def _agent_hello(self, event: RequestReceived, hello: agent_messages.AgentHello) -> Sliced[agent_messages.Welcome]:
        head = self._head
        self._check_protocol("this agentd", hello)
        validation.check_agent(hello)
        hello = validation.hello(hello)
        known = head.nodes.get(hello.node.node_id)
        before = known.report.admit if known is not None else hello.node.admit
        node = head.nodes.hello(event.peer, hello, event.member)
        same = known is not None and known.incarnation == node.incarnation
        yield from head.reconciler.replacing(node.id)
        if not same:
            again = " again: its agentd has restarted" if known is not None else ""
            text = f"is here{again} (rlinf-actors {hello.version}), incarnation {node.incarnation}"
            head.emit(of_node("node_joined", node, text))
        else:
            if hello.node.admit != before:
                head.emit(of_node("node_joined", node, f"has new rules; it admits {hello.node.admit}"))
            head.clients.unwatch(node.id, head.now)  # orders to watch may have been lost with its connection
        yield from head.clients.watched_on(node, hello.watched)
        yield from head.reconciler.reconcile(node, hello.workers, same)
        if head.nodes.get(node.id) is not node:
            raise Refused("hello", "the agentd has another connection, or was given up meanwhile")
        head.robots.node_back(node)
        head.drains.node_back(node)
        head.queries.back(node)
        yield from head.clients.watch_on(node)
        return self._welcome("")

    def _client_hello(self, event: RequestReceived, hello: agent_messages.ClientHello) -> agent_messages.Welcome:
        head = self._head
        self._check_protocol(f"this {hello.role}", hello)
        head.reconciler.check_owner(hello)
        known = head.clients.get(hello.incarnation) is not None
        client = head.clients.hello(event.peer, hello, event.member)
        if client.role == "driver" and not known:
            head.emit(of_driver("driver_joined", client, "is here"))
        head.groups.resend(client)
        head.queries.back(client)
        head.clients.watch(client, head.nodes.on_host(client.host))
        return self._welcome(head.jobs.token(client.namespace))

    def _check_protocol(self, who: str, hello: agent_messages.AgentHello | agent_messages.ClientHello) -> None:
        """Raise Refused if the peer speaks another protocol than the head; the text names the peer as *who*."""
        if hello.protocol != PROTOCOL:
            raise Refused(
                "protocol",
                f"{who} is rlinf-actors {hello.version} (protocol {hello.protocol}), the head is "
                f"{self._head.identity.version} (protocol {PROTOCOL}): "
                f"{what_to_upgrade(hello.protocol, who, 'the head first')}",
            )

    def _welcome(self, token: str) -> agent_messages.Welcome:
        identity, timing = self._head.identity, self._head.timing
        return agent_messages.Welcome(
            epoch=identity.epoch,
            version=identity.version,
            beat_s=timing.beat_s,
            lease_s=timing.lease_s,
            token=token,
            robot_lease_s=timing.robot_lease_s,
            head_grace_s=timing.head_grace_s,
        )

    def _worker_exited(self, node: Node, body: agent_messages.WorkerExited) -> None:
        exit = validation.exit_report(body.exit)
        if body.refused:
            who = node.name if node.member == LOCAL else str(node.member)
            self._head.refusals.note(who, "admission", f"{who} refused to start {body.id}: {printable(exit.reason)}")
        self._head.groups.exited(node, body.id, exit)

    def _agent_beat(self, node: Node, beat: agent_messages.Beat) -> None:
        self._head.emit(Notify(node.peer, agent_messages.Beat(self._head.identity.epoch, beat.at, self._head.now)))
        self._head.groups.remind(node)

    def _client_beat(self, client: Client, beat: agent_messages.Beat) -> None:
        client.answered = max(client.answered, min(beat.word, self._head.now))
        self._head.emit(Notify(client.peer, agent_messages.Beat(self._head.identity.epoch, beat.at, self._head.now)))

    # --- status, events, nodes ---

    def _status(self, event: RequestReceived, body: client_messages.GetStatus) -> Sliced[client_messages.Status]:
        head = self._head
        sees, client = head.authority.sees(event), head.clients.of_peer(event.peer)

        def for_sender(states: list[NodeState]) -> list[NodeState]:
            if event.member.role in ("agent", "viewer"):
                # whoever knows the host ids of other machines could pose as an agentd there and report false deaths
                states = [replace(state, report=replace(state.report, host="")) for state in states]
            return head.admission.shown(states, client, event.member)

        status = yield from head.describe(lambda name: body.namespace in (None, name) and sees(name), for_sender)
        administers = head.authority.speaker(event).role in ("local", "head")
        return replace(
            status, key_ends_at=head.keys.end_of(event.member.key), hooks=head.hooks() if administers else []
        )

    def _ask_node(self, event: RequestReceived, body: node_questions.AskNode) -> None:
        question = body.question
        if isinstance(question, DebugQuestion):
            question = replace(question, by=signature(event.member, question.by))
        self._head.queries.ask(event, body.node_id, question)

    def _events(self, event: RequestReceived, body: client_messages.GetEvents) -> Body | None:
        sees, driver = self._head.authority.sees(event), event.member.name * (event.member.role == "driver")
        # a namespace may have been the job of another driver before
        may_see = lambda namespace, owner: sees(namespace) and (not driver or owner in ("", driver))  # noqa: E731
        return self._head.log.ask(event.peer, event.id, body, may_see, event.member)

    def _events_driver(self, client: Client, event: RequestReceived, body: client_messages.GetEvents) -> Body | None:
        own_namespace(client, body.namespace or "")
        mine = ("", self._head.jobs.owner_of(client.namespace))
        return self._head.log.ask(event.peer, event.id, body, lambda _, owner: owner in mine, event.member)

    def _get_nodes(self, client: Client, event: RequestReceived, body: client_messages.GetNodes) -> None:
        if not 0 <= body.num_nodes <= MAX_NODES:
            raise Refused("usage", f"num_nodes is {body.num_nodes}; it must be 0 to {MAX_NODES}")
        self._head.nodes.requests.wait(event.peer, event.id, body)

    # --- the end of the cluster ---

    def _stop_for_good(self, event: RequestReceived, body: client_messages.StopCluster) -> None:
        """Stop all groups for `rlinf-actors head stop`; the head ends once they have stopped."""
        if self._head.identity.embedded:
            raise Refused("usage", "this is the private cluster of a script: it ends with that script")
        if event.member.role not in ("local", "head"):
            raise Refused("authentication", f"{event.member} may not end the cluster: the head's own key may")
        asked = _signed(event, body)
        self._why_ending = f"{asked.by or 'a local process'} ended the cluster"
        self._why_ending += f": {asked.reason}" if asked.reason else ""
        self._end_all(event, body)

    def _stop_own(self, client: Client, event: RequestReceived, body: client_messages.StopCluster) -> None:
        if not self._head.identity.embedded:
            raise Refused("usage", "this cluster is not the driver's own: `rlinf-actors head stop` ends it")
        self._end_all(event, body)

    def _end_all(self, event: RequestReceived, body: client_messages.StopCluster) -> None:
        self._ending.append((event.peer, event.id, body.stay))
        self._head.launches.stop_all()

    @property
    def ending(self) -> bool:
        """True while a StopCluster request waits for the ends of all groups."""
        return bool(self._ending)

    def answer_ending(self) -> None:
        """If every group has stopped, answer the StopCluster requests.

        Then end the head, unless all these requests ask it to stay.
        """
        if self._ending and not len(self._head.groups):
            for peer, id, _ in self._ending:
                self._head.emit(Answer(peer, id, client_messages.Done()))
            if not all(stay for _, _, stay in self._ending):
                self._head.emit(EndCluster(self._why_ending))
            self._ending = []

    # --- keys: a member rotates its own key, a join token adds one key, an administrator does everything else ---

    def _add_key(self, event: RequestReceived, body: key_messages.AddKey) -> None:
        key = self._head.keys.add(body, signature(event.member, body.by), self._head.wall)
        self._answer_when_saved(event, self._keys([key]))

    def _revoke_key(self, event: RequestReceived, body: key_messages.RevokeKey) -> None:
        ended = self._head.keys.revoke(body, signature(event.member, body.by), self._head.wall)
        self._answer_when_saved(event, self._keys(ended))

    def _enroll(self, event: RequestReceived, body: key_messages.Enroll) -> None:
        key = self._head.keys.enroll(event.member, body, self._head.wall)
        self._answer_when_saved(event, key_messages.Enrolled(key.role, key.name))

    def _rotate_key(self, event: RequestReceived, body: key_messages.RotateKey) -> None:
        check_rotation(self._head, event.member, body.keep_s)
        key = self._head.keys.rotate(event.member, body, self._head.wall)
        self._answer_when_saved(event, key_messages.Enrolled(key.role, key.name))

    def _answer_when_saved(self, event: RequestReceived, answer: key_messages.Keys | key_messages.Enrolled) -> None:
        failed = replace(answer, warning=NOT_KEPT)
        self._head.keys.flush(Answer(event.peer, event.id, answer), Answer(event.peer, event.id, failed))

    def _keys(self, keys: list[key_messages.KeyState]) -> key_messages.Keys:
        return key_messages.Keys(keys, self._head.keys.own.public, self._head.listens, self._head.wall)


def _unexpected(sender: Node | Client, body: Body) -> None:
    raise ProtocolError(f"a {type(body).__name__} is not expected of this peer")


def signature(member: Member, said: str) -> str:
    """Return text that names the sender of a request: the name *said* in the request, then the member of its key.

    The text has no member if the sender is a local process.
    """
    said = printable(said)
    return said if member.role == "local" else f"{said} ({member})"


def _signed(event: RequestReceived, body: Signed) -> Signed:
    """Return a copy of a request with printable text, in which `by` also names the member of the sender's key."""
    return replace(body, by=signature(event.member, body.by), reason=printable(body.reason))
