"""Routes of the workers' output: from the nodes to the drivers, and the drivers' credit back to the nodes. Pure.

A node may send a limited amount of output for each job before it gets credit for more, so a slow terminal slows only
its own job. The head counts what each driver has received and has given no credit for, because a driver may end first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head.commands import Notify
from rlinf_actors.head.records import Client, Index, Node
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.agent_messages import Flushing, FlushLogs, LogCredit, LogLines

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class OutputRoutes:
    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._named: Index[str] = Index()  # ids of nodes by their names in LogLines
        self._lenders: Index[str] = Index()  # ids of nodes by the driver that owes them credit

    def lines(self, node: Node, lines: LogLines) -> None:
        """Forward output lines of workers to the first driver of their job.

        Without a driver the lines are dropped (the log files keep them), and the node gets credit at once, so it
        can send more. The lines of an agentd with a key are also dropped if the job never had workers on its node.
        """
        if node.log_name != lines.node:
            self._named.discard(node.log_name, node.id)
            node.log_name = lines.node
            self._named.add(node.log_name, node.id, node.id)
        driver = self._head.clients.driver_of(lines.owner)
        if driver is not None and (node.member == LOCAL or lines.owner in node.jobs):
            node.uncredited[driver.incarnation] += lines.cost
            self._lenders.add(driver.incarnation, node.id, node.id)
            self._head.emit(Notify(driver.peer, lines))
        else:
            self._head.emit(Notify(node.peer, LogCredit(lines.owner, lines.node, lines.cost)))

    def credit(self, client: Client, credit: LogCredit) -> None:
        """Pass a driver's credit for output lines on to the node that sent the lines.

        If several nodes have the host name in the credit, they share the credit, and the node with the most lines
        without credit comes first.
        """
        driver, left = client.incarnation, credit.chars
        nodes = [node for node in map(self._head.nodes.get, self._named.of(credit.node)) if node is not None]
        for node in sorted(nodes, key=lambda node: node.uncredited[driver], reverse=True):
            chars = min(left, node.uncredited[driver])
            if chars > 0:
                left -= chars
                node.uncredited[driver] -= chars
                self._head.emit(Notify(node.peer, replace(credit, chars=chars)))

    def driver_gone(self, driver: Client) -> None:
        """Give nodes the credit for the lines that went to a driver which has ended, so that they can send more.

        Another driver of the job may then receive the next lines.
        """
        for node in map(self._head.nodes.known, self._lenders.pop(driver.incarnation)):
            chars = node.uncredited.pop(driver.incarnation, 0) if node is not None else 0
            if node is not None and chars and node.alive:
                self._head.emit(Notify(node.peer, LogCredit(driver.namespace, node.log_name, chars)))

    def flush(self, client: Client, asked: FlushLogs) -> Flushing:
        """Ask the nodes that have, or had, workers of the client's job for the rest of their output.

        Returns:
            The number of nodes that were asked; 0 if the client is not the job's first driver, because only that driver
            receives output.
        """
        is_first = self._head.clients.driver_of(client.namespace) is client
        nodes = self._head.nodes.of_job(client.namespace) if is_first else []
        for node in nodes:
            self._head.emit(Notify(node.peer, FlushLogs(client.namespace, asked.wait_s)))
        return Flushing(len(nodes))

    def forget_node(self, node: Node) -> None:
        """Drop what is kept of a node whose record is dropped."""
        self._named.discard(node.log_name, node.id)
        for driver in node.uncredited:
            self._lenders.discard(driver, node.id)
