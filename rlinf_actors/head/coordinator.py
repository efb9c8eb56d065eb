"""The head as a state machine: from each event and the time it makes commands. No sockets, no clock, no loop.

Theory of operation
-------------------
The head is one state machine. `HeadServer` calls `Coordinator.handle` on its loop thread with each message, timer or
failed send, and carries out the returned commands in order. Nothing here blocks, and nothing else changes the state.

The state is a set of tables, each for one kind of thing: `nodes`, `clients`, `jobs`, `keys`, `groups` (with the claims
on robots and the reserved group names). Further tables keep the event log, drains, queries to nodes, waiting launches
and lookups, and the messages that come too early after a restart. Each table has a reference to the coordinator. A
table reads `now`, the time of the present event, calls `emit` with commands, schedules its own methods in `timers`, and
calls other tables directly. If the end of one thing affects several tables, a method of the coordinator calls them:
`node_lost`, `client_gone`, `worker_gone`.

An event passes these steps: `authority` decides whether this member may send this message; `requests` counts requests
without an answer; `early` holds back what a restarted head cannot answer yet; `handlers` dispatches by message type;
tables change and emit; at the end each table that collects changes flushes them. Notices to holders of handles and to
readers of the event log wait for `finish_turn`, once in each turn of the loop. So a node that dies with 64 workers, or
a hundred nodes whose reports arrive together, cost one message per handle.

The guarantees rest on three facts. A worker's life cycle is a state table, and an end that its agentd reported is
final. A process that was declared dead without proof has a tombstone and is refused when it returns, so no process
counts as alive again after its declared end. State that agentds and clients cannot report again (ranks, tombstones,
drains, emergency stops, keys, jobs) is written by `Persist` commands; a request that changes it is answered when the
change is on disk.

Work that grows with a list or table is done in slices (`head.slices`): a generator goes on at each SliceDue event,
and other events come in between.

House rules: each request gets exactly one answer, now or later; a notice that does not fit the state is counted and
dropped; an unknown peer is asked to say hello; the cost of an event does not grow with the size of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from rlinf_actors.head import commands
from rlinf_actors.head.admission import Admission
from rlinf_actors.head.authority import Authority
from rlinf_actors.head.breakpoints import BreakpointLog
from rlinf_actors.head.client_table import ClientTable, abandoned
from rlinf_actors.head.event_log import EventLog, of_driver, of_node, shown
from rlinf_actors.head.group_slices import GroupSlices
from rlinf_actors.head.group_table import GroupTable
from rlinf_actors.head.handlers import Handlers
from rlinf_actors.head.jobs import Jobs
from rlinf_actors.head.key_ends import KeyEnds
from rlinf_actors.head.key_registry import NO_OWN_KEYS, KeyRegistry, OwnKeys
from rlinf_actors.head.kills import Kills
from rlinf_actors.head.launches import Launches
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.operations import DrainTable, NodeQueries, WorkerHealthLog
from rlinf_actors.head.output_routes import OutputRoutes
from rlinf_actors.head.owners import processes
from rlinf_actors.head.quotas import RequestQuota
from rlinf_actors.head.records import Client, Node
from rlinf_actors.head.recovery import EarlyMessages, Reconciler
from rlinf_actors.head.refusal_log import RefusalLog
from rlinf_actors.head.resizes import Resizes
from rlinf_actors.head.robots import RobotTable
from rlinf_actors.head.slices import Sliced, Slices, keys_of, pieces
from rlinf_actors.head.timers import TimerHeap
from rlinf_actors.model.readable import duration
from rlinf_actors.security.members import LOCAL
from rlinf_actors.wire.agent_messages import AgentHello, Goodbye
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.hook_values import HookState
from rlinf_actors.wire.node_questions import verb
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import NodeState

AT_ONCE = 10  # held messages that are handled in the event that ended their wait; further ones follow one by one


class Coordinator:
    """The state of a head, and its decisions. Call on one thread only, except `admit`.

    Args:
        identity: the identity of this head.
        timing: the head's timers.
        new_token: returns a new secret; the only source of randomness.
        now: when the head started, in monotonic seconds.
        before: the persistent state that an earlier head left, None without an earlier head.
        own: the head's own keys.
        job_key: returns the public key of a job for the job's token; only called if connections need keys.

    Attributes:
        now: time of the present event, in monotonic seconds.
        wall: the same time in seconds since the epoch, for the event log and the expiry of keys.
        out: the commands for the present event, in order.
        speaker: the member that sent the present message; LOCAL if the event is not a message.
        timers: the scheduled calls of all tables.
        trouble: present problems of the head itself by the file that they are about, one line each.
        listens: the head's TCP endpoints.
        unexpected: number of notices that were dropped because they did not fit the state.
        admit: returns the member of a public key; see KeyRegistry.admit.
        hooks: returns the states of the head's hooks, for the status.
    """

    def __init__(
        self,
        identity: commands.Identity,
        timing: commands.Timing,
        new_token: Callable[[], str],
        now: float,
        before: commands.Snapshot | None = None,
        own: OwnKeys = NO_OWN_KEYS,
        job_key: Callable[[str], str] = lambda token: "",
    ) -> None:
        before = before or commands.Snapshot()
        self.identity = identity
        self.timing = timing
        self.started_at = self.now = now
        self.wall = 0.0
        self.out: list[commands.Command] = []
        self.speaker = LOCAL
        self.timers = TimerHeap()
        self.slices = Slices(self.emit)
        self.trouble: dict[str, str] = {}
        self.listens: list[str] = []
        self.unexpected = 0
        self.log = EventLog(self, before=before.events)
        self.refusals = RefusalLog(self)
        self.breakpoints = BreakpointLog(self)
        self.requests = RequestQuota(lambda counts: processes(self, counts))
        self.keys = KeyRegistry(self.emit, before, own, lambda ended, why: self.key_ends.begin(ended, why))
        self.jobs = Jobs(self, new_token, job_key, before)
        self.admission = Admission(self)
        self.nodes = NodeTable(self, before)
        self.clients = ClientTable(self, before)
        self.groups = GroupTable(self, before)
        self.group_slices = GroupSlices(self)
        self.launches = Launches(self)
        self.resizes = Resizes(self)
        self.robots = RobotTable(self, before)
        self.queries = NodeQueries(self)
        self.output = OutputRoutes(self)
        self.health = WorkerHealthLog(self)
        self.drains = DrainTable(self)
        self.early = EarlyMessages(self)
        self.reconciler = Reconciler(self)
        self.key_ends = KeyEnds(self)
        self.kills = Kills(self)
        self.hooks: Callable[[], list[HookState]] = list
        self.authority = Authority(self)
        self._handlers = Handlers(self)
        self.admit = self.keys.admit  # any thread; called for every frame, so without a detour

    # --- events ---

    def started(self, endpoints: Sequence[str], wall: float) -> list[commands.Command]:
        """Log the start, and list the key of the machine's driver. Called once, when the head listens at *endpoints*.

        *wall* is the present time in seconds since the epoch.
        """
        self._begin(self.now, wall)
        # added directly, not by `emit`: the head's own log file has another line about the start
        before = self.log.newest()
        again = f" again, {duration(max(0.0, wall - before.at))} after its last event" if before is not None else ""
        text = f"the head has started{again}: rlinf-actors {self.identity.version}"
        self.log.add(commands.LogEvent("head_started", text))
        self.listens = [endpoint for endpoint in endpoints if endpoint.startswith("tcp://")]
        if self.early.over:
            for _ in self.jobs.settle():
                pass
        self.keys.begin(wall)
        self.keys.flush()
        return self.out

    def stopping(self, reason: str, restarting: bool, wall: float) -> None:
        """Log the orderly end of the head, before its last turn is finished. *reason* is for people.

        *restarting* is True if all groups go on. *wall* is the present time in seconds since the epoch.
        """
        self._begin(self.now, wall)
        text = f"{reason}; jobs wait for the next head" if restarting else reason
        self.log.add(commands.LogEvent("head_stopped", text))  # not by `emit`, as the start

    def handle(self, event: commands.Event, now: float, wall: float = 0.0) -> list[commands.Command]:
        """Change the state by *event*, and return all commands to carry out, in order, those of all slices too."""
        done = self.apply(event, now, wall) + self.finish_turn()
        while self.unfinished():
            done += self.apply(commands.SliceDue(), now, wall) + self.finish_turn()
        return done

    def unfinished(self) -> bool:
        """True if a SliceDue event must follow, after other events had their turn."""
        return self.slices.pending or self.groups.notices.pending or self.early.pending

    def apply(self, event: commands.Event, now: float, wall: float = 0.0) -> list[commands.Command]:
        """Change the state by *event*, and return the commands to carry out now, in order.

        The caller calls `finish_turn` soon, after this event and others. *now* is the present time in monotonic
        seconds, *wall* in seconds since the epoch.
        """
        self._begin(now, wall)
        if wall >= self.keys.next_expiry():
            self.keys.tick(wall)
            self.keys.flush()
        held = False
        if isinstance(event, (commands.RequestReceived, commands.NoticeReceived)):
            held = self._receive(event)
        elif isinstance(event, commands.LongMessage):
            self._begin_decoding(event)
        elif isinstance(event, commands.ConnectionRejected):
            self._connection_rejected(event)
        elif isinstance(event, commands.MessageRefused):
            self.refusals.note(str(event.member), event.verb, f"refused a message of {event.member}: {event.text}")
        elif isinstance(event, commands.StoreStatus):
            self.trouble[event.file] = event.trouble
        elif isinstance(event, commands.PeerUnreachable):
            self.nodes.unreachable(event.peer)
            self.clients.unreachable(event.peer)
        elif isinstance(event, commands.HeadStalled):
            self.nodes.stalled(event.seconds)
            self.clients.stalled(event.seconds)
            self.robots.stalled(event.seconds)
            self.early.stalled(event.seconds)
        elif isinstance(event, commands.SliceDue):
            self._slice()
        else:
            self.timers.run_due(now)
        if self.early.is_over():
            self.slices.start(self._settle())
        taken = self.early.take() if self.early.pending and not held else ()
        for number, message in enumerate(taken):
            if number >= AT_ONCE:
                self.slices.queue(message, self.keys_of(message))
            elif self._passes(message):  # again: meanwhile the head may know whose job it is
                self._process(message)
            else:
                self.drop(message)
        self.groups.flush()
        self.launches.flush()
        self.robots.flush()
        self._handlers.answer_ending()
        self.drains.flush()
        self.requests.wait()
        return self.out

    def finish_turn(self) -> list[commands.Command]:
        """Return the messages about all changes since the last call: to the holders of handles and to event readers."""
        self.out = []
        self.groups.notices.flush()
        self.log.flush()
        return self.out

    def next_deadline(self) -> float:
        """Return when the next TimerDue event is due, in monotonic seconds; infinity for never.

        If a lease was renewed in the meantime, nothing is due at that time, and the event changes nothing.
        """
        return min(self.timers.next_deadline(), self.now + self.keys.next_expiry() - self.wall)

    def farewell(self, reason: str) -> list[commands.Command]:
        """Return the messages that tell all clients that the head and the cluster end. *reason* is for people."""
        return [commands.Notify(client.peer, Goodbye(reason)) for client in self.clients.alive()]

    def restarting(self, reason: str) -> list[commands.Command]:
        """Return the messages that tell agentds and clients that the head restarts and that all groups go on.

        *reason* is for people.
        """
        sessions: list[Node | Client] = [*self.nodes.alive(), *self.clients.alive()]
        goodbye = Goodbye(reason, restarting=True)
        return [commands.Notify(session.peer, goodbye) for session in sessions]

    def _begin(self, now: float, wall: float) -> None:
        self.now, self.wall, self.out, self.speaker = now, wall, [], LOCAL

    def _slice(self) -> None:
        """Run the next slice of long work, and handle a message that has waited for the end of such work."""
        self.slices.step(lambda member: setattr(self, "speaker", member))
        message = self.slices.take()
        if isinstance(message, commands.LongMessage):
            self._begin_decoding(message)
        elif message is not None:
            if self._passes(message):  # again: its key may have ended, or the head knows by now whose job it is
                self._dispatch(message)
            else:
                self.drop(message)

    def _receive(self, event: commands.Message, first: bool = False) -> bool:
        """Handle a new message. Return True if it waits because the head was restarted.

        *first*: True if it comes before all messages that wait for the end of long work.
        """
        if not self._passes(event, new=True):
            return False
        if self.early.holds(event):
            return True
        self._process(event, first)
        return False

    def _begin_decoding(self, event: commands.LongMessage) -> None:
        if not self.slices.holds(event, (event.peer,)):
            self.slices.start(self._decode(event), (event.peer,), event.member)

    def _decode(self, event: commands.LongMessage) -> Sliced[None]:
        message = yield from event.decoding
        if message is not None:
            self._receive(message, first=True)

    def _process(self, event: commands.Message, first: bool = False) -> None:
        if self.slices.idle or not self.slices.holds(event, self.keys_of(event), first):
            self._dispatch(event)

    def keys_of(self, event: commands.Message) -> tuple[Hashable, ...]:
        """Return what a message must wait for if it is at work; see head.slices."""
        client = self.clients.of_peer(event.peer)
        return keys_of(event, client.namespace if client is not None else None)

    def _dispatch(self, event: commands.Message) -> None:
        self.speaker = event.member
        if isinstance(event, commands.NoticeReceived):
            self._handlers.notice(event)
        else:
            self._handlers.request(event)

    def _passes(self, event: commands.Message, new: bool = False) -> bool:
        """Return True if the member may send this message; else refuse the message and log the refusal.

        A *new* request must also be within the quota of open requests.
        """
        try:
            if event.member.key and self.keys.admit(event.member.key, self.wall) is None:  # ended while it was held
                raise commands.Refused("authentication", self.keys.why_not(event.member.key, self.wall))
            self.authority.check(event)
            if new and isinstance(event, commands.RequestReceived):
                self.requests.begin(event.peer, event.id, event.member)
        except commands.Refused as error:
            if isinstance(event, commands.RequestReceived):
                text = f"{error.text}: {error.advice}" if error.advice else error.text
                # not by `emit`, which ends the count of an open request: a waiting request may have the same number
                self.out.append(commands.Refuse(event.peer, event.id, error.kind, text))
            self.refusals.note(str(event.member), verb(event.body), f"refused: {error.text}")
            return False
        return True

    def _connection_rejected(self, event: commands.ConnectionRejected) -> None:
        why = event.why or self.keys.why_not(event.public, self.wall)
        text = f"refused a connection from {event.address or 'an unknown address'}: {why}"
        # All unlisted keys count as one kind, because any peer can make new keys without end.
        kind = event.why or (event.public if self.keys.knows(event.public) else "")
        self.refusals.note(event.address, f"connection {kind}", text, event.times)

    def _settle(self) -> Sliced[None]:
        """End the wait of a restarted head for its nodes, and declare the nodes lost that have not come back."""
        yield from self.nodes.abandon_missing()
        self.early.over = True
        yield from self.group_slices.settle()
        yield from self.jobs.settle()
        self.groups.flush()  # the name of a group that ended meanwhile is free for a launch that was held
        self.early.release_all()

    # --- what tables call ---

    @property
    def ending(self) -> bool:
        """True while all groups are being stopped because the cluster ends."""
        return self._handlers.ending

    def emit(self, command: commands.Command) -> None:
        """Add *command* to the commands for the present event; add a LogEvent to the event log too."""
        if isinstance(command, commands.LogEvent):
            command = shown(command)
            owner = self.jobs.owner_of(command.namespace) if command.namespace else ""
            self.log.add(command, self._share_of(command), owner)
        answer = command.then if isinstance(command, commands.Persist) else command
        if isinstance(answer, (commands.Answer, commands.Refuse)):
            self.requests.done(answer.peer, answer.id)
        self.out.append(command)

    def drop(self, event: commands.Message) -> None:
        """Drop a held message without an answer. A dropped request no longer counts against its sender's quota."""
        if isinstance(event, commands.RequestReceived):
            self.requests.done(event.peer, event.id)

    def node_lost(self, node: Node, reason: str, certain: bool, successor: AgentHello | None) -> None:
        """Update all tables after the agentd of *node* is gone, and the node's workers with it.

        *certain* is True if the agentd said goodbye, so its workers have ended. *successor* is the hello of a new
        agentd that registers this node in its place, None without a new agentd.
        """
        self.queries.lost(node, reason)
        if successor is None:
            rank = self.nodes.named(node.id)[1]
            self.emit(of_node("node_left" if certain else "node_lost", node, f"is gone: {reason}", rank))
            self.groups.node_lost(node, reason, certain)
        else:
            self.reconciler.replaced(node, successor)
        self.clients.unwatch(node.id, node.last_seen)

    def client_gone(self, incarnation: str, client: Client | None) -> None:
        """Update all tables after a client has ended; *client* is None if the client has sent no hello to this head."""
        self.groups.client_gone(incarnation, client)
        self.launches.parts.forget(incarnation)
        if client is None:
            return
        if client.role == "driver":
            self.emit(of_driver("driver_ended", client, f"has ended: {self.clients.ended(incarnation)}"))
            self.output.driver_gone(client)
        self.queries.lost(client, "it has ended")
        self.reconciler.client_gone(client)
        self.forget_requests(client.peer)
        self.groups.forget_job(client.namespace)

    def forget_requests(self, peer: bytes) -> None:
        """Drop the requests that wait for an answer to the connection *peer* of a client."""
        for table in (self.log, self.nodes.requests, self.early, self.requests, self.queries, self.slices, self.kills):
            table.forget(peer)

    def worker_gone(self, worker_id: str, lost: str = "") -> None:
        """End the sessions of a worker that has ended, and of its child members.

        *lost* is "" if the process has ended. Otherwise it is the reason why the head has given the worker up, which is
        sent to the worker and to its child members: their processes may still run.
        """
        self.kills.ended(worker_id)
        client = self.clients.of_worker(worker_id)
        for ended in [*self.clients.below(worker_id), *([client] if client is not None else [])]:
            if self.clients.get(ended.incarnation) is ended:  # ending one client may have ended this one too
                if lost:
                    self.emit(commands.Notify(ended.peer, abandoned(lost)))
                self.clients.gone(ended, lost or "its worker has ended")

    def _share_of(self, event: commands.LogEvent) -> str:
        """Return the name of the share of the event log in which an entry counts.

        It is the share of the member that caused the entry; for a worker or local process, `Jobs.whose` names it.
        """
        if self.speaker.role in ("local", "worker"):
            return self.jobs.whose(self.speaker.job or event.namespace)
        return str(self.speaker)

    # --- status ---

    def describe(
        self, sees: Callable[[str], bool], as_seen: Callable[[list[NodeState]], list[NodeState]]
    ) -> Sliced[Status]:
        """Return the state of the cluster: of namespaces that *sees* accepts, and of nodes as *as_seen* has them."""
        nodes: list[NodeState] = []
        for some, more in pieces(list(self.nodes.all())):
            nodes += as_seen(self.nodes.states(some))
            if more:
                yield
        groups = yield from self.group_slices.shown(sees)
        clients, drivers = yield from self.clients.shown(sees)
        return Status(
            self.identity.epoch,
            self.identity.version,
            self.now - self.started_at,
            sorted(nodes, key=lambda state: (state.rank < 0, state.rank, state.report.node_id)),
            groups,
            clients,
            self.groups.claims.states(self.now),
            self.robots.stopped(),
            [text for text in self.trouble.values() if text],
            self.wall,
            PROTOCOL,
            drivers=drivers,
        )
