"""Clients, that is drivers and workers: their sessions, their job membership, and how the head notices their end. Pure.

If an agent on a client's host watches the client's process (by pidfd), the client ends only when that process ends: a
driver that is stopped by SIGSTOP may be silent for any time. A worker ends when its agent reports its end. Any other
client ends when the head receives no heartbeat from it for one lease.

House rule: an agent's report alone does not end a client. The kernel closes the connections of a process before anybody
can see its end. So the head verifies a reported death on the client's own connection: if that is closed, the client has
ended, else the client lives by its heartbeats. Every agent on a client's host watches the client, so that one faulty
agent cannot hide its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlinf_actors.head.commands import CLIENT, Notify, Refused, Snapshot
from rlinf_actors.head.quotas import Quota, Tombstones, label
from rlinf_actors.head.records import Client, Index, Node
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import Beat, ClientHello, Goodbye, Unwatch, Watch
from rlinf_actors.wire.client_messages import ClientGone
from rlinf_actors.wire.protocol import agreed

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

ROLES = ("driver", "worker")
SOON_S = 4.0
"""Seconds within which a living client reconnects to a restarted head; a client tries at least every 3 s."""
PING = ""
"""The `incarnation` of a Beat that the receiver ignores. The head sends it to learn whether the peer is connected."""
FIRST_TRY_S = 0.05
"""Seconds between the first two checks of the connection of a client that an agent reported dead; doubles each time.

The first check may come before the socket reports the end of the connection.
"""
LAST_TRY_S = 1.0
"""Longest pause between two checks, in seconds. A connection that is still open then belongs to a living process."""


@dataclass(eq=False)
class ExpectedClient:
    """A client that has sent no hello to this head yet, but that a member has named.

    The client owns workers that an agent reported after a restart of the head, or another client subscribed to its end.

    Attributes:
        named_by: the member that named the client.
        until: when the client counts as ended, unless an agent watches its process; monotonic seconds.
        reported_dead: True if an agent reported the end of its process.
    """

    incarnation: str
    named_by: Member
    until: float
    reported_dead: bool = False
    timer: HeapTimer | None = None


class ExpectedClients:
    """All expected clients. Calls `ClientTable.never_came` for a client that sends no hello in time."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._expected: dict[str, ExpectedClient] = {}
        self._named_by = Quota("expected clients")
        self._watched: dict[str, set[str]] = {}  # incarnation to the nodes whose agents watch its process

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._expected

    def may_name(self, member: Member) -> bool:
        """True if this member may name one more expected client within its quota."""
        return not self._named_by.is_full(str(member))

    def add(self, incarnation: str, by: Member) -> None:
        """Expect this client, named by the member *by*, for `Timing.patience_s`; a second call has no effect."""
        if incarnation not in self._expected:
            expected = ExpectedClient(incarnation, by, self._head.now + self._head.timing.patience_s)
            self._expected[incarnation] = expected
            self._named_by.take(str(by))
            self._arm(expected)

    def has_come(self, incarnation: str) -> None:
        """Stop expecting a client that has sent its hello."""
        self._remove(incarnation)
        self._watched.pop(incarnation, None)

    def watched_on(self, node_id: str, incarnation: str) -> None:
        self._watched.setdefault(incarnation, set()).add(node_id)

    def reported_dead(self, node_id: str, incarnation: str) -> None:
        """Handle the report of this node's agent that the process of an expected client has ended.

        The client counts as ended if it sends no hello within SOON_S and no other agent watches its process.
        """
        if incarnation in self._watched:
            self._unwatch(incarnation, node_id)
        expected = self._expected.get(incarnation)
        if expected is not None:
            expected.until = min(expected.until, self._head.now + SOON_S)
            expected.reported_dead = True
            self._arm(expected)

    def node_gone(self, node_id: str, heard: float) -> None:
        """Stop counting this node's agent, which was last heard at *heard*, as a watcher of expected clients.

        A client without another watcher counts as ended one lease after *heard*, or at its `until` if that is later.
        """
        for incarnation in [i for i, nodes in self._watched.items() if node_id in nodes]:
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
            self._arm(expected)  # the head stalled, or an agent watches the process by now
        else:
            self._remove(expected.incarnation)
            self._head.clients.never_came(expected)

    def _remove(self, incarnation: str) -> None:
        expected = self._expected.pop(incarnation, None)
        if expected is not None:
            self._head.timers.cancel(expected.timer)
            self._named_by.free(str(expected.named_by))

    def _unwatch(self, incarnation: str, node_id: str) -> bool:
        """Remove this node from the watchers of a client; return True if no agent watches the client now."""
        nodes = self._watched[incarnation]
        nodes.discard(node_id)
        if not nodes:
            del self._watched[incarnation]
        return not nodes


@dataclass(eq=False)
class SuspectedDeath:
    """A client whose end an agent reported. The head checks its connection again after `pause` seconds."""

    client: Client
    pause: float = FIRST_TRY_S
    timer: HeapTimer | None = None


class ProcessWatches:
    """Asks agents to watch the processes of clients, and verifies the deaths that agents report."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._suspected: dict[bytes, SuspectedDeath] = {}
        self._on_node: Index[Client] = Index()

    def ask(self, client: Client, node: Node) -> None:
        """Ask the agent of *node* to watch the client's process if both are on one host, unless it was asked before."""
        if client.pid_start and node.report.host == client.host and node.id not in client.watchers:
            client.watchers[node.id] = node.peer
            self._on_node.add(node.id, client.incarnation, client)
            self._head.emit(Notify(node.peer, Watch(client.incarnation, client.pid, client.pid_start)))

    def end(self, client: Client) -> None:
        """Ask all watching agents to stop watching a client that has ended."""
        self.trust(client)
        for node_id, peer in client.watchers.items():
            self._on_node.discard(node_id, client.incarnation)
            self._head.emit(Notify(peer, Unwatch(client.incarnation)))

    def trust(self, client: Client) -> None:
        """Stop checking the connection of a client that was reported dead: it has said hello again, or has ended."""
        suspected = self._suspected.pop(client.peer, None)
        if suspected is not None:
            self._head.timers.cancel(suspected.timer)

    def reported_dead(self, node: Node, client: Client) -> bool:
        """Begin to check the connection of a client whose death the agent of *node* reports.

        Returns:
            False, and no check begins, if that agent was not asked to watch this client.
        """
        if client.watchers.pop(node.id, None) is None:
            return False
        self._on_node.discard(node.id, client.incarnation)
        self.trust(client)
        self._suspected[client.peer] = suspected = SuspectedDeath(client)
        self._try(suspected)
        return True

    def unreachable(self, peer: bytes) -> Client | None:
        """Return the client behind a closed connection if an agent has reported its death, else None."""
        suspected = self._suspected.get(peer)
        if suspected is None:
            return None
        self.trust(suspected.client)
        return suspected.client

    def drop_node(self, node_id: str) -> list[Client]:
        """Remove the agent of this node from the watchers of all clients; return the clients that the agent watched."""
        clients = self._on_node.of(node_id)
        for client in clients:
            self._on_node.discard(node_id, client.incarnation)
            del client.watchers[node_id]
        return clients

    def _try(self, suspected: SuspectedDeath) -> None:
        self._head.emit(Notify(suspected.client.peer, Beat(PING)))
        at, suspected.pause = self._head.now + suspected.pause, 2 * suspected.pause
        if suspected.pause > 2 * LAST_TRY_S:
            del self._suspected[suspected.client.peer]
        else:
            suspected.timer = self._head.timers.at(at, lambda: self._try(suspected))


class ClientTable:
    def __init__(self, head: Coordinator, before: Snapshot) -> None:
        self._head = head
        self._clients: dict[str, Client] = {}
        self._by_peer: dict[bytes, Client] = {}
        self._by_worker: dict[str, Client] = {}
        self._of_job: Index[Client] = Index()
        self._of_host: Index[Client] = Index()
        self._below: Index[Client] = Index()  # children of workers, by the worker's id
        self._timers: dict[str, HeapTimer] = {}
        self._sessions = Quota("sessions")
        self._drivers = Quota("drivers")
        self._ended = Tombstones(CLIENT, head.emit, before)
        self._expected = ExpectedClients(head)
        self._end_subscribers: dict[str, dict[str, None]] = {}  # watched client -> subscribers; all by incarnation
        self._end_subscriptions: dict[str, set[str]] = {}  # subscriber -> watched clients
        self._watches = ProcessWatches(head)

    # --- queries ---

    def of_peer(self, peer: bytes) -> Client | None:
        return self._by_peer.get(peer)

    def get(self, incarnation: str) -> Client | None:
        return self._clients.get(incarnation)

    def of_worker(self, worker_id: str) -> Client | None:
        return self._by_worker.get(worker_id)

    def of_job(self, namespace: str) -> list[Client]:
        return self._of_job.of(namespace)

    def below(self, worker_id: str) -> list[Client]:
        """Return the clients that are child processes of this worker."""
        return self._below.of(worker_id)

    def alive(self) -> Iterable[Client]:
        """Return all clients with a session, the oldest first."""
        return self._clients.values()

    def ended(self, incarnation: str) -> str | None:
        """Return why this client has ended; None if it has not ended, or if the head has dropped its tombstone."""
        return self._ended.get(incarnation)

    def expected(self, incarnation: str) -> bool:
        """True if a member has named this client and the client has sent no hello to this head yet."""
        return incarnation in self._expected

    def driver_of(self, namespace: str) -> Client | None:
        """Return the first driver of a job, whose terminal shows the workers' output; None if the job has no driver."""
        return next((client for client in self._of_job.of(namespace) if client.role == "driver"), None)

    # --- sessions ---

    def check_driver(self, member: Member) -> None:
        """Raise Refused if this driver's key already has as many driver processes as the quota allows."""
        self._drivers.check(label(member), str(member))

    def hello(self, peer: bytes, hello: ClientHello, worker_namespace: str | None, member: Member) -> Client:
        """Begin the session of a driver or worker, or move its session to the new connection *peer*.

        Args:
            peer: the routing id of the client's connection.
            hello: the client's message.
            worker_namespace: namespace of the worker that the client says it is, or whose child it says it is; None if
                there is no such worker.
            member: the authenticated member that sent the hello.

        Raises:
            Refused: the head has declared this client dead, or the client may not join the job.
        """
        self._check(peer, hello, worker_namespace, member)
        now = self._head.now
        known = self._clients.get(hello.incarnation)
        if known is not None:
            del self._by_peer[known.peer]
            self._watches.trust(known)
            self._count(known.member, -1)
            self._count(member, 1)
            known.peer, known.last_seen, known.answered, known.member = peer, now, now, member
            known.protocol = agreed(hello.protocol, hello.newest)
            self._by_peer[peer] = known
            return known
        before = self._by_worker.get(hello.worker_id) if hello.worker_id else None
        if before is not None:
            self.gone(before, "another process says that it is this worker", certain=False)
        client = Client(
            hello.incarnation, hello.role, hello.namespace, hello.host, hello.pid, hello.pid_start, hello.worker_id,
            peer, now, member=member, protocol=agreed(hello.protocol, hello.newest), answered=now, parent=hello.parent,
        )  # fmt: skip
        self._clients[client.incarnation] = self._by_peer[peer] = client
        self._of_job.add(client.namespace, client.incarnation, client)
        self._of_host.add(client.host, client.incarnation, client)
        self._count(member, 1)
        if client.parent:
            self._below.add(client.parent, client.incarnation, client)
        jobs = self._head.jobs
        if client.worker_id:
            self._by_worker[client.worker_id] = client
        elif hello.token and client.namespace not in jobs:
            jobs.adopt(client.namespace, hello.token)  # an earlier head welcomed it: the job keeps its token
        if member.role == "driver":
            jobs.opened(client.namespace, member.name)
        self._expected.has_come(client.incarnation)
        self._arm(client)
        return client

    def _count(self, member: Member, change: int) -> None:
        for quota, holder in ((self._sessions, member.key), (self._drivers, label(member))):
            (quota.take if change > 0 else quota.free)(holder)

    def _check(self, peer: bytes, hello: ClientHello, worker_namespace: str | None, member: Member) -> None:
        reason = self._ended.get(hello.incarnation)
        if reason is not None:
            raise Refused("node_lost", f"the head has given up on this {hello.role}: {reason}")
        other = self._by_peer.get(peer)
        if other is not None and other.incarnation != hello.incarnation:
            raise Refused("protocol", f"this connection is {other}'s; another client has its own")
        why_not = self._may_join(hello, worker_namespace)
        if why_not:
            raise Refused("authentication", why_not)
        if hello.incarnation not in self._clients:
            self._sessions.check(member.key, str(member))

    def _may_join(self, hello: ClientHello, worker_namespace: str | None) -> str:
        """Return why a client may not join the job that its hello names, "" if it may.

        Without keys a driver needs only the namespace's name; with keys `head.authority` has checked the driver before.
        A worker proves by the job's token that an agent started it.
        """
        if hello.role not in ROLES:
            return f"{hello.role!r} is no role; the roles are {', '.join(ROLES)}"
        if not hello.namespace:
            return "a namespace must be named"
        if hello.role == "driver":
            return ""
        if worker_namespace is None:
            return f"worker {hello.parent or hello.worker_id!r} is not known here"
        if hello.parent and not hello.worker_id.startswith(f"{hello.parent}_"):
            return f"worker {hello.worker_id!r} is no child of worker {hello.parent!r}"
        if worker_namespace != hello.namespace or hello.token != self._head.jobs.token(hello.namespace):
            return f"worker {hello.worker_id!r} is no member of namespace {hello.namespace!r}"
        return ""

    def gone(self, client: Client, reason: str, certain: bool = True) -> None:
        """End the session of a client, stop the groups that the client owns, and notify the subscribers.

        *certain* is False if the client was only silent: its process may still run, and is then refused when it
        returns.
        """
        del self._clients[client.incarnation]
        self._by_peer.pop(client.peer, None)
        self._of_job.discard(client.namespace, client.incarnation)
        self._of_host.discard(client.host, client.incarnation)
        self._below.discard(client.parent, client.incarnation)
        self._count(client.member, -1)
        self._head.timers.cancel(self._timers.pop(client.incarnation, None))
        if self._by_worker.get(client.worker_id) is client:
            del self._by_worker[client.worker_id]
        self._ended.add(client.incarnation, reason, certain, client.member)
        for incarnation in self._end_subscriptions.pop(client.incarnation, ()):
            self._end_subscribers.get(incarnation, {}).pop(client.incarnation, None)
        self._tell_subscribers(client.incarnation)
        self._watches.end(client)
        self._head.client_gone(client.incarnation, client)

    def expect(self, incarnation: str, by: Member) -> None:
        """Wait for a hello of a client that the member *by* names; end its groups at once if it has ended already.

        The wait takes `Timing.patience_s`, or longer while an agent watches the client's process.
        """
        if incarnation in self._clients:
            return
        if self._ended.get(incarnation) is not None:
            self._head.client_gone(incarnation, None)
            return
        self._expected.add(incarnation, by)

    def never_came(self, expected: ExpectedClient) -> None:
        """End an expected client that has sent no hello in time, and the groups that it owns."""
        dead = expected.reported_dead
        reason = "its process ended" if dead else "it did not return after the head was restarted"
        self._ended.add(expected.incarnation, reason, dead, expected.named_by)
        self._tell_subscribers(expected.incarnation)
        self._head.client_gone(expected.incarnation, None)

    # --- watches ---

    def watch_on(self, node: Node) -> None:
        """Ask the agent of *node* to watch every client on its host."""
        for client in self._of_host.of(node.report.host):
            self._watches.ask(client, node)

    def watch(self, client: Client, nodes: Iterable[Node]) -> None:
        """Ask the agents of those *nodes* that are on the client's host to watch the client."""
        for node in nodes:
            self._watches.ask(client, node)

    def watched_on(self, node_id: str, incarnations: Iterable[str]) -> None:
        """Record which clients the agent of this node watches already, because an earlier head asked for it."""
        for incarnation in incarnations:
            if incarnation not in self._clients and self._ended.get(incarnation) is None:
                self._expected.watched_on(node_id, incarnation)

    def unwatch(self, node_id: str, heard: float) -> None:
        """Forget what the agent of this node watches: the agent is gone, or says in its next hello what it watches.

        A client that no other agent watches lives by its heartbeats from now on. Its lease runs from *heard*, the time
        when the node was last heard, if that is later than the client's own last message.
        """
        for client in self._watches.drop_node(node_id):
            if not client.watchers:
                client.last_seen = max(client.last_seen, heard)
                self._arm(client)
            self._head.robots.owner_changed(client.incarnation)
        self._expected.node_gone(node_id, heard)

    def process_ended(self, node: Node, incarnation: str) -> None:
        """Handle the report of *node*'s agent that a client's process has ended.

        The head checks the connection of a client that has a session. A client without a session may still send a hello
        within SOON_S, or longer while another agent watches its process.
        """
        client = self._clients.get(incarnation)
        if client is not None:
            if self._watches.reported_dead(node, client):
                client.last_seen = self._head.now  # it may have been silent as long as it was watched
                self._arm(client)
                self._head.robots.owner_changed(incarnation)
            return
        if self._expected.may_name(node.member):
            self.expect(incarnation, node.member)
        self._expected.reported_dead(node.id, incarnation)

    def unreachable(self, peer: bytes) -> None:
        """End the client of a connection that is closed, if an agent has reported the client's death."""
        client = self._watches.unreachable(peer)
        if client is not None:
            self.gone(client, "its process ended")

    # --- subscriptions to ends ---

    def subscribe(self, client: Client, incarnations: Sequence[str]) -> None:
        """Send *client* a ClientGone for each of these clients of its namespace as soon as that client has ended.

        An unknown client counts as ended at once if the quota of *client*'s member is used up, and else if it does not
        say hello in time: otherwise *client* might wait for ever.
        """
        for incarnation in incarnations:
            watched = self._clients.get(incarnation)
            if watched is not None and watched.namespace != client.namespace:
                continue
            known = watched is not None or incarnation in self._expected or self._ended.get(incarnation) is not None
            if not known and not self._expected.may_name(client.member):
                self._head.emit(Notify(client.peer, ClientGone(incarnation)))
                continue
            self._end_subscribers.setdefault(incarnation, {})[client.incarnation] = None
            self._end_subscriptions.setdefault(client.incarnation, set()).add(incarnation)
            if self._ended.get(incarnation) is not None:
                self._tell_subscribers(incarnation)
            elif watched is None:
                self.expect(incarnation, client.member)

    def _tell_subscribers(self, incarnation: str) -> None:
        for subscriber in self._end_subscribers.pop(incarnation, {}):
            self._end_subscriptions.get(subscriber, set()).discard(incarnation)
            client = self._clients.get(subscriber)
            if client is not None:
                self._head.emit(Notify(client.peer, ClientGone(incarnation)))

    # --- silence ---

    def stalled(self, seconds: float) -> None:
        now = self._head.now
        for client in self._clients.values():
            client.last_seen = self._head.timing.after_stall(client.last_seen, seconds, now)
            client.answered = min(now, client.answered + seconds)
        self._expected.stalled(seconds)

    def _arm(self, client: Client) -> None:
        """Schedule the end of a client's lease. Workers and watched clients have no lease: agents report their end."""
        self._head.timers.cancel(self._timers.pop(client.incarnation, None))
        if client.role != "worker" and not client.watchers:
            due = client.last_seen + self._head.timing.lease_s
            self._timers[client.incarnation] = self._head.timers.at(due, lambda: self._time_passed(client))

    def _time_passed(self, client: Client) -> None:
        silence = self._head.now - client.last_seen
        if client.watchers or self._head.now < client.last_seen + self._head.timing.lease_s:
            self._arm(client)
        else:
            reason = f"it was silent for {silence:.0f} s"
            self._head.emit(Notify(client.peer, abandoned(reason)))
            self.gone(client, reason, certain=False)


def abandoned(reason: str) -> Goodbye:
    """Return the message that tells a client that the head has declared it dead for this *reason*."""
    return Goodbye(f"the head has given up on this process: {reason}", lost=True)
