"""Clients of which the head knows only from others, and reports of agentds that a client's process has ended. Pure.

House rule: an agentd's report alone does not end a client. The kernel closes the connections of a process before
anybody can see its end. So the head verifies a reported death on the client's own connection: if that is closed, the
client has ended, else the client lives by its heartbeats. Every agentd on a client's host watches the client, so that
one faulty agentd cannot hide its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.head.commands import Notify
from rlinf_actors.head.quotas import Quota
from rlinf_actors.head.records import Client, Index, Node
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import Unwatch, Watch

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

SOON_S = 4.0
"""Seconds within which a living client reconnects to a restarted head; a client tries at least every 3 s."""
PING = ""
"""The `incarnation` of a Beat that the receiver ignores. The head sends it to learn whether the peer is connected."""
FIRST_TRY_S = 0.05
"""Seconds between the first two checks of the connection of a client that an agentd reported dead; then doubled.

The first check may come before the socket reports the end of the connection.
"""
LATE_S = 2.0
"""Seconds after the report of a client's death in which a message that the client has sent before may be handled."""


class ExpectedClient(msgspec.Struct, eq=False):
    """A client that has sent no hello to this head yet, and whose hello the head awaits.

    The head knows the client because an agentd has reported workers that it owns, or its process's end, or because
    another client has subscribed to its end.

    Attributes:
        named_by: the member that named the client.
        until: when the client counts as ended, unless an agentd watches its process; monotonic seconds.
        reported_dead: True if an agentd reported the end of its process.
    """

    incarnation: str
    named_by: Member
    until: float
    reported_dead: bool = False
    timer: HeapTimer | None = None


class ExpectedClients:
    """The expected clients. Calls `ClientTable.never_came` for each client that sends no hello in time."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._expected: dict[str, ExpectedClient] = {}
        self._named_by = Quota("expected clients")
        self._watched: dict[str, set[str]] = {}  # incarnation to the nodes whose agentds watch its process
        self._watched_on: Index[str] = Index()  # the same by node

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._expected

    def may_name(self, member: Member) -> bool:
        """True if this member may name one more expected client within its quota."""
        return not self._named_by.is_full(str(member))

    def add(self, incarnation: str, by: Member) -> None:
        """Begin to wait `Timing.patience_s` for the hello of this client, which the member *by* has named.

        If the client is expected already, nothing changes.
        """
        if incarnation not in self._expected:
            expected = ExpectedClient(incarnation, by, self._head.now + self._head.timing.patience_s)
            self._expected[incarnation] = expected
            self._named_by.take(str(by))
            self._arm(expected)

    def has_come(self, incarnation: str) -> None:
        self._remove(incarnation)
        for node_id in self._watched.pop(incarnation, ()):
            self._watched_on.discard(node_id, incarnation)

    def watched_on(self, node_id: str, incarnation: str) -> None:
        self._watched.setdefault(incarnation, set()).add(node_id)
        self._watched_on.add(node_id, incarnation, incarnation)

    def reported_dead(self, node_id: str, incarnation: str) -> None:
        """Handle the report of this node's agentd that the process of an expected client has ended.

        The client counts as ended if it sends no hello within SOON_S and no other agentd watches its process.
        """
        if incarnation in self._watched:
            self._unwatch(incarnation, node_id)
        expected = self._expected.get(incarnation)
        if expected is not None:
            expected.until = min(expected.until, self._head.now + SOON_S)
            expected.reported_dead = True
            self._arm(expected)

    def node_gone(self, node_id: str, heard: float) -> None:
        """Stop counting this node's agentd, which was last heard at *heard*, as a watcher of expected clients.

        If no other agentd watches a client, the client gets at least one lease, counted from *heard*, to send its
        hello.
        """
        for incarnation in self._watched_on.of(node_id):
            expected = self._expected.get(incarnation)
            if self._unwatch(incarnation, node_id) and expected is not None:
                expected.until = max(expected.until, heard + self._head.timing.lease_s)
                self._arm(expected)

    def stalled(self, seconds: float) -> None:
        for expected in self._expected.values():
            expected.until += seconds

    def _arm(self, expected: ExpectedClient) -> None:
        self._head.timers.cancel(expected.timer)
        expected.timer = None
        if expected.incarnation not in self._watched:
            expected.timer = self._head.timers.at(expected.until, lambda: self._time_passed(expected))

    def _time_passed(self, expected: ExpectedClient) -> None:
        if self._head.now < expected.until or expected.incarnation in self._watched:
            self._arm(expected)  # the head stalled, or an agentd watches the process by now
        else:
            self._remove(expected.incarnation)
            self._head.clients.never_came(expected)

    def _remove(self, incarnation: str) -> None:
        expected = self._expected.pop(incarnation, None)
        if expected is not None:
            self._head.timers.cancel(expected.timer)
            self._named_by.free(str(expected.named_by))

    def _unwatch(self, incarnation: str, node_id: str) -> bool:
        """Remove this node from the watchers of a client; return True if no agentd watches the client now."""
        nodes = self._watched[incarnation]
        nodes.discard(node_id)
        self._watched_on.discard(node_id, incarnation)
        if not nodes:
            del self._watched[incarnation]
        return not nodes


class ProcessWatches:
    """Asks agentds to watch the processes of clients."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._on_node: Index[Client] = Index()

    def ask(self, client: Client, node: Node) -> None:
        """If the client and *node* are on one host, ask the node's agentd, once, to watch the client's process."""
        if client.pid_start and node.report.host == client.host and node.id not in client.watched_on:
            client.watched_on[node.id] = node.peer
            self._on_node.add(node.id, client.incarnation, client)
            self._head.emit(Notify(node.peer, Watch(client.incarnation, client.pid, client.pid_start)))

    def end(self, client: Client) -> None:
        """Ask all watching agentds to stop watching a client that has ended."""
        for node_id, peer in client.watched_on.items():
            self._on_node.discard(node_id, client.incarnation)
            self._head.emit(Notify(peer, Unwatch(client.incarnation)))

    def reported_dead(self, node: Node, client: Client) -> bool:
        """Handle a report of *node*'s agentd that the client's process has ended.

        Returns:
            False if that agentd was not asked to watch this client; its report is then ignored.
        """
        self._on_node.discard(node.id, client.incarnation)
        return client.watched_on.pop(node.id, None) is not None

    def drop_node(self, node_id: str) -> list[Client]:
        """Remove the agentd of this node as a watcher of all clients; return the clients that it watched."""
        clients = self._on_node.of(node_id)
        for client in clients:
            self._on_node.discard(node_id, client.incarnation)
            del client.watched_on[node_id]
        return clients
