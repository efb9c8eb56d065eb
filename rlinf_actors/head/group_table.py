"""Groups: names, owners, workers, and the clients that hold handles. Pure.

House rules: a worker's state changes in `_step` alone; `flush` sends what changed since the last flush, one
WorkerChanged for each group and handle; a name is free when its last worker is gone.

Orders to stop workers may be lost with their connection. An agent that says hello again gets them again; robots do not
wait for that: their agents are reminded at each heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head.claims import ClaimTable, NameReservations
from rlinf_actors.head.commands import WORKER, Answer, Notify, Snapshot
from rlinf_actors.head.event_log import of_end, of_life
from rlinf_actors.head.quotas import Tombstones
from rlinf_actors.head.records import Client, Group, Index, Node, WorkerLife, WorkerRecord
from rlinf_actors.head.restarts import EndedGroups, FirstFailures, Restarts, not_restarted
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import StartWorkers, StopWorkers, WorkerReady
from rlinf_actors.wire.client_messages import Done, WorkerChanged
from rlinf_actors.wire.values import ExitReport, GroupState, WorkerSpec, ending

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class GroupTable:
    """All groups.

    Attributes:
        claims: which group holds which robot.
        names: which names lost workers hold.
        robots_changed: groups whose robot workers, or whose owner, have changed.
    """

    def __init__(self, head: Coordinator, before: Snapshot) -> None:
        self._head = head
        self._groups: dict[tuple[str, str], Group] = {}
        self._of_job: Index[Group] = Index()
        self._of_owner: Index[Group] = Index()
        self._subscribed: Index[Group] = Index()
        self._of_worker: dict[str, Group] = {}
        self._on_node: Index[WorkerRecord] = Index()  # living workers
        self._with_robots: dict[tuple[str, str], Group] = {}
        self._touched: dict[tuple[str, str], Group] = {}
        self._orphans: dict[str, list[Group]] = {}  # by the worker that owned them, until its exit is known
        self._robot_stops: dict[str, dict[str, StopWorkers]] = {}  # orders not carried out yet, by node and worker
        self._unseen = Tombstones(WORKER, head.emit, before)
        self._ended = EndedGroups()
        self._restarts = Restarts()
        self._restart_timers: dict[str, HeapTimer] = {}
        self._first_failures = FirstFailures()
        self.robots_changed: dict[tuple[str, str], Group] = {}
        self.claims = ClaimTable(head)
        self.names = NameReservations(head)

    # --- queries ---

    def __len__(self) -> int:
        return len(self._groups)

    def namespace_of(self, worker_id: str) -> str | None:
        """Return the namespace of a living worker."""
        group = self._of_worker.get(worker_id)
        return None if group is None or group.workers[worker_id].gone else group.namespace

    def states(self, sees: Callable[[str], bool]) -> list[GroupState]:
        """Return the groups of the namespaces that are shown, without tokens."""
        chosen = [group for group in self._groups.values() if sees(group.namespace)]
        return [group.state("") for group in sorted(chosen, key=lambda group: group.key)]

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def of_job(self, namespace: str) -> list[Group]:
        return self._of_job.of(namespace)

    def of_owner(self, incarnation: str) -> list[Group]:
        return self._of_owner.of(incarnation)

    def get(self, namespace: str, name: str) -> Group | None:
        return self._groups.get((namespace, name))

    def of_worker(self, worker_id: str) -> Group | None:
        """Return the group of a worker, living or not."""
        return self._of_worker.get(worker_id)

    def ended_unseen(self, worker_id: str) -> str | None:
        """Return why its owner was told that a worker is gone though no agent reported it; None if that is not so."""
        return self._unseen.get(worker_id)

    def worker_on(self, node: Node, id: str) -> WorkerRecord | None:
        """Return a living worker of this node; None for one that has ended, or that runs on another node."""
        group = self._of_worker.get(id)
        worker = group.workers[id] if group is not None else None
        return worker if worker is not None and worker.node_id == node.id and not worker.gone else None

    def on_node(self, node_id: str) -> list[tuple[Group, list[WorkerRecord]]]:
        """Return the groups with living workers on a node, each with these workers."""
        found: dict[tuple[str, str], tuple[Group, list[WorkerRecord]]] = {}
        for worker in self._on_node.of(node_id):
            group = self._of_worker[worker.id]
            found.setdefault(group.key, (group, []))[1].append(worker)
        return list(found.values())

    def is_used(self, node_id: str) -> bool:
        """True if a node has living workers."""
        return node_id in self._on_node

    def with_robots(self) -> list[Group]:
        """Return the groups that have, or had, workers with claims."""
        return list(self._with_robots.values())

    def ended(self, namespace: str, name: str, token: str = "") -> GroupState | None:
        """Return how the last group of this name has ended; None if there was none, or too long ago."""
        return self._ended.get((namespace, name), token)

    def owner_clause(self, group: Group) -> str:
        """Return a clause about the owner of a group, for people."""
        client = self._head.clients.get(group.owner)
        if client is None:
            why = self._head.clients.ended(group.owner)
            return (
                f"whose owner has ended ({why})" if why else "whose owner this head has not heard of since it started"
            )
        node = next((node for node in self._head.nodes.alive() if node.report.host == client.host), None)
        where = f"on node {node.name}" if node is not None else "on a machine without an agentd"
        owner = "driver"
        if client.worker_id in self._of_worker:
            owning = self._of_worker[client.worker_id]
            owner = f"worker {owning.name}:{owning.workers[client.worker_id].spec.rank}"
        return f"owned by {owner}, process {client.pid} {where}"

    # --- groups come and change ---

    def enter(self, group: Group) -> None:
        """Add a group that is about to get its workers, under a name that is free."""
        self._ended.forget(group.key)
        self._put(group)

    def adopt(self, group: Group, worker: WorkerRecord) -> None:
        """Add a worker that runs already, of a group from before this head started or one that was adopted before."""
        node = self._head.nodes.get(worker.node_id)
        if node is not None:
            node.jobs.add(group.namespace)
        self._put(group)
        self.add(group, worker)
        self.changed(worker)

    def _put(self, group: Group) -> None:
        self._groups[group.key] = group
        self._of_job.add(group.namespace, group.name, group)
        self._of_owner.add(group.owner, group.key, group)
        for incarnation in group.subscribers:
            self._subscribed.add(incarnation, group.key, group)

    def add(self, group: Group, worker: WorkerRecord) -> None:
        """Add a worker to a group."""
        group.workers[worker.id] = worker
        group.living.add(worker.id)
        self._of_worker[worker.id] = group
        self._on_node.add(worker.node_id, worker.id, worker)
        if worker.spec.claims:
            self._with_robots[group.key] = self.robots_changed[group.key] = group

    def subscribe(self, group: Group, client: Client) -> None:
        """A client holds a handle of a group, beside the owner."""
        if client.incarnation != group.owner:
            group.subscribers[client.incarnation] = None
            self._subscribed.add(client.incarnation, group.key, group)

    def give_to(self, group: Group, owner: str) -> None:
        """Make this client the owner of a detached group, "" for none; its nodes are told."""
        self._of_owner.discard(group.owner, group.key)
        group.owner, group.detached, group.unclaimed = owner, True, False
        self._of_owner.add(owner, group.key, group)
        self.robots_changed[group.key] = group
        placed: dict[str, list[WorkerSpec]] = {}
        for worker in group.workers.values():
            if not worker.gone:
                placed.setdefault(worker.node_id, []).append(worker.spec)
        for node_id, specs in placed.items():
            self.start(node_id, group, specs)

    def start(self, node_id: str, group: Group, specs: list[WorkerSpec]) -> None:
        """Ask a node to start workers of a group."""
        node = self._head.nodes.get(node_id)
        if specs and node is not None:
            node.jobs.add(group.namespace)
            order = StartWorkers(specs, group.owner, group.cls, group.detail, group.detached)
            self._head.emit(Notify(node.peer, order))

    def changed(self, worker: WorkerRecord) -> None:
        """Send the state of this worker to the clients that hold a handle, at the next flush."""
        group = self._of_worker[worker.id]
        group.changed[worker.id] = worker
        self._touched[group.key] = group

    def resend(self, client: Client) -> None:
        """A client has said hello: send it the state of all workers of its groups."""
        owned = self._of_owner.of(client.incarnation)
        for group in [*owned, *self._subscribed.of(client.incarnation)]:
            group.changed.update(group.workers)
            self._touched[group.key] = group
        self._head.robots.owner_changed(client.incarnation)

    def settle(self) -> None:
        """Every node has come back, or is lost: forget the groups that are gone."""
        self._touched.update(self._groups)

    # --- what agents report ---

    def ready(self, node: Node, report: WorkerReady) -> None:
        """A worker's runtime listens."""
        worker = self.worker_on(node, report.id)
        if worker is not None:
            worker.pid, worker.endpoint = report.pid, report.endpoint
            worker.port, worker.master_port = report.port, report.master_port
            self._step(worker, "ready")

    def exited(self, node: Node, id: str, exit: ExitReport) -> None:
        """A worker's process has ended; its rank may be restarted."""
        worker = self.worker_on(node, id)
        if worker is not None and worker.life is not WorkerLife.RESTARTING:  # that one has no process yet
            self._finish(worker, node, exit)
        elif self._unseen.get(id) is not None:
            self.ended_after_all(id, node.id)

    def ended_after_all(self, id: str, node_id: str) -> None:
        """The agent reports the end of a worker that was lost before: free what it held."""
        self.claims.ended(id, node_id)
        self.names.ended(id, node_id)

    def missing(self, worker: WorkerRecord, node: Node, reason: str) -> None:
        """A worker's agent is there and does not have the worker: it has ended."""
        self._finish(worker, node, ExitReport("exited", reason=reason))

    def _finish(self, worker: WorkerRecord, node: Node, exit: ExitReport) -> None:
        group, id, now = self._of_worker[worker.id], worker.id, self._head.now
        worker.exit = self._first_failures.annotate(group, worker, node.name, exit, now)
        if group.orphaned and exit.kind == "stopped":
            worker.exit = replace(exit, reason=group.orphaned)
        restart = self._restarts.after(group, worker, now)
        if restart is not None:  # before the end is announced: no other group gets its robot in between
            successor, due = restart
            self._restart_timers[successor.id] = self._head.timers.at(due, lambda: self._restart(group, successor))
            self.adopt(group, successor)
            self.claims.take(group, successor, node)
        self._step(worker, "exited")
        if restart is not None:
            del group.workers[id], group.changed[id], self._of_worker[id]
            if due <= now:  # no back-off
                self._restart(group, successor)

    def _restart(self, group: Group, worker: WorkerRecord) -> None:
        """The back-off of a failed worker is over."""
        self._withdraw_restart(worker)
        node = self._head.nodes.get(worker.node_id)
        if node is not None and node.usable:
            self._step(worker, "restart")
            self.start(node.id, group, [worker.spec])
        elif node is not None and node.draining:
            worker.exit = not_restarted(worker.exit, f"its node is {node.condition}")
            self._step(worker, "stop")
        else:
            self.lost(worker, "it was to be started again, and its node takes no workers")

    # --- workers are lost ---

    def node_lost(self, node: Node, reason: str, certain: bool) -> None:
        """A node is gone, and its workers with it; *certain* if it said goodbye, else they may still be running."""
        why = f"node {node.name}: {reason}"
        for group, workers in self.on_node(node.id):
            for worker in workers:
                if not certain:  # it may outlive its agentd, and must not come back
                    self._unseen.add(worker.id, why, by=node.member)
                    if worker.life is not WorkerLife.RESTARTING:  # else the process before it has ended
                        self.names.lost(group, worker, node)
                self.lost(worker, why)
                self.claims.lose(worker, certain)

    def lose(self, worker: WorkerRecord, node: Node, reason: str) -> None:
        """A worker counts as ended though its agent is alive; the agent stops it if it still has it."""
        self._send_stop([worker], 0.0, reason)
        self._unseen.add(worker.id, reason, by=node.member)
        self.lost(worker, reason)
        self.claims.lose(worker, False)

    def lost(self, worker: WorkerRecord, reason: str, exit: ExitReport | None = None) -> None:
        """No agent will report this worker; *exit* is how it ended, where an earlier head has said so."""
        worker.exit = exit or ExitReport("node_lost", reason=reason)
        self._step(worker, "node_lost")

    def abandon(self, worker_id: str, reason: str, by: Member) -> None:
        """A client was told that this worker has ended: it must not come back."""
        self._unseen.add(worker_id, reason, by=by)

    # --- owners end ---

    def client_gone(self, incarnation: str, client: Client | None) -> None:
        """Stop the groups of a client that has ended; *client* is None for one that this head has never met."""
        for group in self._subscribed.of(incarnation):
            group.subscribers.pop(incarnation, None)
            self._subscribed.discard(incarnation, group.key)
        for group in self._of_owner.of(incarnation):
            self._orphan(group, client)
            self.stop_group(group, group.orphaned)
            self._touched[group.key] = group

    def _orphan(self, group: Group, client: Client | None) -> None:
        """Note whose end ends a group. How an owning worker ended may be reported after its process has ended."""
        group.orphaned = "its owner ended"
        if client is None:
            return
        owners = self._of_worker.get(client.worker_id)
        owner = owners.workers[client.worker_id] if owners is not None else None
        if owner is None:
            group.orphaned += f": {client}, {self._head.clients.ended(client.incarnation)}"
        else:
            group.orphaned += f": {self._named(owner)}"
            self._orphans.setdefault(owner.id, []).append(group)
            if owner.exit is not None:
                self._owner_ended(owner)

    def _owner_ended(self, owner: WorkerRecord) -> None:
        how = ending(owner.exit) if owner.exit is not None else "ended"
        for group in self._orphans.pop(owner.id, ()):
            group.orphaned = f"its owner ended: {self._named(owner)} {how}"

    def _named(self, worker: WorkerRecord) -> str:
        return f"worker {worker.spec.group}:{worker.spec.rank} on node {self._head.nodes.hostname(worker.node_id)}"

    # --- stops ---

    def stop_group(self, group: Group, reason: str) -> None:
        """Stop a group that its owner does not stop."""
        self.stop(group, self._head.timing.orphan_grace_s, reason)

    def stop(self, group: Group, grace_s: float, reason: str = "") -> None:
        """Stop a group; *reason* where its owner does not want it."""
        group.stopping = True
        self.stop_workers([worker for worker in group.workers.values() if not worker.gone], grace_s, reason)

    def stop_workers(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str = "") -> None:
        """Stop workers.

        Args:
            workers: of any nodes.
            grace_s: seconds between SIGTERM and SIGKILL.
            reason: why, where their owner does not want it.
        """
        for worker in workers:
            if self._withdraw_restart(worker):
                worker.exit = ExitReport("stopped", reason=reason)
            self._step(worker, "stop")
        self._send_stop([worker for worker in workers if not worker.gone], grace_s, reason)

    def _withdraw_restart(self, worker: WorkerRecord) -> bool:
        timer = self._restart_timers.pop(worker.id, None)
        self._head.timers.cancel(timer)
        return timer is not None

    def _send_stop(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str) -> None:
        ids: dict[str, list[str]] = {}
        for worker in workers:
            ids.setdefault(worker.node_id, []).append(worker.id)
            if worker.spec.claims and not worker.gone:
                order = StopWorkers([worker.id], grace_s, reason)
                self._robot_stops.setdefault(worker.node_id, {})[worker.id] = order
        for node_id, there in ids.items():
            node = self._head.nodes.get(node_id)
            if node is not None:
                self._head.emit(Notify(node.peer, StopWorkers(there, grace_s, reason)))

    def remind(self, node: Node) -> None:
        """Send an agent again which robot workers are to stop: a message may have been lost."""
        for order in self._robot_stops.get(node.id, {}).values():
            self._head.emit(Notify(node.peer, order))

    # --- ends of groups ---

    def flush(self) -> None:
        """Send what has changed, answer requests that wait for an end, and free names."""
        touched, self._touched = self._touched, {}
        for group in touched.values():
            if group.changed:
                states = [worker.state() for worker in group.changed.values()]
                group.changed.clear()
                message = WorkerChanged(group.namespace, group.name, states)
                for incarnation in (group.owner, *group.subscribers):
                    client = self._head.clients.get(incarnation)
                    if client is not None:
                        self._head.emit(Notify(client.peer, message))
            if self._over(group) and not self._head.clients.expected(group.owner):
                self._forget(group)

    def release(self, group: Group) -> bool:
        """Forget a group that is over and kept for an expected owner only; return True if its name is free now."""
        over = self._over(group)
        if over:
            self._forget(group)
        return over

    def _over(self, group: Group) -> bool:
        return group.gone and (group.whole or self._head.early.over)

    def _forget(self, group: Group) -> None:
        for peer, id in group.waiting:
            self._head.emit(Answer(peer, id, Done()))
        del self._groups[group.key]
        self._of_job.discard(group.namespace, group.name)
        self._of_owner.discard(group.owner, group.key)
        for incarnation in group.subscribers:
            self._subscribed.discard(incarnation, group.key)
        self._restarts.forget(group)
        self._first_failures.forget(group)
        if self._with_robots.pop(group.key, None) is not None:
            self.robots_changed[group.key] = group
        for worker_id in group.workers:
            if self._of_worker.get(worker_id) is group:
                del self._of_worker[worker_id]
        self._ended.add(group.state(""))
        self._head.emit(of_end(group))
        self.forget_job(group.namespace)

    def forget_job(self, namespace: str) -> None:
        """Forget a job if it has neither groups nor clients."""
        if not self.of_job(namespace) and not self._head.clients.of_job(namespace):
            self._head.jobs.forget(namespace)
            self._ended.forget_job(namespace)
            for node in self._head.nodes.alive():
                node.jobs.discard(namespace)

    def _step(self, worker: WorkerRecord, event: str) -> None:
        before = worker.life
        worker.step(event)
        if worker.life is before:
            return
        event_of_life = of_life(worker, before, self._head.nodes.hostname(worker.node_id))
        if event_of_life is not None:
            self._head.emit(event_of_life)
        self.changed(worker)
        group = self._of_worker[worker.id]
        if worker.spec.claims:
            self.robots_changed[group.key] = group
        if worker.gone:
            self._owner_ended(worker)
            group.living.discard(worker.id)
            self._on_node.discard(worker.node_id, worker.id)
            self._withdraw_restart(worker)
            stops = self._robot_stops.get(worker.node_id)
            if stops is not None and stops.pop(worker.id, None) is not None and not stops:
                del self._robot_stops[worker.node_id]
            if event == "exited" or before is WorkerLife.RESTARTING:
                self.claims.free(worker)
            self._head.worker_gone(worker.id)
