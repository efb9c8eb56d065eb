"""Groups: their names, owners and workers, and the clients that hold handles of them. Pure.

House rules: only `_step` changes a worker's state. A group's name is free when its last worker is gone; `flush`, after
each event, drops such groups. `head.group_notices` tells the holders of handles what has changed.

An order to stop workers may be lost with its connection. The head resends the order when the agentd sends its next
hello. For robot workers it also resends the order at each heartbeat of the agentd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rlinf_actors.head.claims import ClaimTable, NameReservations
from rlinf_actors.head.commands import WORKER, Answer, Notify, Snapshot
from rlinf_actors.head.event_log import of_end, of_life
from rlinf_actors.head.group_notices import GroupNotices
from rlinf_actors.head.group_slices import states_of
from rlinf_actors.head.orphans import Orphans
from rlinf_actors.head.owners import owner_of
from rlinf_actors.head.quotas import Tombstones
from rlinf_actors.head.records import Client, Group, Index, Node, WorkerLife, WorkerRecord
from rlinf_actors.head.restarts import EndedGroups, FirstFailures, Restarts, not_restarted
from rlinf_actors.head.slices import PIECE, Sliced, group_key, node_key, pieces
from rlinf_actors.head.timers import HeapTimer
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import StartWorkers, StopWorkers, WorkerReady
from rlinf_actors.wire.client_messages import Done
from rlinf_actors.wire.endings import LEFT
from rlinf_actors.wire.values import ExitReport, GroupState, WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class GroupTable:
    """All groups of the cluster that have not ended, with their workers, owners and subscribers.

    Attributes:
        notices: the changes of workers that the holders of handles have not been told yet.
        claims: the claims of workers on robots.
        names: the group names reserved for lost workers.
        robots_changed: the groups whose robot workers or owner have changed since `RobotTable.flush`.
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
        self._returned: dict[str, Client] = {}
        self._orphans = Orphans(head)
        self._robot_stops: dict[str, dict[str, StopWorkers]] = {}  # orders not carried out yet, by node and worker
        self._unseen = Tombstones(WORKER, head.emit, before)
        self._ended = EndedGroups()
        self._restarts = Restarts()
        self._restart_timers: dict[str, HeapTimer] = {}
        self._blocked: dict[str, tuple[Group, WorkerRecord]] = {}  # restarts that wait for their robots
        self._first_failures = FirstFailures()
        self.robots_changed: dict[tuple[str, str], Group] = {}
        self.notices = GroupNotices(head)
        self.claims = ClaimTable(head)
        self.names = NameReservations(head)

    # --- queries ---

    def __len__(self) -> int:
        return len(self._groups)

    def namespace_of(self, worker_id: str) -> str | None:
        """Return the namespace of a living worker, None if there is no such worker."""
        group = self._of_worker.get(worker_id)
        return None if group is None or group.workers[worker_id].gone else group.namespace

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def of_job(self, namespace: str) -> list[Group]:
        return self._of_job.of(namespace)

    def of_owner(self, incarnation: str) -> list[Group]:
        return self._of_owner.of(incarnation)

    def get(self, namespace: str, name: str) -> Group | None:
        return self._groups.get((namespace, name))

    def of_worker(self, worker_id: str) -> Group | None:
        """Return the group of a worker, which may have ended; None if the worker is unknown."""
        return self._of_worker.get(worker_id)

    def ended_unseen(self, worker_id: str) -> str | None:
        """Return why the head declared a worker ended without a report of its agentd; None if it has not done so."""
        return self._unseen.get(worker_id)

    def worker_on(self, node: Node, id: str) -> WorkerRecord | None:
        """Return the living worker with this id on this node. None if no node was told to start its launch yet."""
        group = self._of_worker.get(id)
        if group is None or group.launching:
            return None
        worker = group.workers[id]
        return worker if worker.node_id == node.id and not worker.gone else None

    def on_node(self, node_id: str) -> list[tuple[Group, list[WorkerRecord]]]:
        """Return each group that has living workers on a node, paired with those workers."""
        found: dict[tuple[str, str], tuple[Group, list[WorkerRecord]]] = {}
        for worker in self._on_node.of(node_id):
            group = self._of_worker[worker.id]
            found.setdefault(group.key, (group, []))[1].append(worker)
        return list(found.values())

    def workers_on(self, node_id: str) -> list[WorkerRecord]:
        """Return the living workers on a node."""
        return self._on_node.of(node_id)

    def never_started(self, worker: WorkerRecord, reason: str) -> None:
        """Record the end of a worker that was stopped before its node was told to start it."""
        self._send_stop([worker], 0.0, reason)  # its agentd may have been told by a repeated order
        worker.exit = ExitReport("stopped", reason=reason)
        self._step(worker, "exited")

    def look_at(self, group: Group) -> None:
        """Drop the group at the next flush if it has no living worker."""
        self._touched[group.key] = group

    def is_used(self, node_id: str) -> bool:
        return node_id in self._on_node

    def has_robots(self, group: Group) -> bool:
        return group.key in self._with_robots

    def with_robots(self) -> list[Group]:
        """Return the groups in which at least one worker, living or ended, claims a robot."""
        return list(self._with_robots.values())

    def has_ended(self, spec: WorkerSpec) -> bool:
        """Return True if the worker belongs to a group that this head has recorded as ended."""
        return self._ended.has((spec.namespace, spec.group), spec.id)

    def ended(self, namespace: str, name: str, token: str = "") -> GroupState | None:
        """Return the final state of the last ended group of this name, with the job's *token*; None if unknown."""
        return self._ended.get((namespace, name), token)

    # --- groups come and change ---

    def enter(self, group: Group) -> None:
        """Add a new group. Its name must be free; workers are added by `add`."""
        self._ended.forget(group.key)
        self._put(group)

    def adopt(self, group: Group, worker: WorkerRecord) -> None:
        """Add a worker that belongs to no launch request, and its *group* if that is new; notify the group's clients.

        The worker was reported after a restart of the head, or replaces a failed worker.
        """
        node = self._head.nodes.get(worker.node_id)
        if node is not None:
            self._head.nodes.has_job(node, group.namespace)
        self._put(group)
        self.add(group, worker)
        self.changed(worker)

    def _put(self, group: Group) -> None:
        self._head.early.note(group.key)
        self._groups[group.key] = group
        self._of_job.add(group.namespace, group.name, group)
        self._of_owner.add(group.owner, group.key, group)
        for incarnation in group.subscribers:
            self._subscribed.add(incarnation, group.key, group)

    def add(self, group: Group, worker: WorkerRecord) -> None:
        group.put(worker)
        self._of_worker[worker.id] = group
        self._head.early.note(worker.id)
        self._head.early.note(group.key)
        self._on_node.add(worker.node_id, worker.id, worker)
        if worker.spec.claims:
            self._with_robots[group.key] = self.robots_changed[group.key] = group

    def subscribe(self, group: Group, client: Client) -> None:
        """Send *client* all later changes of this group's workers. Its owner gets them anyway."""
        if client.incarnation != group.owner:
            group.subscribers[client.incarnation] = None
            self._subscribed.add(client.incarnation, group.key, group)

    def give_to(self, group: Group, owner: str) -> None:
        """Detach a group: from now on the client *owner* owns it, no client if that is "". Tell its workers' nodes."""
        self._of_owner.discard(group.owner, group.key)
        group.owner, group.detached, group.unclaimed = owner, True, False
        self._head.early.note(group.key)
        self._of_owner.add(owner, group.key, group)
        self.robots_changed[group.key] = group
        self._head.slices.start(self._head.group_slices.tell_nodes(group, list(group.workers.values())))

    def start(self, node_id: str, group: Group, specs: list[WorkerSpec]) -> None:
        """Order the agentd of a node to start these workers of a group. It starts no worker that it has already."""
        node = self._head.nodes.get(node_id)
        if specs and node is not None:
            self._head.nodes.has_job(node, group.namespace)
            detail = group.detail if group.described_on(node_id) else ""
            order = StartWorkers(specs, group.owner, group.cls, detail, group.detached, owner_of(self._head, group))
            self._head.emit(Notify(node.peer, order.asked_by(self._head.admission.of_group(group))))

    def changed(self, worker: WorkerRecord) -> None:
        """Note that this worker's state has changed, for the group's owner and subscribers."""
        group = self._of_worker[worker.id]
        self.notices.changed(group, worker)
        self._touched[group.key] = group

    def resend(self, client: Client) -> None:
        """Send a client the state of all workers in its groups at the next flush, because it has said hello.

        The groups are those that the client owns or is subscribed to.
        """
        self._returned[client.incarnation] = client
        self._head.robots.owner_changed(client.incarnation)

    # --- what agentds report ---

    def ready(self, node: Node, report: WorkerReady) -> None:
        """Record that a worker is running, with the process id, endpoint and ports that its agentd reports."""
        worker = self.worker_on(node, report.id)
        if worker is not None:
            worker.pid, worker.endpoint = report.pid, report.endpoint
            worker.port, worker.master_port = report.port, report.master_port
            self._step(worker, "ready")

    def exited(self, node: Node, id: str, exit: ExitReport) -> None:
        """Record the end of a worker's process as its agentd reports it.

        If the worker's restart policy says so, schedule the restart of its rank.
        """
        worker, robot = self.worker_on(node, id), self.claims.workers.get(id)
        if LEFT in exit.reason and robot is not None and robot.node_id == node.id:
            self._head.robots.left[id] = robot
        if worker is not None and worker.life is not WorkerLife.RESTARTING:  # that one has no process yet
            self._finish(worker, node, exit)
        elif self._unseen.get(id) is not None:  # it was declared lost
            self.claims.ended(id, node.id)
            self.names.ended(id, node.id)

    def lease_ended(self, node: Node, id: str, text: str) -> None:
        """Stop the groups with robots that a robot worker owns, because its lease has ended: they inherited it."""
        worker = self.worker_on(node, id)
        if worker is None:
            return
        clients = [self._head.clients.of_worker(id), *self._head.clients.below(id)]
        for client in filter(None, clients):
            for group in self._of_owner.of(client.incarnation):
                if self.has_robots(group) and not group.stopping:
                    self.stop_group(group, f"{worker.spec.group}:{worker.spec.rank} launched it: {text}")

    def missing(self, worker: WorkerRecord, node: Node, reason: str) -> None:
        """Record that a worker has ended, because the agentd of its node is connected and does not have the worker."""
        self._finish(worker, node, ExitReport("exited", reason=reason))

    def _finish(self, worker: WorkerRecord, node: Node, exit: ExitReport) -> None:
        group, id, now = self._of_worker[worker.id], worker.id, self._head.now
        worker.exit = self._first_failures.annotate(group, worker, node.name, exit, now)
        if group.orphaned and exit.kind == "stopped":
            worker.exit = replace(exit, reason=group.orphaned)
        stopped = worker.spec.claims and self._head.robots.in_force(group.namespace)
        restart = None if stopped else self._restarts.after(group, worker, now)
        if restart is not None:  # before the end is announced: no other group gets its robot in between
            successor, due = restart
            self._restart_timers[successor.id] = self._head.timers.at(due, lambda: self._restart(group, successor))
            self.adopt(group, successor)
            self.claims.take(group, successor, node)
        self._step(worker, "exited")
        if restart is not None:
            group.remove(worker)
            del self._of_worker[id]
            self.notices.replaced(group, id)
            if due <= now:  # no back-off
                self._restart(group, successor)

    def _restart(self, group: Group, worker: WorkerRecord) -> None:
        """Start the next incarnation of a failed worker after its back-off, if its node still takes workers.

        Otherwise the worker is gone, and its exit report says why.
        """
        self._withdraw_restart(worker)
        if self.claims.busy(group, worker):  # what this rank launched before may still move its robots
            hold_s = self._head.timing.rank_hold_s
            self._restart_timers[worker.id] = self._head.timers.at(
                self._head.now + hold_s, lambda: self._restart(group, worker)
            )
            self._blocked[worker.id] = group, worker
            return
        node = self._head.nodes.get(worker.node_id)
        usable = node is not None and node.usable
        closed = self._head.admission.may_restart(node, group, worker) if node is not None and usable else ""
        if node is not None and usable and not closed:
            self._step(worker, "restart")
            self.start(node.id, group, [worker.spec])
        elif node is not None and (closed or node.draining):
            worker.exit = not_restarted(worker.exit, closed or f"its node is {node.condition}")
            self._step(worker, "stop")
        else:
            self.lost(worker, "it was to be started again, and its node takes no workers")

    def robots_left(self) -> None:
        """Start the ranks again that wait until nothing else holds their robots."""
        blocked, self._blocked = self._blocked, {}
        for id, (group, worker) in blocked.items():
            if id in self._restart_timers:  # else it was stopped meanwhile
                self._restart(group, worker)

    # --- workers are lost ---

    def node_lost(self, node: Node, reason: str, certain: bool) -> None:
        """Declare all workers lost whose node is gone.

        If *certain* is True, the node's agentd said goodbye and the workers have ended. Otherwise they may still be
        running: the head reserves their robots and group names for a while, and refuses the workers when they return.
        """
        work = self._head.group_slices.node_lost(node, f"node {node.name}: {reason}", certain)
        self._head.slices.start(work, [node_key(node.id)])

    def lose(self, worker: WorkerRecord, node: Node, reason: str) -> None:
        """Declare a worker lost although its node's agentd is registered, and order that agentd to stop the worker."""
        self._send_stop([worker], 0.0, reason)
        self._unseen.add(worker.id, reason, by=node.member)
        self.lost(worker, reason)
        self.claims.lose(worker, False)

    def lost(self, worker: WorkerRecord, reason: str, exit: ExitReport | None = None) -> None:
        """Record that a worker was lost. *exit* is its exit report if an earlier head has told a client of its end."""
        worker.exit = exit or ExitReport("node_lost", reason=reason)
        self._step(worker, "node_lost")

    def abandon(self, worker_id: str, reason: str, by: Member) -> None:
        """Refuse this worker if its node reports it later, because the head has told a client that the worker ended.

        *by* is the member of that client, in whose quota the tombstone counts.
        """
        self._unseen.add(worker_id, reason, by=by)

    # --- owners end ---

    def client_gone(self, incarnation: str, client: Client | None) -> None:
        """Stop the groups that an ended client owns, and end its subscriptions.

        *client* is None if the client has sent no hello to this head.
        """
        for group in self._subscribed.of(incarnation):
            group.subscribers.pop(incarnation, None)
            self._subscribed.discard(incarnation, group.key)
        owned = self._of_owner.of(incarnation)
        self._head.slices.start(self._orphans.end(owned, client), speaker=self._head.speaker)

    # --- stops ---

    def stop_group(self, group: Group, reason: str) -> None:
        """Stop a group for this *reason* without a request. SIGKILL follows after `Timing.orphan_grace_s`."""
        self.stop(group, self._head.timing.orphan_grace_s, reason)

    def stop(self, group: Group, grace_s: float, reason: str = "") -> None:
        """Stop all workers of a group, with *grace_s* seconds between SIGTERM and SIGKILL.

        *reason* says why for people; "" if the group's owner asked for it. Workers with robots, and those that wait for
        their restart, are stopped at once, the others in slices.
        """
        group.stopping = True
        self._head.early.note(group.key)
        workers = list(group.workers.values())
        if len(workers) > PIECE:
            urgent = list(group.robots.values())
            urgent += [group.workers[id] for id in self._restart_timers if id in group.workers]
            self._stop_now(urgent, grace_s, reason)
            self._head.slices.start(self._stop_rest(workers, grace_s, reason))
        else:
            self.stop_workers(workers, grace_s, reason)

    def stop_workers(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str = "") -> None:
        """Stop workers on any nodes, with *grace_s* seconds between SIGTERM and SIGKILL.

        *reason* says why for people; "" if the group's owner asked for it.
        """
        robots = [one for one in workers if one.spec.claims] if self._with_robots else []  # at once, however many
        self._stop_now(robots, grace_s, reason)
        others = [one for one in workers if not one.spec.claims] if robots else workers
        self._head.slices.start(self._stop_rest(others, grace_s, reason))

    def _stop_rest(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str) -> Sliced[None]:
        for some, more in pieces(workers):
            self._stop_now(some, grace_s, reason)
            if more:
                yield

    def _stop_now(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str) -> None:
        for worker in workers:
            if not worker.gone:  # it may end with the one before, which may have owned this group
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
        """Resend the orders to stop robot workers of this node, because earlier messages may have been lost."""
        for order in self._robot_stops.get(node.id, {}).values() if self._robot_stops else ():
            self._head.emit(Notify(node.peer, order))

    # --- ends of groups ---

    def flush(self) -> None:
        """Send clients that have said hello the states of their workers; drop each group whose last worker is gone."""
        returned, self._returned = self._returned, {}
        for incarnation, client in returned.items():
            groups = [*self._of_owner.of(incarnation), *self._subscribed.of(incarnation)]
            self._touched.update((group.key, group) for group in groups)
            if groups:
                self._head.slices.start(self._head.group_slices.send_all(groups, client), speaker=client.member)
        touched, self._touched = self._touched, {}
        for group in touched.values():
            if self._over(group) and not self._head.clients.expected(group.owner):
                self._head.slices.start(self._forget(group), [group_key(*group.key)])

    def release(self, group: Group) -> Sliced[bool]:
        """If a group's workers are all gone, drop the group, even if its owner is still expected to return.

        Returns:
            True if the group was dropped and its name is free; False if workers of the group may still be running.
        """
        return self._over(group) and (yield from self._forget(group))

    def _over(self, group: Group) -> bool:
        if group.launching or group.ending or self._groups.get(group.key) is not group:
            return False
        return group.gone and (group.whole or self._head.early.over)

    def _forget(self, group: Group) -> Sliced[bool]:
        group.ending = True
        yield from self.notices.flush_group(group)
        states = yield from states_of(group)
        ended = yield from of_end(group, states)
        if group.living:  # a node has reported one of its workers meanwhile
            group.ending = False
            return False
        for peer, id in group.waiting:
            self._head.emit(Answer(peer, id, Done()))
        del self._groups[group.key]
        self._head.early.note(group.key)
        self._of_job.discard(group.namespace, group.name)
        self._of_owner.discard(group.owner, group.key)
        for incarnation in group.subscribers:
            self._subscribed.discard(incarnation, group.key)
        for past in (self._restarts, self._first_failures, self._head.resizes):
            past.forget(group)
        if self._with_robots.pop(group.key, None) is not None:
            self.robots_changed[group.key] = group
        self._ended.add(group.state("", states))
        self._head.emit(ended)
        self.forget_job(group.namespace)
        for ids, more in pieces(list(group.workers), 5 * PIECE):
            for worker_id in ids:
                group.remove(group.workers[worker_id])  # here: to free the memory of 100,000 at once takes 50 ms
                if self._of_worker.get(worker_id) is group:
                    del self._of_worker[worker_id]
            if self.ended(*group.key) is None:  # the job is over
                del states[: len(ids)]
            if more:
                yield
        return True

    def forget_job(self, namespace: str) -> None:
        """Drop what the head keeps of a job if the job has neither groups nor clients any more."""
        if namespace not in self._of_job and not self._head.clients.has_job(namespace):
            self._head.jobs.forget(namespace)
            self._ended.forget_job(namespace)
            self._head.nodes.forget_job(namespace)

    def _step(self, worker: WorkerRecord, event: str) -> None:
        before = worker.life
        worker.step(event)
        if worker.life is before:
            return
        event_of_life = of_life(worker, before, self._head.nodes.named(worker.node_id))
        if event_of_life is not None:
            self._head.emit(event_of_life)
        self.changed(worker)
        group = self._of_worker[worker.id]
        if worker.spec.claims:
            self.robots_changed[group.key] = group
        if worker.gone:
            self._orphans.owner_ended(worker)
            group.living.discard(worker.id)
            self._on_node.discard(worker.node_id, worker.id)
            self._head.drains.changed(worker.node_id)
            self._withdraw_restart(worker)
            stops = self._robot_stops.get(worker.node_id)
            if stops is not None and stops.pop(worker.id, None) is not None and not stops:
                del self._robot_stops[worker.node_id]
            if event == "exited" or before is WorkerLife.RESTARTING:
                self.claims.free(worker)
            self._head.worker_gone(worker.id, "" if event == "exited" or worker.exit is None else worker.exit.reason)
            if worker.spec.rank >= group.world_size:  # it was being added, or has left
                group.remove(worker)
                del self._of_worker[worker.id]
                self._head.resizes.left(group)
