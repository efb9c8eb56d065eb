"""Groups: names, owners, workers, and who hears of them. Pure.

House rules: a worker's state changes in `_step` alone; `flush` sends what changed since the last
flush, one WorkerChanged per group and handle; a name is free when its last worker is gone.

Orders to agents that workers stop. Pure.

A message may be lost with its connection. An agent that says hello again is told again; robots do not wait for that:
their agents are reminded at each of their beats.

Names of groups whose workers may still run where the head cannot see them: nobody else gets one meanwhile. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from rlinf_actors.head.client_table import ClientTable
from rlinf_actors.head.commands import WORKER, Answer, Emit, Notify, Refusal, Snapshot, Timing
from rlinf_actors.head.event_log import of_end, of_life
from rlinf_actors.head.hardware_claims import ClaimTable, owner_of
from rlinf_actors.head.node_table import NodeTable
from rlinf_actors.head.quotas import Tombstones
from rlinf_actors.head.records import Client, Group, Node, WorkerLife, WorkerRecord
from rlinf_actors.head.restarts import EndedGroups, FirstEnds, Restarts, not_restarted
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import StartWorkers, StopWorkers, WorkerReady
from rlinf_actors.wire.client_messages import Done, WorkerChanged
from rlinf_actors.wire.values import ExitReport, GroupState, LeaseState, WorkerSpec, ending


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

    def send(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str) -> None:
        """Have these workers stopped.

        Args:
            workers: of any nodes.
            grace_s: seconds between SIGTERM and SIGKILL.
            reason: where their owner does not want it.
        """
        of_node: dict[str, list[WorkerRecord]] = {}
        for worker in workers:
            of_node.setdefault(worker.node_id, []).append(worker)
        for node_id, there in of_node.items():
            for worker in there:
                if worker.spec.claims and not worker.gone:
                    self._robots.setdefault(node_id, {})[worker.id] = StopWorkers([worker.id], grace_s, reason)
            node = self._nodes.get(node_id)
            if node is not None:
                self._emit(Notify(node.peer, StopWorkers([worker.id for worker in there], grace_s, reason)))

    def ended(self, worker: WorkerRecord) -> None:
        """A worker is gone. Twice is fine."""
        robots = self._robots.get(worker.node_id)
        if robots is not None and robots.pop(worker.id, None) is not None and not robots:
            del self._robots[worker.node_id]

    def remind(self, node: Node) -> None:
        """An agent that is there is told again which robot workers are to stop."""
        for stop in self._robots.get(node.id, {}).values():
            self._emit(Notify(node.peer, stop))


@dataclass(frozen=True)
class _Lost:
    worker: str
    node_id: str
    node: str
    until: float


class NameReservations:
    """Workers that were lost with their nodes hold the names of their groups.

    A name is free again when the last of them is known to have ended, or when none can live any more.

    Args:
        hold_s: how long a lost node's workers may still be running, in seconds.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._lost: dict[tuple[str, str], dict[str, _Lost]] = {}
        self._keys: dict[str, tuple[str, str]] = {}

    def lost(self, group: Group, worker: WorkerRecord, node: Node, now: float) -> None:
        """A worker may live on, where nobody hears of it."""
        self._expire(now)
        one = _Lost(f"{group.name}:{worker.spec.rank}", node.id, node.name, now + self._hold_s)
        self._lost.setdefault(group.key, {})[worker.id] = one
        self._keys[worker.id] = group.key

    def ended(self, worker_id: str, node_id: str) -> None:
        """The agent of its node says that it has ended."""
        key = self._keys.get(worker_id)
        if key is not None and self._lost[key][worker_id].node_id == node_id:
            self._free(key, worker_id)

    def node_is_back(self, node_id: str, running: Container[str]) -> None:
        """A node is there again, with these workers: others of it have ended."""
        for key, lost in list(self._lost.items()):
            for id in [id for id, one in lost.items() if one.node_id == node_id and id not in running]:
                self._free(key, id)

    def check(self, namespace: str, name: str, now: float) -> None:
        """Whether a launch may have this name.

        Raises:
            Refusal: it is held; says by whom, and for how long at most.
        """
        self._expire(now)
        lost = self._lost.get((namespace, name))
        if lost:
            one = max(lost.values(), key=lambda one: one.until)
            raise Refusal(
                "name_in_use",
                f"the name {name!r} of namespace {namespace!r} is held for {one.until - now:.0f} s at most: worker "
                f"{one.worker} was lost with node {one.node} and may still run there. It is free as soon as that node "
                "is back; give this group another name, or launch it later",
            )

    def _expire(self, now: float) -> None:
        for key, lost in list(self._lost.items()):
            for id in [id for id, one in lost.items() if now >= one.until]:
                self._free(key, id)

    def _free(self, key: tuple[str, str], worker_id: str) -> None:
        lost = self._lost[key]
        del lost[worker_id], self._keys[worker_id]
        if not lost:
            del self._lost[key]


class GroupTable:
    """All groups.

    Args:
        timing: the head's timers.
        emit: takes commands.
        nodes: where workers run.
        clients: who owns groups.
        on_worker_gone: called with the id of a worker whose process has ended.
        settled: whether every node of an earlier head has said what it has, or is lost.
        before: what an earlier head at this place knew.
        now: when the head started.

    Attributes:
        claims: who holds which robot.
        names: which names are held by workers that nobody sees.
        retry: launches that wait for hardware are to be tried again.
    """

    def __init__(
        self,
        timing: Timing,
        emit: Emit,
        nodes: NodeTable,
        clients: ClientTable,
        on_worker_gone: Callable[[str], None],
        settled: Callable[[], bool],
        before: Snapshot,
        now: float,
    ) -> None:
        self._timing = timing
        self._emit = emit
        self._nodes = nodes
        self._clients = clients
        self._on_worker_gone = on_worker_gone
        self._settled = settled
        self.retry = False
        self._with_robots: dict[tuple[str, str], Group] = {}
        self._stops = Stops(emit, nodes)
        self._groups: dict[tuple[str, str], Group] = {}
        self._of_worker: dict[str, Group] = {}
        self._touched: dict[tuple[str, str], Group] = {}
        self._orphans: dict[str, list[Group]] = {}  # by the id of the worker that owned them, until it is known how
        self._ended = EndedGroups()
        self._unseen = Tombstones(WORKER, emit, before)
        self._restarts = Restarts()
        self._causes = FirstEnds()
        owner = partial(owner_of, clients=clients, nodes=nodes, of_worker=self._of_worker)
        self.claims = ClaimTable(timing.rank_hold_s, owner, now + timing.robot_settle_s)
        self.names = NameReservations(timing.rank_hold_s)

    # --- looking ---

    def __len__(self) -> int:
        return len(self._groups)

    def namespace_of(self, worker_id: str) -> str | None:
        """The namespace of a living worker."""
        group = self._of_worker.get(worker_id)
        return None if group is None or group.workers[worker_id].gone else group.namespace

    def states(self, sees: Callable[[str], bool]) -> list[GroupState]:
        """Groups of the namespaces that somebody sees; without tokens."""
        chosen = [group for group in self._groups.values() if sees(group.namespace)]
        return [group.state("") for group in sorted(chosen, key=lambda group: group.key)]

    def all(self) -> list[Group]:
        """Every group."""
        return list(self._groups.values())

    def get(self, namespace: str, name: str) -> Group | None:
        """The group of this name."""
        return self._groups.get((namespace, name))

    def of_worker(self, worker_id: str) -> Group | None:
        """The group that a worker, living or not, belongs to."""
        return self._of_worker.get(worker_id)

    def ended_unseen(self, worker_id: str) -> str | None:
        """Why its owner was told that a worker is gone, though nobody saw its end; None if that is not so."""
        return self._unseen.get(worker_id)

    def worker_on(self, node: Node, id: str) -> WorkerRecord | None:
        """A living worker of this node; None for one that has ended, or that another node speaks of."""
        group = self._of_worker.get(id)
        worker = group.workers[id] if group is not None else None
        return worker if worker is not None and worker.node_id == node.id and not worker.gone else None

    def changed(self, worker: WorkerRecord) -> None:
        """Who holds a handle is to hear how this worker is."""
        group = self._of_worker[worker.id]
        group.changed[worker.id] = worker
        self._touched[group.key] = group

    def on_node(self, node_id: str) -> Iterator[tuple[Group, list[WorkerRecord]]]:
        """The groups that run there, each with its workers there."""
        for group in self._groups.values():
            there = [worker for worker in group.workers.values() if worker.node_id == node_id and not worker.gone]
            if there:
                yield group, there

    def with_robots(self) -> list[Group]:
        """The groups that have, or had, workers with claims."""
        return list(self._with_robots.values())

    def uses(self, namespace: str) -> bool:
        """Whether a namespace has groups."""
        return any(group.namespace == namespace for group in self._groups.values())

    def leases(self, now: float) -> list[LeaseState]:
        """Who holds which robot, in every namespace: they are the cluster's."""
        return self.claims.states(now)

    # --- what agents say ---

    def ready(self, node: Node, said: WorkerReady) -> None:
        """A worker's runtime listens."""
        worker = self.worker_on(node, said.id)
        if worker is not None:
            worker.pid, worker.endpoint = said.pid, said.endpoint
            worker.port, worker.master_port = said.port, said.master_port
            self._step(worker, "ready")

    def exited(self, node: Node, id: str, exit_report: ExitReport, now: float) -> None:
        """A worker's process has ended; its rank may be started again."""
        worker = self.worker_on(node, id)
        if worker is not None and worker.life is not WorkerLife.RESTARTING:  # that one has no process yet
            self._finish(worker, node, exit_report, now)
        elif self._unseen.get(id) is not None:
            self.ended_after_all(id, node.id)

    def ended_after_all(self, id: str, node_id: str) -> None:
        """A worker that we lost from sight has ended, its node's agent says: what it held there is free."""
        self.claims.ended(id, node_id)
        self.names.ended(id, node_id)

    def missing(self, worker: WorkerRecord, node: Node, reason: str, now: float) -> None:
        """A worker's agent is there, and the worker is certainly not."""
        self._finish(worker, node, ExitReport("exited", reason=reason), now)

    def _finish(self, worker: WorkerRecord, node: Node, exit: ExitReport, now: float) -> None:
        group, id = self._of_worker[worker.id], worker.id
        worker.exit = self._causes.noted(group, worker, node.name, exit, now)
        if group.orphaned and exit.kind == "stopped":
            worker.exit = msgspec.structs.replace(exit, reason=group.orphaned)
        successor = self._restarts.ended(group, worker, now)
        if successor is not None:  # before the end is told: nobody gets its robot in between
            self.adopt(group, successor)
            self.claims.take(group, successor, node, now)
        self._step(worker, "exited")
        if successor is not None:
            del group.workers[id], group.changed[id], self._of_worker[id]

    def node_lost(self, node: Node, reason: str, certain: bool, now: float) -> None:
        """A node is gone, and its workers with it; *certain* if it said so itself, else they may still be running."""
        for group in list(self._groups.values()):
            for worker in group.workers.values():
                if worker.node_id == node.id and not worker.gone:
                    if not certain:  # it may outlive its agentd, and must not come back
                        self._unseen.add(worker.id, f"node {node.name}: {reason}", by=node.member)
                        if worker.life is not WorkerLife.RESTARTING:  # the one before it has ended
                            self.names.lost(group, worker, node, now)
                    self.lost(worker, f"node {node.name}: {reason}")
                    self.claims.lose(worker, certain, now)

    def enter(self, group: Group) -> None:
        """A group is about to get its workers, under a name that is free."""
        self._groups[group.key] = group
        self._ended.forget(group.key)

    def adopt(self, group: Group, worker: WorkerRecord) -> None:
        """A worker that is there, of a group from before this head started or one that was taken over already."""
        node = self._nodes.get(worker.node_id)
        if node is not None:
            node.jobs.add(group.namespace)
        self._groups[group.key] = group
        self.add(group, worker)
        group.changed[worker.id] = worker
        self._touched[group.key] = group

    def restart_due(self, now: float) -> None:
        """Start those again whose back-off is over."""
        for group, worker in self._restarts.take_due(now):
            node = self._nodes.get(worker.node_id)
            if node is not None and node.usable:
                self._step(worker, "restart")
                self.start(node.id, group, [worker.spec])
            elif node is not None and node.draining:
                worker.exit = not_restarted(worker.exit, f"its node is {node.condition}")
                self._step(worker, "stop")
            else:
                self.lost(worker, "it was to be started again, and its node takes no workers")

    def whole(self, namespace: str, name: str) -> bool:
        """Whether a group is known with all its workers."""
        group = self._groups.get((namespace, name))
        return group is not None and group.whole

    def unclaimed(self, namespace: str, name: str) -> bool:
        """Whether agents say whose group this is, and its owner has not said so yet."""
        group = self._groups.get((namespace, name))
        return group is not None and group.unclaimed and not group.stopping

    def ended(self, namespace: str, name: str, token: str = "") -> GroupState | None:
        """How the last group of this name has ended, with that token; None if there was none, or too long ago."""
        return self._ended.get((namespace, name), token)

    def give_up(self, worker_id: str, reason: str, by: Member) -> None:
        """A client was told that this worker has ended: it must not come back."""
        self._unseen.add(worker_id, reason, by=by)

    def settle(self) -> None:
        """Every node has come back, or is lost: what is gone is forgotten now."""
        self._touched.update(self._groups)

    def lose(self, worker: WorkerRecord, node: Node, reason: str, now: float) -> None:
        """A worker has ended where we cannot see it; if its agent still has it when it hears us, it is stopped."""
        self._stops.send([worker], 0.0, reason)
        self._unseen.add(worker.id, reason, by=node.member)
        self.lost(worker, reason)
        self.claims.lose(worker, False, now)

    def lost(self, worker: WorkerRecord, reason: str, exit: ExitReport | None = None) -> None:
        """A worker is out of our sight for good; *exit* is how it ended, where an earlier head has said so."""
        worker.exit = exit or ExitReport("node_lost", reason=reason)
        self._step(worker, "node_lost")

    def client_gone(self, incarnation: str, client: Client | None) -> None:
        """A client has ended: its groups are stopped, and it hears of no other any more.

        Args:
            incarnation: of the client.
            client: its record, None for a client that this head has never met.
        """
        for group in list(self._groups.values()):
            group.subscribers.pop(incarnation, None)
            if group.owner == incarnation:
                self._orphan(group, client)
                self.stop_group(group, group.orphaned)
                self._touched[group.key] = group

    def _orphan(self, group: Group, client: Client | None) -> None:
        """Note whose end ends a group. How a worker ended may be told after its process was seen to end."""
        group.orphaned = "its owner ended"
        if client is None:
            return
        owners = self._of_worker.get(client.worker_id)
        owner = owners.workers[client.worker_id] if owners is not None else None
        if owner is None:
            group.orphaned += f": {client}, {self._clients.ended(client.incarnation)}"
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
        return f"worker {worker.spec.group}:{worker.spec.rank} on node {self._nodes.hostname(worker.node_id)}"

    def tell_all(self, client: Client) -> None:
        """A client is back: say how all workers of its groups are."""
        for group in self._groups.values():
            if group.owner == client.incarnation or client.incarnation in group.subscribers:
                group.changed.update(group.workers)
                self._touched[group.key] = group

    # --- the end of a handle ---

    def flush(self) -> None:
        """Say what has changed, answer those who wait for an end, and free names."""
        touched, self._touched = self._touched, {}
        for group in touched.values():
            if group.changed:
                states = [worker.state() for worker in group.changed.values()]
                group.changed.clear()
                message = WorkerChanged(group.namespace, group.name, states)
                for incarnation in (group.owner, *group.subscribers):
                    client = self._clients.get(incarnation)
                    if client is not None:
                        self._emit(Notify(client.peer, message))
            if self._over(group) and not self._clients.awaited(group.owner):
                self._forget(group)

    def release(self, group: Group) -> bool:
        """Forget a group that is over, and only kept for an owner who is awaited; True if its name is free now."""
        over = self._over(group)
        if over:
            self._forget(group)
        return over

    def _over(self, group: Group) -> bool:
        return group.gone and (group.whole or self._settled())

    def _forget(self, group: Group) -> None:
        for peer, id in group.waiting:
            self._emit(Answer(peer, id, Done()))
        del self._groups[group.key]
        self._restarts.forget(group)
        self._causes.forget(group)
        self._with_robots.pop(group.key, None)
        for worker_id in group.workers:
            if self._of_worker.get(worker_id) is group:
                del self._of_worker[worker_id]
        self._ended.add(group.state(""))
        self._emit(of_end(group))
        self.forget_job(group.namespace)

    def retry_waiting(self) -> None:
        """What a launch that waits for hardware may do has changed: see at once."""
        self.retry = True

    def next_deadline(self) -> float:
        """When `restart_due` has something to do, infinity for never."""
        return self._restarts.next_deadline()

    def forget_job(self, namespace: str) -> None:
        """Forget a job if it has neither groups nor members."""
        if not self.uses(namespace) and self._clients.forget_job(namespace):
            self._ended.forget_job(namespace)
            for node in self._nodes.alive():
                node.jobs.discard(namespace)

    # --- inside ---

    def add(self, group: Group, worker: WorkerRecord) -> None:
        """A worker of a group from now on."""
        group.workers[worker.id] = worker
        group.living.add(worker.id)
        self._of_worker[worker.id] = group
        if worker.spec.claims:
            self._with_robots[group.key] = group

    def start(self, node_id: str, group: Group, specs: list[WorkerSpec]) -> None:
        """Ask a node for workers of a group."""
        node = self._nodes.get(node_id)
        if specs and node is not None:
            node.jobs.add(group.namespace)
            self._emit(Notify(node.peer, StartWorkers(specs, group.owner, group.cls, group.detail, group.detached)))

    def give_to(self, group: Group, owner: str) -> None:
        """A group that is up belongs to this client from now on, "" for none; its nodes are told."""
        group.owner, group.detached, group.unclaimed = owner, True, False
        placed: dict[str, list[WorkerSpec]] = {}
        for worker in group.workers.values():
            if not worker.gone:
                placed.setdefault(worker.node_id, []).append(worker.spec)
        for node_id, specs in placed.items():
            self.start(node_id, group, specs)

    def stop_group(self, group: Group, reason: str) -> None:
        """Stop a group that its owner does not stop."""
        self.stop(group, self._timing.orphan_grace_s, reason)

    def stop_workers(self, workers: Sequence[WorkerRecord], grace_s: float, reason: str = "") -> None:
        """Stop some workers; *reason* where their owner does not want it."""
        for worker in workers:
            if self._restarts.withdraw(worker.id):
                worker.exit = ExitReport("stopped", reason=reason)
            self._step(worker, "stop")
        self._stops.send([worker for worker in workers if not worker.gone], grace_s, reason)

    def stop(self, group: Group, grace_s: float, reason: str = "") -> None:
        """Stop a group; *reason* where its owner does not want it."""
        group.stopping = True
        self.stop_workers([worker for worker in group.workers.values() if not worker.gone], grace_s, reason)

    def remind(self, node: Node) -> None:
        """An agent that is there is told again which robot workers are to stop: a message may have been lost."""
        self._stops.remind(node)

    def _step(self, worker: WorkerRecord, event: str) -> None:
        before = worker.life
        worker.step(event)
        if worker.life is not before:
            news = of_life(worker, before, self._nodes.hostname(worker.node_id))
            if news is not None:
                self._emit(news)
            self.changed(worker)
            group = self._of_worker[worker.id]
            if worker.gone:
                self._owner_ended(worker)
                group.living.discard(worker.id)
                self._restarts.withdraw(worker.id)
                self._stops.ended(worker)
                if event == "exited" or before is WorkerLife.RESTARTING:
                    self.claims.free(worker)
                self._on_worker_gone(worker.id)
