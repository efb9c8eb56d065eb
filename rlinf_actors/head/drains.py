"""Nodes that are being drained: no new workers start there, what runs goes on, and its owners are told. Pure.

A drain belongs to the node, not to its agentd: it stays while the node is away, until somebody lifts it.
"""

from __future__ import annotations

from rlinf_actors.head.clients import ClientTable
from rlinf_actors.head.commands import Answer, Emit, Keep, Notify, Refused
from rlinf_actors.head.groups import GroupTable
from rlinf_actors.head.happenings import of_node
from rlinf_actors.head.nodes import NodeTable
from rlinf_actors.head.records import Node
from rlinf_actors.head.remembered import Drain, Undrain
from rlinf_actors.wire.clients import Warn
from rlinf_actors.wire.operators import Drained, DrainNode

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
            Refused: there is no such node, or it is not being drained.
        """
        self.changed()
        node = self._nodes.known(asked.node_id)
        why_not = f"node {asked.node_id!r} is not known to this head"
        if asked.undo:
            if asked.node_id not in self._nodes.drained:
                raise Refused("usage", why_not if node is None else f"node {node.name} is not being drained")
            self._undrain(asked, node, now)
        elif node is None:
            raise Refused("usage", why_not)
        elif asked.node_id not in self._nodes.drained and len(self._nodes.drained) >= MAX_DRAINED:
            raise Refused("usage", f"{MAX_DRAINED} nodes are being drained: undo some of them (`rlinf-actors nodes`)")
        else:
            self._drain(asked, node, now)
        change = Undrain(asked.node_id) if asked.undo else Drain(asked.node_id, self._nodes.drained[asked.node_id])
        state = None if node is None else node.state(self._nodes.rank(node), now)
        self._emit(Keep(change, Answer(peer, id, Drained(state)), Answer(peer, id, Drained(state, NOT_KEPT))))

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
