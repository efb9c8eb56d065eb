"""What agents and clients tell the head, and who else is to know. Pure; what is not expected is counted and dropped."""

from __future__ import annotations

from collections.abc import Callable

from rlinf_actors.errors import ProtocolError
from rlinf_actors.head import clipped
from rlinf_actors.head.clients import given_up
from rlinf_actors.head.commands import Notify, Told
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.tables import Tables
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.agents import (
    HardwareFound,
    LogCredit,
    LogLines,
    ProcessGone,
    RefusalReport,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.bounds import printable
from rlinf_actors.wire.clients import Handles, WatchClients
from rlinf_actors.wire.messages import Body
from rlinf_actors.wire.session import HELLO_AGAIN, Beat, Goodbye


class Notices:
    """Takes notices.

    Args:
        tables: of the head.

    Attributes:
        unexpected: so many did not fit what the head knows.
    """

    def __init__(self, tables: Tables) -> None:
        self.unexpected = 0
        self._tables = tables

    def take(self, event: Told) -> None:
        """A peer said something; one that is not known is asked to say hello."""
        tables = self._tables
        peer, body = event.peer, event.body
        node, client = tables.nodes.of_peer(peer), tables.clients.of_peer(peer)
        if node is not None:
            tables.nodes.heard(peer, tables.now)
            self._agent_told(node, body)
        elif client is not None:
            tables.clients.heard(peer, tables.now)
            self._client_told(client, body)
        elif isinstance(body, Beat) and (reason := tables.clients.ended(body.incarnation)) is not None:
            tables.emit(Notify(peer, given_up(reason)))
        elif not isinstance(body, Goodbye):
            tables.emit(Notify(peer, Beat(HELLO_AGAIN)))

    def _agent_told(self, node: Node, body: Body) -> None:
        tables = self._tables
        if isinstance(body, Beat):
            tables.emit(Notify(node.peer, Beat(tables.identity.epoch, body.at)))
            tables.groups.remind(node)
        elif isinstance(body, WorkerReady):
            self._guard(lambda: tables.groups.ready(node, body))
        elif isinstance(body, WorkerExited):
            exit = clipped.exit_report(body.exit)
            self._guard(lambda: tables.groups.exited(node, body.id, exit, tables.now))
        elif isinstance(body, ProcessGone):
            tables.clients.process_ended(node, body.incarnation, tables.now)
        elif isinstance(body, WorkersHealth):
            tables.health.said(node, clipped.health(body), tables.wall)
        elif isinstance(body, LogLines):
            self._route_lines(node, body)
        elif isinstance(body, RefusalReport):
            tables.refusals.told(node, body, tables.now)
        elif isinstance(body, HardwareFound):
            tables.looks.found(node, body)
        elif isinstance(body, Goodbye):
            tables.nodes.left(node, printable(body.reason), tables.now)
        else:
            self.unexpected += 1

    def _client_told(self, client: Client, body: Body) -> None:
        tables = self._tables
        if isinstance(body, Beat):
            client.answered = max(client.answered, min(body.word, tables.now))
            tables.emit(Notify(client.peer, Beat(tables.identity.epoch, word=tables.now)))
        elif isinstance(body, LogCredit):
            for node in tables.nodes.alive():
                if node.log_name == body.node:
                    tables.emit(Notify(node.peer, body))
        elif isinstance(body, WatchClients):
            tables.clients.subscribe(client, body.incarnations, tables.now)
        elif isinstance(body, Handles):
            tables.reconciler.handles(client, body)
        elif isinstance(body, Goodbye):
            tables.clients.gone(client, printable(body.reason) or "it said goodbye")
        else:
            self.unexpected += 1

    def _route_lines(self, node: Node, lines: LogLines) -> None:
        """To the job's driver; without one they are dropped, and more may come (they stay in the files). A node with a
        key writes to the terminals of those alone whose workers it has, or had.
        """
        tables = self._tables
        node.log_name = lines.node
        driver = tables.clients.driver_of(lines.owner)
        if driver is not None and (node.member == LOCAL or lines.owner in node.jobs):
            tables.emit(Notify(driver.peer, lines))
        else:
            tables.emit(Notify(node.peer, LogCredit(lines.owner, lines.node, lines.cost)))

    def _guard(self, act: Callable[[], None]) -> None:
        """A report that does not fit the state is a fault of that agent; it must not end the head."""
        try:
            act()
        except ProtocolError:
            self.unexpected += 1
