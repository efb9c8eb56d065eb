"""Drains of nodes, queries to nodes, and the health reports on workers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rlinf_actors.head import commands, quotas, validation
from rlinf_actors.head.event_log import of_node, of_worker
from rlinf_actors.head.owners import first_of
from rlinf_actors.head.records import Client, Index, Node, WorkerRecord
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.plurals import counted
from rlinf_actors.wire.agent_messages import (
    HardwareFound,
    LookForHardware,
    OutputLost,
    StopLooking,
    WorkersHealth,
)
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion, PathTest
from rlinf_actors.wire.client_messages import (
    Drained,
    DrainNode,
    Enumerated,
    EnumerateHardware,
    Warn,
)
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.debug_values import MAX_DEBUG_WAIT_S, DebugAnswer, DebugQuestion
from rlinf_actors.wire.figure_values import FigureQuestion, NodeFigures
from rlinf_actors.wire.launch_rules import Launcher
from rlinf_actors.wire.log_values import MAX_LOG_WAIT_S, LogQuestion, LogSlice
from rlinf_actors.wire.node_questions import AgentAnswered, AskAgent, NodeAnswered, NodeQuestion
from rlinf_actors.wire.protocol import printable
from rlinf_actors.wire.stack_values import IO_THREAD, StackAnswer, StackQuestion
from rlinf_actors.wire.trace_values import SwitchedWorkers, TraceQuestion, TraceSlice, TraceSwitch
from rlinf_actors.wire.values import HardwareAnswer, WorkerHealth, WorkerPulse

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

NOT_KEPT = "the head could not write that to its disk: a restarted one will not know it; see `rlinf-actors status`"

NAMED_RANKS = 100
"""Most ranks that a warning names."""


class DrainTable:
    """Drained nodes: no new workers start there, running workers go on, and the owners of their groups are warned.

    A drain belongs to the node, not to its agentd: it stays in force while the node is away, until a person undoes it.
    """

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._logged: set[str] = set()
        self._empty: set[str] = set()
        self._changed: set[str] = set()  # ids of drained nodes

    def ask(self, event: commands.RequestReceived, asked: DrainNode) -> None:
        """Begin or end the drain of a node, or replace the reason of its drain. Answer when the change is on disk.

        Raises:
            Refused: the node is unknown, or the request ends a drain and the node is not drained.
        """
        nodes, id = self._head.nodes, asked.node_id
        node = nodes.known(id)
        unknown = f"node {id!r} is not known to this head"
        if asked.undo:
            if id not in nodes.drained:
                raise commands.Refused("usage", unknown if node is None else f"node {node.name} is not being drained")
            self._undrain(asked, node)
        elif node is None:
            raise commands.Refused("usage", unknown)
        else:
            if id not in nodes.drained:
                drained = nodes.drained
                held = lambda: first_of(list(drained), lambda id: f"{nodes.named(id)[0]}: {drained[id]}")  # noqa: E731
                quotas.check("drains", "the head", len(drained), held)
            self._drain(asked, node)
        self.changed(id)
        change = commands.NodeUndrained(id) if asked.undo else commands.NodeDrained(id, nodes.drained[id])
        state = None if node is None else node.state(nodes.rank(node), self._head.now)
        answers = (commands.Answer(event.peer, event.id, Drained(state, warning)) for warning in ("", NOT_KEPT))
        self._head.emit(commands.Persist(change, *answers))

    def _drain(self, asked: DrainNode, node: Node) -> None:
        why = f"{asked.reason or 'no reason was given'} (by {asked.by})"
        self._head.nodes.drain(node.id, why)
        self._empty.discard(node.id)
        self._log(node)
        self._head.slices.start(self._warn_owners(node, why), speaker=self._head.speaker)
        self._head.launches.retry_waiting()  # what waits for a robot of that node is refused now

    def _warn_owners(self, node: Node, why: str) -> Sliced[None]:
        for number, (group, workers) in enumerate(self._head.groups.on_node(node.id), 1):
            owner = self._head.clients.get(group.owner)
            ranks = ", ".join(str(worker.spec.rank) for worker in workers[:NAMED_RANKS])
            ranks += f" and {counted(len(workers) - NAMED_RANKS, 'other')}" * (len(workers) > NAMED_RANKS)
            if owner is not None:
                text = f"node {node.name} is being drained: {why}. Group {group.name!r} (ranks {ranks} there) goes on "
                text += "until you shut it down; nothing new starts there"
                self._head.emit(commands.Notify(owner.peer, Warn(text)))
            if not number % PIECE:
                yield

    def _undrain(self, asked: DrainNode, node: Node | None) -> None:
        self._head.nodes.undrain(asked.node_id)
        self._empty.discard(asked.node_id)
        self._logged.discard(asked.node_id)
        if node is not None:
            self._head.emit(of_node("node_undrained", node, f"takes new workers again, says {asked.by}"))

    def node_back(self, node: Node) -> None:
        """If an earlier head began the drain of a reconnected node, add the drain to this head's event log."""
        self.changed(node.id)
        if node.draining and node.id not in self._logged:
            self._log(node)

    def _log(self, node: Node) -> None:
        self._logged.add(node.id)
        self._head.emit(of_node("node_draining", node, f"is being drained: {node.draining}"))

    def changed(self, node_id: str) -> None:
        """Note that a node, its drain or its workers have changed. If it is drained, the next flush looks at it."""
        if node_id in self._head.nodes.drained:
            self._changed.add(node_id)

    def flush(self) -> None:
        """Log each drained node that has no worker left, once for each drain."""
        changed, self._changed = self._changed, set()
        for id in sorted(changed):
            node = self._head.nodes.get(id) if id in self._head.nodes.drained else None
            if node is not None and id not in self._empty and not self._head.groups.is_used(id):
                self._empty.add(id)
                self._head.emit(of_node("node_drained", node, "is drained: nothing runs there any more"))


SPARE_S = 5.0
"""Seconds added to the time limit of a hardware query: for its two messages, and to end a process that hangs."""
MAX_LIMIT_S = 600.0
"""Longest time limit of a hardware query, in seconds, whatever its sender asks for."""


ANSWER_S = 10.0
"""Time limit of a question to a node, in seconds, in addition to what the question allows."""
OUTSIDE_S = 60.0
"""Time limit of a question for stacks that templates take from outside, in seconds."""
CHECK_S = 20.0
"""Time limit of a question for facts of a node, or for a step in the test of a path, in seconds."""


class _Kind(NamedTuple):
    """How the head treats the questions of a type: what the node is asked for, and the type of its answer.

    Attributes:
        limit_s: returns the time limit of a question in seconds.
        is_ruled: returns True if the rules of the node decide whether the sender may ask (head.admission).
    """

    title: str
    answer: type
    limit_s: Callable[[Any], float] = lambda question: ANSWER_S
    is_ruled: Callable[[Any], bool] = lambda question: True


KINDS: Mapping[type[NodeQuestion], _Kind] = {
    TraceSwitch: _Kind("traces", SwitchedWorkers),
    TraceQuestion: _Kind("traces", TraceSlice),
    StackQuestion: _Kind("stacks", StackAnswer, lambda asked: ANSWER_S if asked.level == IO_THREAD else OUTSIDE_S),
    LogQuestion: _Kind(
        "log files",
        LogSlice,
        lambda asked: ANSWER_S + min(asked.wait_s, MAX_LOG_WAIT_S),
        lambda asked: asked.namespace is not None,
    ),
    FigureQuestion: _Kind("figures", NodeFigures, is_ruled=lambda asked: False),
    CheckQuestion: _Kind("facts", CheckAnswer, lambda asked: CHECK_S),
    DebugQuestion: _Kind("debugger", DebugAnswer, lambda asked: ANSWER_S + min(asked.wait_s, MAX_DEBUG_WAIT_S)),
}
"""The questions that the head forwards. `head.authority` has checked before who asks."""


class _Query(msgspec.Struct, eq=False):
    peer: bytes
    id: int
    asked: Node | Client
    order: LookForHardware | AskAgent
    title: str  # what the node is asked for
    found: type  # of the answer
    reply: Callable[[Any], Body]  # makes the reply of the answer
    since: float
    timer: HeapTimer | None = None


class NodeQueries:
    """The questions that the head has forwarded to nodes, and those about traces also to drivers.

    Each question gets one answer: that of the node or driver, or an error if it is lost or the time limit has passed.
    """

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._number = 0
        self._queries: dict[str, _Query] = {}
        self._of_asked: Index[_Query] = Index()  # by incarnation of the node or driver
        self._of_peer: Index[_Query] = Index()

    def ask_hardware(self, event: commands.RequestReceived, asked: EnumerateHardware) -> None:
        """Ask a node to enumerate its hardware; the node's answer goes to the sender of *event*."""
        speaker = self._head.authority.speaker(event)
        self._head.admission.check_question(speaker, asked.node_id)
        by = self._head.admission.of_member(speaker) or Launcher()
        order = LookForHardware(self._name(), asked.question).asked_by(by)
        limit_s = min(asked.question.limit_s, MAX_LIMIT_S) + SPARE_S
        self._forward(event, asked.node_id, order, asked.question.type, HardwareAnswer, Enumerated, limit_s)

    def ask(self, event: commands.RequestReceived, node_id: str, question: NodeQuestion) -> None:
        """Ask a node, or a driver for its trace; the answer goes to the sender of *event*."""
        kind = KINDS[type(question)]
        if kind.is_ruled(question):
            self._head.admission.check_question(self._head.authority.speaker(event), node_id)
        if isinstance(question, CheckQuestion) and question.path is not None and question.path.step == "measure":
            self._check_far(question.path)
        order = AskAgent(self._name(), question)
        self._forward(event, node_id, order, kind.title, kind.answer, NodeAnswered, kind.limit_s(question))

    def _asked(self, id: str, order: LookForHardware | AskAgent) -> Node | Client | None:
        """Return the living node with this id, or the driver with this incarnation if *order* is about its trace."""
        about = order.question
        if isinstance(about, (TraceSwitch, TraceQuestion)):
            driver = self._head.clients.get(id)
            if driver is not None and (driver.role, driver.namespace) == ("driver", about.namespace):
                return driver
        node = self._head.nodes.get(id)
        return node if node is not None and node.alive else None

    def _check_far(self, path: PathTest) -> None:
        """Raise Refused if a node would connect to another address than one of the node at the far end."""
        far = self._head.nodes.get(path.far)
        if far is None or not far.usable:
            raise commands.Refused("node_lost", f"node {path.far}, the far end of the path, is not there (any more)")
        if path.ip not in (far.report.ip, *far.report.interfaces.values()):
            raise commands.Refused("usage", f"{path.ip!r} is no address of node {far.name}")

    def _name(self) -> str:
        self._number += 1
        # a late answer to a query of an earlier head must not count as one of ours
        return f"{self._head.identity.epoch}-{self._number}"

    def _forward(
        self,
        event: commands.RequestReceived,
        node_id: str,
        order: LookForHardware | AskAgent,
        title: str,
        found: type,
        reply: Callable[[Any], Body],
        limit_s: float,
    ) -> None:
        node, now, to = self._head.nodes.get(node_id), self._head.now, self._asked(node_id, order)
        if to is None:
            state = "is not there (any more)" if node is None else f"({node.name}) is {node.condition}"
            raise commands.Refused("node_lost", f"node {node_id}, asked for its {title}, {state}")
        query = _Query(event.peer, event.id, to, order, title, found, reply, now)
        self._queries[order.id] = query
        self._of_asked.add(to.incarnation, order.id, query)
        self._of_peer.add(event.peer, order.id, query)
        query.timer = self._head.timers.at(now + limit_s, lambda: self._time_out(order.id))
        self._head.emit(commands.Notify(to.peer, order))

    def found(self, by: Node | Client, body: HardwareFound | AgentAnswered) -> None:
        """Send the answer of a node or driver to the client that asked. Unknown queries, and answers of another type,
        are ignored.
        """
        query = self._queries.get(body.id)
        if query is not None and query.asked.incarnation == by.incarnation and type(body.answer) is query.found:
            self._remove(body.id)
            self._head.emit(commands.Answer(query.peer, query.id, query.reply(body.answer)))
            asked = query.order.question
            if isinstance(asked, DebugQuestion) and isinstance(body.answer, DebugAnswer) and isinstance(by, Node):
                self._head.breakpoints.asked(by, asked, body.answer)

    def back(self, asked: Node | Client) -> None:
        """Resend the open queries to a reconnected node or driver: its previous connection may have lost them."""
        for query in self._of_asked.of(asked.incarnation):
            self._head.emit(commands.Notify(asked.peer, query.order))

    def lost(self, asked: Node | Client, reason: str) -> None:
        """Send an error with this *reason* to each client whose query a lost node or driver will not answer."""
        for query in self._of_asked.of(asked.incarnation):
            self._remove(query.order.id)
            text = f"{_title(asked)} was lost while it looked for its {query.title}: {reason}"
            self._head.emit(commands.Refuse(query.peer, query.id, "node_lost", text))

    def forget(self, peer: bytes) -> None:
        for query in self._of_peer.of(peer):
            self._stop(query.order.id)

    def _time_out(self, name: str) -> None:
        query = self._queries[name]
        self._stop(name)
        waited = f"{self._head.now - query.since:.0f} s"
        text = f"{_title(query.asked)} gave no answer in {waited} when asked for its {query.title}"
        self._head.emit(commands.Refuse(query.peer, query.id, "timeout", text))

    def _stop(self, name: str) -> None:
        query = self._remove(name)
        if isinstance(query.asked, Client):
            return
        node = self._head.nodes.get(query.asked.id)  # it may have a new connection
        if node is not None and node.incarnation == query.asked.incarnation:
            self._head.emit(commands.Notify(node.peer, StopLooking(name)))

    def _remove(self, name: str) -> _Query:
        query = self._queries.pop(name)
        self._of_asked.discard(query.asked.incarnation, name)
        self._of_peer.discard(query.peer, name)
        self._head.timers.cancel(query.timer)
        return query


def _title(asked: Node | Client) -> str:
    return str(asked) if isinstance(asked, Client) else f"node {asked.name}"


class WorkerHealthLog:
    """Records which workers do not answer, or have been in one call for long. The head kills no worker for that."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head

    def report(self, node: Node, body: WorkersHealth) -> Sliced[None]:
        """Record the health changes that the agentd of *node* reports, and send them to clients with handles."""
        for some, more in pieces(body.workers):
            for health in some:
                worker = self._head.groups.worker_on(node, health.id)
                if worker is not None:
                    self._note(node, worker, validation.health(health))
                    self._head.groups.changed(worker)
            if more:
                yield

    def output_lost(self, node: Node, body: OutputLost) -> None:
        """Log that output of a worker is lost, or is written again."""
        worker = self._head.groups.worker_on(node, body.id)
        if worker is not None:
            name, text = self._head.nodes.named(node.id), printable(body.text)
            lost = of_worker(
                "output_lost", worker, name, f"loses output: {text}; `rlinf-actors doctor` shows the disks"
            )
            self._head.emit(lost if text else of_worker("output_written", worker, name, "has its output written again"))

    def _note(self, node: Node, worker: WorkerRecord, health: WorkerHealth) -> None:
        before, name, wall = worker.pulse, self._head.nodes.named(node.id), self._head.wall
        place, since, stop = health.breakpoint, wall - health.breakpoint_s, health.stop
        if health.unresponsive and before is not None:  # it says nothing of breakpoints meanwhile
            place, since, stop = before.breakpoint, before.breakpoint_since, before.stop
        since = since if place else 0.0
        pulse = WorkerPulse(health.unresponsive, health.method, wall - health.for_s, health.waiting, place, since, stop)
        self._head.breakpoints.changed(node, worker, before or WorkerPulse(), pulse)
        worker.pulse = pulse if health.unresponsive or health.method or place else None
        was = before.unresponsive if before is not None else ""
        if health.unresponsive and not was:
            text = f"is unresponsive: {health.unresponsive}, for {health.for_s:.0f} s now; it is not killed for that"
            self._head.emit(of_worker("worker_unresponsive", worker, name, text))
        elif was and not health.unresponsive and before is not None:
            text = f"answers again after {wall - before.since:.0f} s"
            self._head.emit(of_worker("worker_responsive", worker, name, text))
