"""Clients, that is drivers and workers: their sessions, their job membership, and how the head notices their end. Pure.

If an agentd on a client's host watches the client's process (by pidfd), and the client's connection is open, the client
may be silent for any time, as when it is stopped by SIGSTOP. A worker ends when its agentd reports its end. Any other
client ends when the head receives no heartbeat from it for one lease. `head.client_ends` verifies the ends that agentds
report. A process that runs another program (os.exec) lives, and its connection is closed: so the head checks the
connections of silent drivers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlinf_actors.head.client_ends import FIRST_TRY_S, LATE_S, PING, ExpectedClient, ExpectedClients, ProcessWatches
from rlinf_actors.head.commands import CLIENT, Notify, Refused, Snapshot
from rlinf_actors.head.owners import first_of, process_of
from rlinf_actors.head.quotas import Quota, Tombstones, label
from rlinf_actors.head.records import Client, Index, Node
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.model.names import wrong_name
from rlinf_actors.net.link import is_older
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import Beat, ClientHello, Goodbye
from rlinf_actors.wire.client_messages import ClientGone
from rlinf_actors.wire.program import DriverState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

ROLES = ("driver", "worker")
CHECK_PART = 0.6
"""Fraction of the robot lease between two checks of a silent driver's connection: less than robots.OWNER_PART, so that
a driver that has closed its connection loses its robots in their lease."""


class ClientTable:
    def __init__(self, head: Coordinator, before: Snapshot) -> None:
        self._head = head
        self._clients: dict[str, Client] = {}
        self._by_peer: dict[bytes, Client] = {}
        self._by_worker: dict[str, Client] = {}
        self._of_job: Index[Client] = Index()
        self._drivers_of_job: Index[Client] = Index()
        self._of_host: Index[Client] = Index()
        self._of_key: Index[Client] = Index()  # by public key
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

    def has_job(self, namespace: str) -> bool:
        """True if a client of this job has a session."""
        return namespace in self._of_job

    def of_key(self, public: str) -> list[Client]:
        """Return the clients whose sessions were begun with this public key."""
        return self._of_key.of(public)

    def below(self, worker_id: str) -> list[Client]:
        """Return the clients that are child members of this worker."""
        return self._below.of(worker_id)

    def alive(self) -> Iterable[Client]:
        """Return all clients with a session, the oldest first."""
        return self._clients.values()

    def shown(self, sees: Callable[[str], bool]) -> Sliced[tuple[list[str], list[DriverState]]]:
        """Return a line for each client of the namespaces that *sees* accepts, and the states of the drivers there."""
        lines: list[str] = []
        drivers: list[DriverState] = []
        for some, more in pieces(list(self._clients.values()), 5 * PIECE):
            seen = [client for client in some if sees(client.namespace)]
            lines += map(str, seen)
            drivers += [self._driver_state(client) for client in seen if client.role == "driver"]
            if more:
                yield
        return lines, drivers

    def _driver_state(self, client: Client) -> DriverState:
        nodes = self._head.nodes
        node = next(iter(nodes.on_host(client.host)), None)
        rank = nodes.rank(node) if node is not None else -1
        key = client.member.name if client.member.key else ""
        return DriverState(client.incarnation, client.namespace, client.pid, rank, client.program, key)

    def ended(self, incarnation: str) -> str | None:
        """Return why this client has ended; None if it has not ended, or if the head has dropped its tombstone."""
        return self._ended.get(incarnation)

    def expected(self, incarnation: str) -> bool:
        """True if a member has named this client and the client has sent no hello to this head yet."""
        return incarnation in self._expected

    def driver_of(self, namespace: str) -> Client | None:
        """Return the first driver of a job, whose terminal shows the workers' output; None if the job has no driver."""
        return self._drivers_of_job.first(namespace)

    # --- sessions ---

    def check_driver(self, member: Member) -> None:
        """Raise Refused if this driver's key already has as many driver processes as the quota allows."""

        def held() -> str:
            drivers = [one for one in self._clients.values() if one.role == "driver" and one.member.is_same(member)]
            return first_of(drivers, partial(process_of, self._head))

        self._drivers.check(label(member), str(member), held)

    def hello(self, peer: bytes, hello: ClientHello, member: Member) -> Client:
        """Begin the session of a driver or worker, or move its session to the new connection *peer*.

        *member* is the authenticated sender. Raises Refused if the head has declared the client dead, or if the client
        may not join the job.
        """
        self._check(peer, hello, member)
        now = self._head.now
        known = self._clients.get(hello.incarnation)
        if known is not None:
            if peer != known.peer:
                self._move(known, peer)
            self._count(known, known.member, -1)
            self._count(known, member, 1)
            known.last_seen, known.answered, known.member = now, now, member
            known.connected, known.dead_at = True, -math.inf
            return known
        before = self._by_worker.get(hello.worker_id) if hello.worker_id else None
        if before is not None:
            self.gone(before, "another process says that it is this worker", certain=False)
        client = Client(
            hello.incarnation, hello.role, hello.namespace, hello.host, hello.pid, hello.pid_start, hello.worker_id,
            peer, now, member=member, answered=now, parent=hello.parent, program=hello.program,
        )  # fmt: skip
        self._clients[client.incarnation] = self._by_peer[peer] = client
        self._of_job.add(client.namespace, client.incarnation, client)
        if client.role == "driver":
            self._drivers_of_job.add(client.namespace, client.incarnation, client)
        self._of_host.add(client.host, client.incarnation, client)
        self._count(client, member, 1)
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
        return client

    def _move(self, client: Client, peer: bytes) -> None:
        """Answer a client by its new connection *peer* from now on.

        The client repeats its unanswered requests, so those of the old connection are dropped: else they would be
        carried out twice, and answered on a connection that its client has closed.
        """
        del self._by_peer[client.peer]
        self._head.forget_requests(client.peer)
        client.peer = peer
        self._by_peer[peer] = client

    def _count(self, client: Client, member: Member, change: int) -> None:
        if member.key:
            if change > 0:
                self._of_key.add(member.key, client.incarnation, client)
            else:
                self._of_key.discard(member.key, client.incarnation)
        for quota, holder in ((self._sessions, member.key), (self._drivers, label(member))):
            (quota.take if change > 0 else quota.free)(holder)

    def _check(self, peer: bytes, hello: ClientHello, member: Member) -> None:
        reason = self._ended.get(hello.incarnation)
        if reason is not None:
            raise Refused("node_lost", f"the head has given up on this {hello.role}: {reason}")
        other = self._by_peer.get(peer)
        if other is not None and other.incarnation != hello.incarnation:
            raise Refused("protocol", f"this connection is {other}'s; another client has its own")
        known = self._clients.get(hello.incarnation)
        if known is not None and is_older(peer, known.peer):
            raise Refused("hello", f"{known} has replaced this connection")
        why_not = self._may_join(hello)
        if why_not:
            raise Refused("authentication", why_not)
        if known is None:
            held = lambda: first_of(self._of_key.of(member.key), partial(process_of, self._head))  # noqa: E731
            self._sessions.check(member.key, str(member), held)

    def _may_join(self, hello: ClientHello) -> str:
        """Return why a client may not join the job that its hello names, "" if it may.

        Without keys a driver needs only the namespace's name; with keys `head.authority` has checked the driver before.
        A worker proves by the job's token that an agentd started it.
        """
        if hello.role not in ROLES:
            return f"{hello.role!r} is no role; the roles are {', '.join(ROLES)}"
        if hello.role == "driver":
            return wrong_name(hello.namespace, "a job")
        namespace = self._head.groups.namespace_of(hello.parent or hello.worker_id)
        if namespace is None:
            return f"worker {hello.parent or hello.worker_id!r} is not known here"
        if hello.parent and not hello.worker_id.startswith(f"{hello.parent}_"):
            return f"worker {hello.worker_id!r} is no child of worker {hello.parent!r}"
        if namespace != hello.namespace or hello.token != self._head.jobs.token(hello.namespace):
            return f"worker {hello.worker_id!r} does not belong to job {hello.namespace!r}"
        return ""

    def gone(self, client: Client, reason: str, certain: bool = True) -> None:
        """End the session of a client, stop the groups that the client owns, and notify the subscribers.

        If the client was only silent, *certain* is False. Its process may still run, and is refused when it returns.
        """
        del self._clients[client.incarnation]
        self._by_peer.pop(client.peer, None)
        self._of_job.discard(client.namespace, client.incarnation)
        self._drivers_of_job.discard(client.namespace, client.incarnation)
        self._of_host.discard(client.host, client.incarnation)
        self._below.discard(client.parent, client.incarnation)
        self._count(client, client.member, -1)
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
        """Begin to wait for the hello of a client that the member *by* names, unless the client has a session.

        If the client has ended already, its groups are stopped at once. The wait lasts for `Timing.patience_s`, or
        longer while an agentd watches the client's process.
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

    def watch_on(self, node: Node) -> Sliced[None]:
        """Ask the agentd of *node* to watch every client on its host."""
        for clients, more in pieces(self._of_host.of(node.report.host)):
            for client in clients:
                if self._clients.get(client.incarnation) is client and self._head.nodes.get(node.id) is node:
                    self.watch(client, (node,))
            if more:
                yield

    def watch(self, client: Client, nodes: Iterable[Node]) -> None:
        """Ask the agentds of those *nodes* that are on the client's host to watch the client."""
        for node in nodes:
            self._watches.ask(client, node)
        self._arm(client)

    def watched_on(self, node: Node, incarnations: Sequence[str]) -> Sliced[None]:
        """Record which clients the agentd of *node* watches by order of an earlier head, as its hello says."""
        for some, more in pieces(incarnations):
            for incarnation in some if self._head.nodes.get(node.id) is node else ():
                if incarnation not in self._clients and self._ended.get(incarnation) is None:
                    self._expected.watched_on(node.id, incarnation)
            if more:
                yield

    def unwatch(self, node_id: str, heard: float) -> None:
        """Forget which clients the agentd of this node watches.

        Called when that agentd is gone or registers again; its hello then lists the clients that it watches. From now
        on, a client that no other agentd watches must send heartbeats. Its lease runs from *heard*, the time when the
        node was last heard, or from the client's own last message if that is later.
        """
        for client in self._watches.drop_node(node_id):
            if not client.watchers:
                client.last_seen = max(client.last_seen, heard)
                self._arm(client)
            self._head.robots.owner_changed(client.incarnation)
        self._expected.node_gone(node_id, heard)

    def process_ended(self, node: Node, incarnation: str) -> None:
        """Handle the report of *node*'s agentd that a client's process has ended.

        If the client has a session, the head checks its connection. Otherwise the client counts as ended if it sends no
        hello within SOON_S and no other agentd watches its process.
        """
        client = self._clients.get(incarnation)
        if client is not None:
            if self._watches.reported_dead(node, client):
                client.last_seen = client.dead_at = self._head.now  # it may have been silent while it was watched
                self._ping(client)
                self._head.robots.owner_changed(incarnation)
            return
        if self._expected.may_name(node.member):
            self.expect(incarnation, node.member)
        self._expected.reported_dead(node.id, incarnation)

    def unreachable(self, peer: bytes) -> None:
        """Handle a closed connection. If an agentd has reported the death of its client, end the client.

        Otherwise no agentd vouches for the client before its next hello. It has closed the connection since the last
        check at the earliest, and has a lease from then on.
        """
        client = self._by_peer.get(peer)
        if client is not None and self._may_be_dead(client):
            self.gone(client, "its process ended")
        elif client is not None and client.watchers:
            client.connected = False
            since = self._head.now - self._check_s
            client.last_seen, client.answered = max(client.last_seen, since), max(client.answered, since)
            self._arm(client)
            self._head.robots.owner_changed(client.incarnation)

    # --- subscriptions to ends ---

    def subscribe(self, client: Client, incarnations: Sequence[str]) -> Sliced[None]:
        """Send *client* a ClientGone for each of these clients of its namespace as soon as that client has ended.

        The head waits for the hello of a client that it does not know. If the hello does not come in time, the client
        counts as ended, so that *client* does not wait for ever. If *client*'s member has used up its quota of expected
        clients, an unknown client counts as ended at once.
        """
        for piece, more in pieces(incarnations):
            for incarnation in piece:
                self._subscribe(client, incarnation)
            if more:
                yield
            if self._clients.get(client.incarnation) is not client:
                return

    def _subscribe(self, client: Client, incarnation: str) -> None:
        watched = self._clients.get(incarnation)
        if watched is not None and watched.namespace != client.namespace:
            return
        known = watched is not None or incarnation in self._expected or self._ended.get(incarnation) is not None
        if not known and not self._expected.may_name(client.member):
            self._head.emit(Notify(client.peer, ClientGone(incarnation)))
            return
        self._end_subscribers.setdefault(incarnation, {})[client.incarnation] = None
        self._end_subscriptions.setdefault(client.incarnation, set()).add(incarnation)
        if self._ended.get(incarnation) is not None:
            self._tell_subscribers(incarnation)
        elif watched is None:
            self.expect(incarnation, client.member)

    def _tell_subscribers(self, incarnation: str) -> None:
        subscribers = list(self._end_subscribers.pop(incarnation, ()))
        if subscribers:
            self._head.slices.start(self._tell(subscribers, ClientGone(incarnation)))

    def _tell(self, subscribers: Sequence[str], gone: ClientGone) -> Sliced[None]:
        for some, more in pieces(subscribers):
            for subscriber in some:
                self._end_subscriptions.get(subscriber, set()).discard(gone.incarnation)
                client = self._clients.get(subscriber)
                if client is not None:
                    self._head.emit(Notify(client.peer, gone))
            if more:
                yield

    # --- silence ---

    def stalled(self, seconds: float) -> None:
        now = self._head.now
        for client in self._clients.values():
            client.last_seen = self._head.timing.after_stall(client.last_seen, seconds, now)
            client.answered = min(now, client.answered + seconds)
            client.dead_at += seconds
        self._expected.stalled(seconds)

    @property
    def _check_s(self) -> float:
        return CHECK_PART * self._head.timing.robot_lease_s

    def _may_be_dead(self, client: Client) -> bool:
        """True if an agentd has reported the client's death, and no message came since, other than late ones."""
        return client.last_seen <= client.dead_at + LATE_S

    def _lease_end(self, client: Client) -> float:
        """Return when the lease of a client ends; infinity for workers, and while an agentd vouches for the client."""
        has_none = client.role == "worker" or client.watchers
        return math.inf if has_none else client.last_seen + self._head.timing.lease_s

    def _arm(self, client: Client) -> None:
        """Schedule the end of a client's lease, and the next check of its connection if it needs one."""
        self._head.timers.cancel(self._timers.pop(client.incarnation, None))
        now, due = self._head.now, self._lease_end(client)
        if self._may_be_dead(client):
            due = min(due, now + max(FIRST_TRY_S, now - client.dead_at))
        elif client.role != "worker" and client.watchers:
            due = client.last_seen + self._check_s
            due = due if due > now else now + self._check_s
        if due < math.inf:
            self._timers[client.incarnation] = self._head.timers.at(due, lambda: self._time_passed(client))

    def _time_passed(self, client: Client) -> None:
        now = self._head.now
        if now >= self._lease_end(client):
            reason = f"it was silent for {now - client.last_seen:.0f} s"
            reason += "" if client.connected else ", and its connection is closed"
            self._head.emit(Notify(client.peer, abandoned(reason)))
            self.gone(client, reason, certain=False)
        elif self._may_be_dead(client) or now >= client.last_seen + self._check_s:
            self._ping(client)
        else:
            self._arm(client)

    def _ping(self, client: Client) -> None:
        """Send a client a message that it ignores. If its connection is closed, `unreachable` is called soon."""
        self._head.emit(Notify(client.peer, Beat(PING)))
        self._arm(client)


def abandoned(reason: str) -> Goodbye:
    """Return the message that tells a client that the head has declared it dead for this *reason*."""
    return Goodbye(f"the head has given up on this process: {reason}", lost=True)
