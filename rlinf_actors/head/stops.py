"""Orders to agents that workers stop. Pure.

A message may be lost with its connection. An agent that says hello again is told again; robots do not wait for that:
their agents are reminded at each of their beats.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_actors.head.commands import Emit, Notify
from rlinf_actors.head.nodes import NodeTable
from rlinf_actors.head.records import Node, Worker
from rlinf_actors.wire.agents import StopWorkers


class Stops:
    """What was ordered.

    Args:
        emit: takes commands.
        nodes: whose agents are told.
    """

    def __init__(self, emit: Emit, nodes: NodeTable) -> None:
        self._emit = emit
        self._nodes = nodes
        self._robots: dict[str, dict[str, StopWorkers]] = {}

    def send(self, workers: Sequence[Worker], grace_s: float, reason: str) -> None:
        """Have these workers stopped.

        Args:
            workers: of any nodes.
            grace_s: seconds between SIGTERM and SIGKILL.
            reason: where their owner does not want it.
        """
        of_node: dict[str, list[Worker]] = {}
        for worker in workers:
            of_node.setdefault(worker.node_id, []).append(worker)
        for node_id, there in of_node.items():
            for worker in there:
                if worker.spec.claims and not worker.gone:
                    self._robots.setdefault(node_id, {})[worker.id] = StopWorkers([worker.id], grace_s, reason)
            node = self._nodes.get(node_id)
            if node is not None:
                self._emit(Notify(node.peer, StopWorkers([worker.id for worker in there], grace_s, reason)))

    def ended(self, worker: Worker) -> None:
        """A worker is gone. Twice is fine."""
        robots = self._robots.get(worker.node_id)
        if robots is not None and robots.pop(worker.id, None) is not None and not robots:
            del self._robots[worker.node_id]

    def remind(self, node: Node) -> None:
        """An agent that is there is told again which robot workers are to stop."""
        for stop in self._robots.get(node.id, {}).values():
            self._emit(Notify(node.peer, stop))
