"""Who may say what to a head: the one place that decides, before anything else looks at a message. Pure.

Two questions: may a member of this role say this at all (security.members), and is what the message claims true of
this member: its node, its role and job, whose session it speaks in. `LOCAL` members, who come without a key, may say
and claim everything; but one that has come as a worker of a job is that, on this connection.
"""

from __future__ import annotations

from collections.abc import Callable

from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import NoticeReceived, Refusal, RequestReceived
from rlinf_actors.head.key_registry import Jobs
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.records import Client
from rlinf_actors.security.members import LOCAL, VERBS, Member, may
from rlinf_actors.wire.agent_messages import AgentHello, ClientHello, FlushLogs, LogCredit
from rlinf_actors.wire.client_messages import DrainNode, EndGroup, EStop

KIND = "authentication"
MAX_NODES_OF_ONE = 64
"""With one key, lost ones too: the users of a machine may each have an agentd with the machine's key."""
MAX_DRIVERS_OF_ONE = 1000
"""Processes with one driver's key. Each may be watched on the node that it names, and then lives without a word."""
_CLAIMS = (AgentHello, ClientHello, DrainNode, EStop, EndGroup, LogCredit, FlushLogs)
"""What claims something that depends on who says it; the rest may be said by whoever may say it at all."""


_HOW = {
    "head": "whoever has the head's own key: on the head's machine, as the user who can read head.key (in another "
    "directory than the usual one: RLINF_ACTORS_KEYS=DIR)",
    "driver": "a driver's key: `rlinf-actors keys enroll --driver NAME` on the head's machine, `rlinf-actors keys join "
    "TOKEN` here",
    "agent": "an agent, of its own node: `rlinf-actors keys enroll NODE` on the head's machine",
    "worker": "a worker, within its job",
}
"""By role, who has it and how it is got."""


class Authority:
    """Judges what peers say.

    Args:
        nodes, clients, jobs: who is there, and whose they are.
    """

    def __init__(self, nodes: NodeTable, clients: ClientTable, jobs: Jobs) -> None:
        self._nodes = nodes
        self._clients = clients
        self._jobs = jobs

    def check(self, event: RequestReceived | NoticeReceived) -> None:
        """Whether a peer may say this.

        Raises:
            Refusal: it may not; says who, what and why.
        """
        member, body, speaker = event.member, event.body, self.speaker(event)
        verb = type(body).__name__
        if not may(speaker, verb):
            raise Refusal(KIND, f"{speaker} may not say {verb}", advice=who_may(verb))
        if isinstance(body, EStop) and body.release and speaker.role not in ("local", "driver", "head"):
            raise Refusal(KIND, f"{speaker} may not release an emergency stop: a driver may, or the head's machine")
        session = self._nodes.of_peer(event.peer) or self._clients.of_peer(event.peer)
        if session is not None and not session.member.is_same(member):
            raise Refusal(KIND, f"{member} speaks as {session.member}: a session belongs to the key that began it")
        if member.role == "local" or not isinstance(body, _CLAIMS):
            return
        if isinstance(body, AgentHello):
            self._agent(member, body)
        elif isinstance(body, ClientHello):
            self._client(member, body)
        elif isinstance(body, DrainNode) and member.role == "agent":
            node = self._nodes.known(body.node_id)
            if node is None or not node.member.is_same(member):
                raise Refusal(KIND, f"{member} may drain its own node only, and {body.node_id!r} is not")
        elif isinstance(body, EndGroup) and not self.sees(event)(body.namespace):
            raise Refusal(
                KIND, f"{member} may end groups of its own jobs only, and namespace {body.namespace!r} is not"
            )
        elif (
            isinstance(body, (LogCredit, FlushLogs)) and isinstance(session, Client) and session.namespace != body.owner
        ):
            raise Refusal(KIND, f"{member} has nothing to do with the output of namespace {body.owner!r}")

    def speaker(self, event: RequestReceived | NoticeReceived) -> Member:
        """As whom a peer speaks. It keeps a worker that errs within its job, also where it is the head's own user; one
        that lies opens another connection.
        """
        session = self._clients.of_peer(event.peer) if event.member.role == "local" else None
        if session is not None and session.role == "worker":
            return Member("worker", session.namespace, session.namespace)
        return event.member

    def sees(self, event: RequestReceived | NoticeReceived) -> Callable[[str], bool]:
        """Which namespaces a peer is shown; what belongs to none is for everybody."""
        member = self.speaker(event)
        if member.role in ("local", "head"):
            return lambda namespace: True
        if member.role == "worker":
            return lambda namespace: namespace == member.job
        if member.role == "driver":
            return lambda namespace: self._jobs.owner_of(namespace) == member.name
        return lambda namespace: False

    def _agent(self, member: Member, hello: AgentHello) -> None:
        report = hello.node
        if hello.is_head:
            raise Refusal(KIND, f"{member} says that the head runs in its process; that agent needs no key")
        if member.name not in (report.hostname, report.node_id):
            raise Refusal(
                KIND,
                f"{member} calls its node {report.hostname!r} (id {report.node_id}): a node has the name of its key "
                "([node] name), or its id ([node] id, --node-id)",
            )
        known = self._nodes.known(report.node_id)
        if known is None and sum(node.member.is_same(member) for node in self._nodes.all()) >= MAX_NODES_OF_ONE:
            raise Refusal("unreachable", f"{member} has {MAX_NODES_OF_ONE} nodes already, this head says no to more")
        if known is None or known.member.is_same(member):
            return
        if known.member == LOCAL and not known.is_head and not known.alive:
            return  # it was here before this cluster had keys
        raise Refusal(
            KIND, f"{member} says that it is node {known.name} (id {known.id}), which belongs to {known.member}"
        )

    def _client(self, member: Member, hello: ClientHello) -> None:
        if hello.role != member.role:
            raise Refusal(KIND, f"{member} says that it is a {hello.role}")
        if member.role == "worker" and hello.namespace != member.job:
            raise Refusal(KIND, f"{member} says that it belongs to namespace {hello.namespace!r}")
        known = self._clients.get(hello.incarnation)
        if known is not None and not known.member.is_same(member):
            raise Refusal(KIND, f"{member} says that it is {known}, which is {known.member}")
        if member.role == "driver":
            if known is None and sum(c.member.is_same(member) for c in self._clients.alive()) >= MAX_DRIVERS_OF_ONE:
                raise Refusal("usage", f"{MAX_DRIVERS_OF_ONE} processes of {member} are here already")
            why_not = self._jobs.may_open(hello.namespace, member.name, hello.token)
            if why_not:
                raise Refusal(KIND, f"{member} may not join namespace {hello.namespace!r}: {why_not}")


def who_may(verb: str) -> str:
    """Who may say what somebody was refused, and how to be one of them; "" for a verb that nobody may say."""
    roles = VERBS.get(verb, frozenset()) - {"enroll"}
    hows = [_HOW[role] for role in _HOW if role in roles]
    return f"that is for {', or for '.join(hows)}" if hows else ""
