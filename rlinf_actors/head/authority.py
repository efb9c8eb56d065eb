"""Access control: checks that a member may send a message, before another part of the head reads the message. Pure.

There are two checks. The role of the member must be allowed to send messages of this class (security.members). And the
node, role, job and session that the message names must be the member's own. `LOCAL` members, which have no key, may
send everything; but after a hello as a worker of a job, a local connection has only the rights of that worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlinf_actors.head.commands import Message, Refused
from rlinf_actors.head.records import Client
from rlinf_actors.security.members import LOCAL, VERBS, Member, may
from rlinf_actors.wire.agent_messages import AgentHello, ClientHello, FlushLogs, LogCredit
from rlinf_actors.wire.check_values import CheckQuestion
from rlinf_actors.wire.client_messages import DrainNode, EndGroup, EStop, KillWorker
from rlinf_actors.wire.debug_values import DebugQuestion
from rlinf_actors.wire.figure_values import FigureQuestion
from rlinf_actors.wire.log_values import LogQuestion
from rlinf_actors.wire.node_questions import AskNode, NodeQuestion, verb
from rlinf_actors.wire.stack_values import StackQuestion
from rlinf_actors.wire.trace_values import TraceQuestion, TraceSwitch

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

KIND = "authentication"

_HOW = {
    "head": "whoever has the head's own key: on the head's machine, as the user who can read head.key (in another "
    "directory than the usual one: RLINF_ACTORS_KEYS=DIR)",
    "driver": "a driver's key: `rlinf-actors keys enroll --driver NAME` on the head's machine, `rlinf-actors keys join "
    "TOKEN` here",
    "agent": "an agent, of its own node: `rlinf-actors keys enroll NODE` on the head's machine",
    "worker": "a worker, within its job",
    "viewer": "a viewer's key, which changes nothing: `rlinf-actors keys enroll --viewer NAME` on the head's machine",
}
"""Role -> text for an error message that says which processes have the role, and how to get it."""


_DOES: Mapping[type, str] = {
    TraceQuestion: "read traces of",
    TraceSwitch: "trace",
    LogQuestion: "read logs of",
    StackQuestion: "read stacks of",
    FigureQuestion: "read figures of",
    DebugQuestion: "debug workers of",
}
"""What the sender of a question does to a job, which must be its own."""


class Authority:
    def __init__(self, head: Coordinator) -> None:
        self._head = head

    def check(self, event: Message) -> None:
        """Raise Refused if the sender may not send this message, because of its role or of what the message names."""
        head, member, body, speaker = self._head, event.member, event.body, self.speaker(event)
        if not may(speaker, verb(body)):
            raise Refused(KIND, f"{speaker} may not say {verb(body)}", advice=who_may(verb(body)))
        if isinstance(body, EStop) and body.release and speaker.role not in ("local", "driver", "head"):
            raise Refused(KIND, f"{speaker} may not release an emergency stop: a driver may, or the head's machine")
        session = head.nodes.of_peer(event.peer) or head.clients.of_peer(event.peer)
        if session is not None and session.member is not member and not session.member.is_same(member):
            raise Refused(KIND, f"{member} speaks as {session.member}: a session belongs to the key that began it")
        if member.role == "local":
            return
        if isinstance(body, AgentHello):
            self._agent(member, body)
        elif isinstance(body, ClientHello):
            self._client(member, body)
        elif isinstance(body, DrainNode) and member.role == "agent":
            node = head.nodes.known(body.node_id)
            if node is None or not node.member.is_same(member):
                raise Refused(KIND, f"{member} may drain its own node only, and {body.node_id!r} is not")
        elif isinstance(body, EndGroup) and not self.sees(event)(body.namespace):
            raise Refused(KIND, f"{member} may end groups of its own jobs only, and job {body.namespace!r} is not one")
        elif isinstance(body, KillWorker) and not self.sees(event)(body.namespace):
            text = f"{member} may kill workers of its own jobs only, and job {body.namespace!r} is not one"
            raise Refused(KIND, text)
        elif isinstance(body, AskNode):
            self._question(event, body.question)
        elif (
            isinstance(body, (LogCredit, FlushLogs)) and isinstance(session, Client) and session.namespace != body.owner
        ):
            raise Refused(KIND, f"{member} has nothing to do with the output of job {body.owner!r}")

    def _question(self, event: Message, question: NodeQuestion) -> None:
        member = event.member
        if isinstance(question, CheckQuestion):
            if question.path is not None and member.role == "viewer":
                raise Refused(KIND, f"{member} may read facts of nodes only: the test of a path loads the network")
            if question.log and member.role != "head":
                raise Refused(KIND, f"{member} may not read the logs of agentds", advice=f"that is for {_HOW['head']}")
            return
        job = question.namespace
        if member.role == "driver" if job is None else not self.sees(event)(job):
            what = "any job" if job is None else f"job {job!r}"
            raise Refused(KIND, f"{member} may {_DOES[type(question)]} its own jobs only, and {what} is not")

    def speaker(self, event: Message) -> Member:
        """Return the member whose rights apply to a message: the sender, except for a worker without a key.

        Such a worker runs as the head's own user, and would have all rights. It has only the rights of a worker of its
        job, so that a fault in it affects no other job. This does not stop a hostile local process: it can open another
        connection.
        """
        session = self._head.clients.of_peer(event.peer) if event.member.role == "local" else None
        if session is not None and session.role == "worker":
            return Member("worker", session.namespace, session.namespace)
        return event.member

    def sees(self, event: Message) -> Callable[[str], bool]:
        """Return a function that is True for a namespace whose groups, clients and events the sender may see."""
        member = self.speaker(event)
        if member.role in ("local", "head", "viewer"):
            return lambda namespace: True
        if member.role == "worker":
            return lambda namespace: namespace == member.job
        if member.role == "driver":
            return lambda namespace: self._head.jobs.owner_of(namespace) == member.name
        return lambda namespace: False

    def _agent(self, member: Member, hello: AgentHello) -> None:
        report = hello.node
        if hello.is_head:
            raise Refused(KIND, f"{member} says that the head runs in its process; that agent needs no key")
        if member.name not in (report.hostname, report.node_id):
            raise Refused(
                KIND,
                f"{member} calls its node {report.hostname!r} (id {report.node_id}): a node has the name of its key "
                "([node] name), or its id ([node] id, --node-id)",
            )
        limits = self._head.keys.limits_of(member.key)
        if limits.node_id not in ("", report.node_id):
            raise Refused(
                KIND,
                f"the key of {member} is for node id {limits.node_id}, and this agentd says that its node id is "
                f"{report.node_id}: leave out --node-id, or enroll this node too (`rlinf-actors keys enroll NODE`)",
            )
        if limits.user not in ("", hello.user):
            raise Refused(
                KIND,
                f"the key of {member} is not for agentds of user {hello.user!r}: enroll one for that user "
                f"(`rlinf-actors keys enroll {member.name} --user {hello.user or 'USER'}`)",
            )
        known = self._head.nodes.known(report.node_id)
        if known is None:
            self._head.nodes.check_member(member)
            return
        if known.member.is_same(member):
            return
        if (known.member.role, known.member.name, known.member.user) == ("agent", member.name, "") and not known.alive:
            return  # it was here before its key was limited to a user
        if known.member == LOCAL and not known.is_head and not known.alive:
            return  # it was here before this cluster had keys
        raise Refused(
            KIND, f"{member} says that it is node {known.name} (id {known.id}), which belongs to {known.member}"
        )

    def _client(self, member: Member, hello: ClientHello) -> None:
        if hello.role != member.role:
            raise Refused(KIND, f"{member} says that it is a {hello.role}")
        if member.role == "worker" and hello.namespace != member.job:
            raise Refused(KIND, f"{member} says that it belongs to job {hello.namespace!r}")
        known = self._head.clients.get(hello.incarnation)
        if known is not None and not known.member.is_same(member):
            raise Refused(KIND, f"{member} says that it is {known}, which is {known.member}")
        if member.role == "driver":
            if known is None:
                self._head.clients.check_driver(member)
            why_not = self._head.jobs.may_open(hello.namespace, member.name, hello.token)
            if why_not:
                raise Refused(KIND, f"{member} may not join job {hello.namespace!r}: {why_not}")


def who_may(verb: str) -> str:
    """Return text for people that says which roles may send messages of the class named *verb*; "" if no role may.

    The text also says how to get these roles.
    """
    roles = VERBS.get(verb, frozenset()) - {"enroll"}
    hows = [_HOW[role] for role in _HOW if role in roles]
    return f"that is for {', or for '.join(hows)}" if hows else ""
