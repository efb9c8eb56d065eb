"""The tables of a head, who tells whom when something ends, and the time of the event at hand. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rlinf_actors.head.authority import Authority
from rlinf_actors.head.client_table import ClientTable, given_up
from rlinf_actors.head.commands import (
    Answer,
    Command,
    Identity,
    LogEvent,
    NoticeReceived,
    Notify,
    Persist,
    Refuse,
    RequestReceived,
    Snapshot,
    Timing,
)
from rlinf_actors.head.event_log import EventLog, RefusalLog, of_driver, of_node, shown
from rlinf_actors.head.group_table import GroupTable
from rlinf_actors.head.key_registry import NO_OWN_KEYS, Jobs, KeyRegistry, OwnKeys
from rlinf_actors.head.launches import Launches
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.operations import DrainTable, HardwareQueries, WorkerHealthLog
from rlinf_actors.head.quotas import RequestQuota
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.recovery import EarlyMessages, Reconciler
from rlinf_actors.head.robots import RobotTable
from rlinf_actors.security.members import LOCAL, Member
from rlinf_actors.wire.agent_messages import AgentHello, StopWorkers
from rlinf_actors.wire.client_messages import KeyState, Status
from rlinf_actors.wire.protocol import OLDEST, PROTOCOL


class ClusterState:
    """All that a head knows.

    Args:
        identity: of this head.
        timing: its timers.
        new_token: makes a secret; the only thing here that is random.
        now: when it started.
        before: what an earlier head at this place knew.
        own: the head's own keys.
        job_key: makes the public key of a job from its token; only used where TCP needs keys.

    Attributes:
        now: the observer's monotonic time at the event at hand, in seconds.
        wall: seconds since the epoch then, for the event log alone.
        out: what is to be done about it so far, in order.
        speaker: whose message that is; LOCAL where it is none.
        trouble: what is wrong with the head itself, a line each.
        listens: the head's TCP endpoints.
    """

    def __init__(
        self,
        identity: Identity,
        timing: Timing,
        new_token: Callable[[], str],
        now: float,
        before: Snapshot | None = None,
        own: OwnKeys = NO_OWN_KEYS,
        job_key: Callable[[str], str] = lambda token: "",
    ) -> None:
        before = before or Snapshot()
        self.identity = identity
        self.timing = timing
        self.now = now
        self.wall = 0.0
        self.out: list[Command] = []
        self.speaker = LOCAL
        self.trouble: list[str] = []
        self.listens: list[str] = []
        self._started = now
        self.journal = EventLog(identity.epoch, self.emit)
        self.underway = RequestQuota()
        self.nodes = NodeTable(timing, self.emit, self._node_lost, before, now)
        self.looks = HardwareQueries(identity.epoch, self.emit, self.nodes)
        self.refusals = RefusalLog(self.emit)
        self.keys = KeyRegistry(self.emit, before, own, self._keys_ended)
        self._job_key = job_key
        self.jobs = Jobs(new_token, self.emit, before, bool(own.public), self._job_token)
        self.clients = ClientTable(timing, self.emit, self.jobs, self._client_gone, before)
        self.authority = Authority(self.nodes, self.clients, self.jobs)
        self.groups = GroupTable(
            timing,
            self.emit,
            self.nodes,
            self.clients,
            self._worker_gone,
            lambda: self.settling.over,
            before,
            now,
        )
        self.settling = EarlyMessages(
            now + timing.patience_s,
            lambda: bool(self.nodes.missing()),
            self.groups.whole,
            lambda worker_id: self.groups.namespace_of(worker_id) is not None,
            self.groups.unclaimed,
            lambda peer: self.clients.of_peer(peer) is not None,
            self.dropped,
        )
        self.reconciler = Reconciler(timing, self.emit, self.clients, self.groups, self.jobs)
        self.launches = Launches(
            timing,
            self.emit,
            self.nodes,
            self.clients,
            self.groups,
            lambda asked: self.robots.check(asked),
            self.underway.done,
            identity.embedded,
        )
        self.robots = RobotTable(timing, self.emit, self.nodes, self.clients, self.groups, before)
        self.health = WorkerHealthLog(self.emit, self.groups)
        self.drains = DrainTable(self.emit, self.nodes, self.clients, self.groups)

    def begin(self, now: float, wall: float) -> None:
        """Another event happens; times as the attributes."""
        self.now, self.wall, self.out, self.speaker = now, wall, [], LOCAL

    def emit(self, command: Command) -> None:
        """Do *command* about the event at hand; a LogEvent goes into the event log too."""
        if isinstance(command, LogEvent):
            command = shown(command)
            self.journal.add(command, self.wall, self._share_of(command))
        answer = command.then if isinstance(command, Persist) else command
        if isinstance(answer, (Answer, Refuse)):
            self.underway.done(answer.peer, answer.id)
        self.out.append(command)

    def tick(self) -> None:
        """Look who is silent, and what waits too long."""
        self.nodes.tick(self.now)
        self.clients.tick(self.now)
        self.robots.tick(self.now)
        self.looks.tick(self.now)
        self.refusals.tick(self.now)
        self.expire_keys()

    def expire_keys(self) -> None:
        """End what has expired by now."""
        self.keys.tick(self.wall)
        self.keys.flush()

    def stalled(self, seconds: float) -> None:
        """The head stood still: nobody was silent."""
        self.nodes.stalled(seconds, self.now)
        self.clients.stalled(seconds, self.now)
        self.robots.stalled(seconds)
        self.settling.stalled(seconds)

    def look_settled(self) -> None:
        """If the nodes from before a restart are back, or never will be: give up what they alone could tell."""
        if self.settling.look(self.now):
            self.nodes.give_up_missing(self.now - self._started, self.now)
            self.groups.settle()
            self.jobs.settle()
            self.groups.flush()  # what ended meanwhile: its name is free for a launch that was held

    def next_deadline(self) -> float:
        """When the first of them has something to do, infinity for never."""
        tables = (self.nodes, self.clients, self.groups, self.launches, self.looks, self.settling, self.journal)
        expiry = self.now + self.keys.next_expiry() - self.wall
        deadlines = [table.next_deadline() for table in (*tables, self.refusals)]
        return min(*deadlines, self.robots.next_deadline(self.now), expiry)

    def status(self, now: float, sees: Callable[[str], bool] = lambda namespace: True, hosts: bool = True) -> Status:
        """What somebody may know, for people; *sees*: of which namespaces, *hosts*: which nodes are one machine."""
        nodes = self.nodes.states(now)
        if not hosts:
            nodes = [replace(node, report=replace(node.report, host="")) for node in nodes]
        return Status(
            self.identity.epoch,
            self.identity.version,
            now - self._started,
            nodes,
            self.groups.states(sees),
            [str(client) for client in self.clients.alive() if sees(client.namespace)],
            self.groups.leases(now),
            self.robots.stopped(),
            self.trouble,
            self.wall,
            PROTOCOL,
            OLDEST,
        )

    def _job_token(self, namespace: str, token: str | None) -> None:
        if token is None:
            self.keys.forget_job(namespace)
        elif self.keys.own.public or self.keys.own.local:
            self.keys.add_job(namespace, self._job_key(token))

    def _keys_ended(self, ended: Sequence[KeyState], why: str) -> None:
        """Sessions that came with these keys end; what the peers say from now on is not heard any more. The jobs of a
        member that has no key left end too: whoever knows their tokens could go on in their names.
        """
        keys = {key.public for key in ended}
        reason = f"its key is not good any more: {why}"
        self.journal.forget_keys(keys)
        for node in [node for node in self.nodes.alive() if node.member.key in keys]:
            running = [worker.id for _, workers in self.groups.on_node(node.id) for worker in workers]
            self.emit(Notify(node.peer, StopWorkers(running, self.timing.orphan_grace_s, reason)))
            self.settling.forget(node.peer)
            self.nodes.revoked(node, reason, self.now)
        for client in [client for client in self.clients.alive() if client.member.key in keys]:
            self.emit(Notify(client.peer, given_up(reason)))
            self.clients.gone(client, reason)
        for key in ended:
            if not key.token and not self.keys.has(key.role, key.name):
                self._disown(key, why)

    def _disown(self, key: KeyState, why: str) -> None:
        member = Member(key.role, key.name)
        if key.role == "driver":
            for namespace in self.jobs.of_driver(key.name):
                self._end_job(namespace, f"the key of its driver is not good any more: {why}")
        for node in [node for node in self.nodes.all() if node.member.is_same(member)]:
            for namespace in sorted(node.jobs):
                self._end_job(namespace, f"node {node.name} knows its token, and has no good key any more: {why}")

    def _end_job(self, namespace: str, reason: str) -> None:
        """Nobody is a member any more, at once; what runs of it is stopped."""
        for client in [client for client in self.clients.alive() if client.namespace == namespace]:
            if self.clients.get(client.incarnation) is client:  # the end of one may be that of another
                self.emit(Notify(client.peer, given_up(reason)))
                self.clients.gone(client, reason)
        for group in [group for group in self.groups.all() if group.namespace == namespace and not group.stopping]:
            self.groups.stop_group(group, reason)
        self.jobs.forget(namespace)

    def _node_lost(self, node: Node, reason: str, certain: bool, next: AgentHello | None) -> None:
        self.looks.node_lost(node, reason)
        if next is None:
            self.emit(of_node("node_left" if certain else "node_lost", node, f"is gone: {reason}"))
            self.groups.node_lost(node, reason, certain, self.now)
        else:
            self.reconciler.replaced(node, next, self.now)
        self.clients.unwatch(node.id, node.last_seen)

    def _client_gone(self, incarnation: str, client: Client | None) -> None:
        self.groups.client_gone(incarnation, client)
        if client is not None:
            if client.role == "driver":
                self.emit(of_driver("driver_ended", client, f"has ended: {self.clients.ended(incarnation)}"))
            self.journal.forget(client.peer)
            self.nodes.forget(client.peer)
            self.settling.forget(client.peer)
            self.underway.forget(client.peer)
            self.looks.forget(client.peer)
            self.groups.forget_job(client.namespace)

    def _share_of(self, record: LogEvent) -> str:
        """In whose share of the event log it is counted: of who said what led to it, else of the job that it is of."""
        if self.speaker.role in ("local", "worker"):
            return self.jobs.whose(self.speaker.job or record.namespace)
        return str(self.speaker)

    def dropped(self, event: RequestReceived | NoticeReceived) -> None:
        """What was held will not be asked any more."""
        if isinstance(event, RequestReceived):
            self.underway.done(event.peer, event.id)

    def _worker_gone(self, worker_id: str) -> None:
        self.drains.changed()
        client = self.clients.of_worker(worker_id)
        for ended in [*self.clients.below(worker_id), *([client] if client is not None else [])]:
            if self.clients.get(ended.incarnation) is ended:  # the end of one may be that of another
                self.clients.gone(ended, "its worker has ended")
