"""Looks for configured hardware, on their way from who asks to a node and back. Pure.

House rules: every request that was taken on is answered once: by its node, when that node is lost, or when its time is
over. The agent is told when nobody waits any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlinf_actors.head.commands import Answer, Emit, Notify, Refuse, Refused
from rlinf_actors.head.nodes import NodeTable
from rlinf_actors.head.records import Node
from rlinf_actors.wire.agents import HardwareFound, LookForHardware, StopLooking
from rlinf_actors.wire.clients import Enumerated, EnumerateHardware
from rlinf_actors.wire.values import HardwareQuestion

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


class HardwareLooks:
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
            Refused: the node is not there.
        """
        node = self._nodes.get(asked.node_id)
        if node is None or not node.usable:
            state = "is not there (any more)" if node is None else f"({node.name}) is {node.condition}"
            raise Refused("node_lost", f"node {asked.node_id}, asked for its {asked.question.type}, {state}")
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
