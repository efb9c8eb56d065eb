"""Nodes that are being drained: no new workers start there, what runs goes on, and its owners are told. Pure.

A drain belongs to the node, not to its agentd: it stays while the node is away, until somebody lifts it.

Looks for configured hardware, on their way from who asks to a node and back. Pure.

House rules: every request that was taken on is answered once: by its node, when that node is lost, or when its time is
over. The agent is told when nobody waits any more.

Workers that do not answer, or are in one call for long: shown and told, never killed. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import (
    Answer,
    Emit,
    NodeDrained,
    NodeUndrained,
    Notify,
    Persist,
    Refusal,
    Refuse,
)
from rlinf_actors.head.event_log import of_node, of_worker
from rlinf_actors.head.group_table import GroupTable
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.records import Node, WorkerRecord
from rlinf_actors.wire.agent_messages import HardwareFound, LookForHardware, StopLooking, WorkersHealth
from rlinf_actors.wire.client_messages import Drained, DrainNode, Enumerated, EnumerateHardware, Warn
from rlinf_actors.wire.values import HardwareQuestion, WorkerHealth, WorkerPulse

MAX_DRAINED = 4096
"""Also those that never come back: they are kept, in the head's file too, until somebody undoes it."""
NOT_KEPT = "the head could not write that to its disk: a restarted one will not know it; see `rlinf-actors status`"


class DrainTable:
    """Who drains which node, and which are empty by now.

    Args:
        emit: takes commands.
        nodes, clients, groups: the other tables.
    """

    def __init__(self, emit: Emit, nodes: NodeTable, clients: ClientTable, groups: GroupTable) -> None:
        self._emit = emit
        self._nodes = nodes
        self._clients = clients
        self._groups = groups
        self._said: set[str] = set()
        self._empty: set[str] = set()
        self._look = True

    def ask(self, peer: bytes, id: int, asked: DrainNode, now: float) -> None:
        """Begin to drain a node, for another reason too, or end it, at once. Answered when that is durable.

        Raises:
            Refusal: there is no such node, or it is not being drained.
        """
        self.changed()
        node = self._nodes.known(asked.node_id)
        why_not = f"node {asked.node_id!r} is not known to this head"
        if asked.undo:
            if asked.node_id not in self._nodes.drained:
                raise Refusal("usage", why_not if node is None else f"node {node.name} is not being drained")
            self._undrain(asked, node, now)
        elif node is None:
            raise Refusal("usage", why_not)
        elif asked.node_id not in self._nodes.drained and len(self._nodes.drained) >= MAX_DRAINED:
            raise Refusal("usage", f"{MAX_DRAINED} nodes are being drained: undo some of them (`rlinf-actors nodes`)")
        else:
            self._drain(asked, node, now)
        change = (
            NodeUndrained(asked.node_id)
            if asked.undo
            else NodeDrained(asked.node_id, self._nodes.drained[asked.node_id])
        )
        state = None if node is None else node.state(self._nodes.rank(node), now)
        self._emit(Persist(change, Answer(peer, id, Drained(state)), Answer(peer, id, Drained(state, NOT_KEPT))))

    def _drain(self, asked: DrainNode, node: Node, now: float) -> None:
        why = f"{asked.reason or 'no reason was given'} (by {asked.by})"
        self._nodes.drain(node.id, why, now)
        self._empty.discard(node.id)
        self._tell(node)
        for group, workers in self._groups.on_node(node.id):
            owner = self._clients.get(group.owner)
            ranks = ", ".join(str(worker.spec.rank) for worker in workers)
            if owner is not None:
                text = f"node {node.name} is being drained: {why}. Group {group.name!r} (ranks {ranks} there) goes on "
                text += "until you shut it down; nothing new starts there"
                self._emit(Notify(owner.peer, Warn(text)))
        self._groups.retry_waiting()  # what waits for a robot of that node is refused now

    def _undrain(self, asked: DrainNode, node: Node | None, now: float) -> None:
        self._nodes.undrain(asked.node_id, now)
        self._empty.discard(asked.node_id)
        self._said.discard(asked.node_id)
        if node is not None:
            self._emit(of_node("node_undrained", node, f"takes new workers again, says {asked.by}"))

    def node_back(self, node: Node) -> None:
        """An agent said hello: the log of this head must tell what came before it."""
        self.changed()
        if node.draining and node.id not in self._said:
            self._tell(node)

    def _tell(self, node: Node) -> None:
        self._said.add(node.id)
        self._emit(of_node("node_draining", node, f"is being drained: {node.draining}"))

    def changed(self) -> None:
        """A worker has ended, or a node is drained, or back: something may be left of none now."""
        self._look = True

    def flush(self) -> None:
        """Say of which nodes nothing is left."""
        look, self._look = self._look, False
        for node in self._nodes.alive() if look and self._nodes.drained else ():
            if node.draining and node.id not in self._empty and not any(self._groups.on_node(node.id)):
                self._empty.add(node.id)
                self._emit(of_node("node_drained", node, "is drained: nothing runs there any more"))


SPARE_S = 5.0
"""Seconds on top of what the look itself may take: for the way there and back, and to end a process that hangs."""
MAX_LIMIT_S = 600.0
"""No look takes longer, whatever its asker says."""


@dataclass(frozen=True)
class _Look:
    peer: bytes
    id: int
    node: Node
    question: HardwareQuestion
    since: float
    deadline: float


class HardwareQueries:
    """All looks that are under way.

    Args:
        epoch: of this head; a late answer to an earlier head's look must not pass for one of ours.
        emit: takes commands.
        nodes: who is there.
    """

    def __init__(self, epoch: str, emit: Emit, nodes: NodeTable) -> None:
        self._epoch = epoch
        self._emit = emit
        self._nodes = nodes
        self._number = 0
        self._looks: dict[str, _Look] = {}

    def ask(self, peer: bytes, id: int, asked: EnumerateHardware, now: float) -> None:
        """Send a node a look.

        Raises:
            Refusal: the node is not there.
        """
        node = self._nodes.get(asked.node_id)
        if node is None or not node.usable:
            state = "is not there (any more)" if node is None else f"({node.name}) is {node.condition}"
            raise Refusal("node_lost", f"node {asked.node_id}, asked for its {asked.question.type}, {state}")
        self._number += 1
        name = f"{self._epoch}-{self._number}"
        deadline = now + min(asked.question.limit_s, MAX_LIMIT_S) + SPARE_S
        self._looks[name] = _Look(peer, id, node, asked.question, now, deadline)
        self._emit(Notify(node.peer, LookForHardware(name, asked.question)))

    def found(self, node: Node, said: HardwareFound) -> None:
        """A node has answered."""
        look = self._looks.get(said.id)
        if look is not None and look.node.incarnation == node.incarnation:
            del self._looks[said.id]
            self._emit(Answer(look.peer, look.id, Enumerated(said.answer)))

    def node_back(self, node: Node) -> None:
        """A node has a new connection: what was on its way over the one before may be lost, so it is sent again."""
        for name, look in self._looks.items():
            if look.node.incarnation == node.incarnation:
                self._emit(Notify(node.peer, LookForHardware(name, look.question)))

    def node_lost(self, node: Node, reason: str) -> None:
        """It will not answer any more."""
        for name, look in list(self._looks.items()):
            if look.node.incarnation == node.incarnation:
                del self._looks[name]
                text = f"node {node.name} was lost while it looked for its {look.question.type}: {reason}"
                self._emit(Refuse(look.peer, look.id, "node_lost", text))

    def forget(self, peer: bytes) -> None:
        """Who asked has ended."""
        for name, look in list(self._looks.items()):
            if look.peer == peer:
                self._drop(name)

    def tick(self, now: float) -> None:
        """Give up on what takes too long."""
        for name, look in list(self._looks.items()):
            if now >= look.deadline:
                self._drop(name)
                waited = f"{now - look.since:.0f} s"
                text = f"node {look.node.name} gave no answer in {waited} when asked for its {look.question.type}"
                self._emit(Refuse(look.peer, look.id, "timeout", text))

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        return min((look.deadline for look in self._looks.values()), default=math.inf)

    def _drop(self, name: str) -> None:
        look = self._looks.pop(name)
        node = self._nodes.get(look.node.id)  # it may have a new connection
        if node is not None and node.incarnation == look.node.incarnation:
            self._emit(Notify(node.peer, StopLooking(name)))


class WorkerHealthLog:
    """Keeps what agents say of their workers beside the workers' life cycle.

    Args:
        emit: takes commands.
        groups: the workers.
    """

    def __init__(self, emit: Emit, groups: GroupTable) -> None:
        self._emit = emit
        self._groups = groups

    def said(self, node: Node, body: WorkersHealth, wall: float) -> None:
        """An agent has seen changes; *wall* is the time in seconds since the epoch."""
        for one in body.workers:
            worker = self._groups.worker_on(node, one.id)
            if worker is not None:
                self._note(node, worker, one, wall)
                self._groups.changed(worker)

    def _note(self, node: Node, worker: WorkerRecord, said: WorkerHealth, wall: float) -> None:
        before, name = worker.pulse, node.report.hostname
        notable = said.unresponsive or said.method
        pulse = WorkerPulse(said.unresponsive, said.method, wall - said.for_s, said.waiting) if notable else None
        worker.pulse = pulse
        was = before.unresponsive if before is not None else ""
        if said.unresponsive and not was:
            text = f"is unresponsive: {said.unresponsive}, for {said.for_s:.0f} s now; it is not killed for that"
            self._emit(of_worker("worker_unresponsive", worker, name, text))
        elif was and not said.unresponsive and before is not None:
            text = f"answers again after {wall - before.since:.0f} s"
            self._emit(of_worker("worker_responsive", worker, name, text))
