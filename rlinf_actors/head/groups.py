"""Groups: names, owners, workers, and who hears of them. Pure.

House rules: a worker's state changes in `_step` alone; `flush` sends what changed since the last
flush, one WorkerChanged per group and handle; a name is free when its last worker is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from rlinf_actors.head.checks import check_launch, node_for, own_namespace
from rlinf_actors.head.claims import IN_USE, ClaimTable, contradiction, owner_of
from rlinf_actors.head.clients import ClientTable
from rlinf_actors.head.commands import Answer, Emit, Ended, Notify, Record, Refused, Timing
from rlinf_actors.head.ended import EndedGroups
from rlinf_actors.head.nodes import NodeTable
from rlinf_actors.head.records import Client, Group, Node, Worker
from rlinf_actors.head.transitions import WorkerLife
from rlinf_actors.head.waiting import WaitingLaunches
from rlinf_actors.wire.messages import (
    Done,
    FindGroup,
    Launch,
    Launched,
    StartWorkers,
    StopGroup,
    StopWorkers,
    WorkerChanged,
    WorkerReady,
)
from rlinf_actors.wire.values import ExitReport, GroupState, LeaseState, RunningWorker, WorkerSpec


class GroupTable:
    """All groups.

    Args:
        timing: the head's timers.
        emit: takes commands.
        nodes: where workers run.
        clients: who owns groups.
        on_worker_gone: called with the id of a worker whose process has ended.
        allow: raises Refused for a launch that must not be now, whenever it was asked for.
        now: when the head started.
    """

    def __init__(
        self,
        timing: Timing,
        emit: Emit,
        nodes: NodeTable,
        clients: ClientTable,
        on_worker_gone: Callable[[str], None],
        allow: Callable[[Launch], None],
        now: float,
    ) -> None:
        self._timing = timing
        self._emit = emit
        self._nodes = nodes
        self._clients = clients
        self._on_worker_gone = on_worker_gone
        self._allow = allow
        self._with_robots: dict[tuple[str, str], Group] = {}
        self._stopping_robots: dict[str, dict[str, StopWorkers]] = {}
        self._retry = False
        self._groups: dict[tuple[str, str], Group] = {}
        self._of_worker: dict[str, Group] = {}
        self._touched: dict[tuple[str, str], Group] = {}
        self._ended = EndedGroups()
        self._unseen = Ended()
        owner = partial(owner_of, clients=clients, nodes=nodes, of_worker=self._of_worker)
        self._claims = ClaimTable(timing.rank_hold_s, owner, now + timing.robot_settle_s)
        self._waiting = WaitingLaunches(emit, clients, self._launch)

    # --- looking ---

    def __len__(self) -> int:
        return len(self._groups)

    def namespace_of(self, worker_id: str) -> str | None:
        """The namespace of a living worker."""
        group = self._of_worker.get(worker_id)
        return None if group is None or group.workers[worker_id].gone else group.namespace

    def states(self, namespace: str | None) -> list[GroupState]:
        """Groups of one namespace, or all; without tokens."""
        chosen = [group for group in self._groups.values() if namespace in (None, group.namespace)]
        return [group.state("") for group in sorted(chosen, key=lambda group: group.key)]

    def with_robots(self) -> list[Group]:
        """The groups that have, or had, workers with claims."""
        return list(self._with_robots.values())

    def uses(self, namespace: str) -> bool:
        """Whether a namespace has groups."""
        return any(group.namespace == namespace for group in self._groups.values())

    def leases(self, now: float) -> list[LeaseState]:
        """Who holds which robot, in every namespace: they are the cluster's."""
        return self._claims.states(now)

    # --- what clients ask ---

    def launch(self, client: Client, peer: bytes, id: int, asked: Launch, now: float) -> Launched | None:
        """Reserve the name and start the workers; None: answered later, once the hardware is free.

        Raises:
            Refused: the name is taken, a node is not there, a robot is in use, or the request makes no sense.
        """
        try:
            return self._launch(client, asked, now)
        except Refused as refused:
            patience_s = max(asked.wait_s, self._claims.settled - now)
            if refused.kind != IN_USE or patience_s <= 0:
                raise
            self._retry = self._retry or now < self._claims.settled
            self._waiting.add(client, peer, id, asked, refused.text, patience_s, now)
            return None

    def _launch(self, client: Client, asked: Launch, now: float) -> Launched:
        own_namespace(client, asked.namespace)
        self._allow(asked)
        taken = self._groups.get((asked.namespace, asked.group))
        if taken is not None:
            raise Refused(
                "name_in_use",
                f"a group named {asked.group!r} is {taken.summary} in namespace {asked.namespace!r}: "
                "give this one another name, or shut that one down first",
            )
        by_rank = self._nodes.by_rank()
        check_launch(asked, self._of_worker, by_rank)
        self._claims.check([claim for spec in asked.workers for claim in spec.claims], now)
        token = self._clients.token(asked.namespace)
        owner = (self._clients.driver_of(asked.namespace) if asked.detached else None) or client
        group = Group(asked.namespace, asked.group, asked.cls, owner.incarnation, asked.detail)
        if owner is not client:
            group.subscribers[client.incarnation] = None
        placed: dict[str, list[WorkerSpec]] = {}
        for spec in asked.workers:
            node = node_for(spec, by_rank)
            spec = msgspec.structs.replace(spec, token=token)
            placed.setdefault(node.id, []).append(spec)
            worker = Worker(spec, node.id, node.report.ip)
            self._add(group, worker)
            self._claims.take(group, worker, node, now)
        self._groups[group.key] = group
        self._ended.forget(group.key)
        for node_id, specs in placed.items():
            self._start(node_id, group, specs)
        return Launched(group.state(token))

    def find(self, client: Client, asked: FindGroup) -> Launched:
        """Describe a group and subscribe to it.

        Raises:
            Refused: there is none of that name.
        """
        namespace, name = asked.namespace, asked.group
        own_namespace(client, namespace)
        group = self._groups.get((namespace, name))
        if group is None:
            ended = self._ended.get((namespace, name), self._clients.token(namespace)) if asked.ended else None
            if ended is not None:
                return Launched(ended)
            there = sorted(group.name for group in self._groups.values() if group.namespace == namespace)
            known = f"there are {', '.join(map(repr, there))}" if there else "there is none at all"
            raise Refused("not_found", f"no group named {name!r} is running in namespace {namespace!r}; {known}")
        if client.incarnation != group.owner:
            group.subscribers[client.incarnation] = None
        return Launched(group.state(self._clients.token(namespace)))

    def stop(self, client: Client, peer: bytes, id: int, asked: StopGroup) -> None:
        """Stop a group; answered when its workers are gone, at once if there is none of that name."""
        own_namespace(client, asked.namespace)
        self._waiting.withdraw(client, asked.group)
        group = self._groups.get((asked.namespace, asked.group))
        if group is None:
            self._emit(Answer(peer, id, Done()))
            return
        group.waiting.append((peer, id))
        self._stop(group, asked.grace_s)

    def stop_all(self) -> None:
        """Stop every group: the cluster ends."""
        self._waiting.refuse_all("the cluster is being stopped")
        for group in list(self._groups.values()):
            self._stop(group, self._timing.stop_grace_s)

    # --- what agents say ---

    def ready(self, node: Node, said: WorkerReady) -> None:
        """A worker's runtime listens."""
        worker = self._worker_on(node, said.id)
        if worker is not None:
            worker.pid, worker.endpoint = said.pid, said.endpoint
            worker.port, worker.master_port = said.port, said.master_port
            self._step(worker, "ready")

    def exited(self, node: Node, id: str, exit_report: ExitReport) -> None:
        """A worker's process has ended."""
        worker = self._worker_on(node, id)
        if worker is not None:
            worker.exit = exit_report
            self._step(worker, "exited")
        elif self._unseen.get(id) is not None:
            self._claims.ended(id)

    def reconcile(self, node: Node, there: Sequence[RunningWorker], known: bool, now: float) -> None:
        """Bring our view of a node in line with its agent's; *known* if that is the one that we knew before.

        Workers that we do not know belong to groups from before this head started: they are taken over. Workers
        that we have and it does not: those that are to start are asked for once more (the agent ignores ids that it
        has), the others have ended unseen.
        """
        for running in there:
            self._take_over(node, running, now)
        listed = {running.spec.id for running in there}
        self._claims.node_is_back(node.id, listed, known, now)
        for group in list(self._groups.values()):
            missing = [w for w in group.workers.values() if w.node_id == node.id and not w.gone and w.id not in listed]
            wanted = [worker for worker in missing if worker.life is WorkerLife.STARTING]
            self._start(node.id, group, [worker.spec for worker in wanted])
            for worker in missing:
                if worker not in wanted:
                    worker.exit = ExitReport("exited", reason="its agent does not have it any more")
                    self._step(worker, "exited")

    def node_lost(self, node: Node, reason: str, certain: bool, now: float) -> None:
        """A node is gone, and its workers with it; *certain* if it said so itself, else they may still be running."""
        for group in list(self._groups.values()):
            for worker in group.workers.values():
                if worker.node_id == node.id and not worker.gone:
                    self._lose(worker, f"node {node.name}: {reason}")
                    self._claims.lose(worker, certain, now)

    def lose(self, worker: Worker, reason: str, now: float) -> None:
        """A worker has ended where we cannot see it; if its agent still has it when it hears us, it is stopped."""
        self._send_stop([worker], 0.0, reason)
        self._unseen.add(worker.id, reason)
        self._lose(worker, reason)
        self._claims.lose(worker, False, now)

    def _lose(self, worker: Worker, reason: str) -> None:
        worker.exit = ExitReport("node_lost", reason=reason)
        self._step(worker, "node_lost")

    def client_gone(self, incarnation: str) -> None:
        """A client has ended: its groups are stopped, and it hears of no other any more."""
        for group in list(self._groups.values()):
            group.subscribers.pop(incarnation, None)
            if group.owner == incarnation:
                self.stop_group(group, "its owner ended")
                self._touched[group.key] = group

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
            if group.gone and not self._clients.awaited(group.owner):
                self._forget(group)

    def _forget(self, group: Group) -> None:
        for peer, id in group.waiting:
            self._emit(Answer(peer, id, Done()))
        del self._groups[group.key]
        self._with_robots.pop(group.key, None)
        for worker_id in group.workers:
            del self._of_worker[worker_id]
        self._ended.add(group.state(""))
        self.forget_job(group.namespace)

    def tick(self, now: float) -> None:
        """Launch what waited for hardware that is free by now."""
        freed = self._claims.tick(now)
        if self._retry and now >= self._claims.settled:
            freed, self._retry = True, False
        self._waiting.tick(freed, now)

    def retry_waiting(self) -> None:
        """What a waiting launch may do has changed: see at once."""
        self._retry = True

    def next_deadline(self) -> float:
        """When `tick` has something to do, infinity for never."""
        settled = self._claims.settled if self._retry else math.inf
        return min(self._claims.next_deadline(), self._waiting.next_deadline(), settled)

    def forget_job(self, namespace: str) -> None:
        """Forget a job if it has neither groups nor members."""
        if not self.uses(namespace) and self._clients.forget_job(namespace):
            self._ended.forget_job(namespace)

    # --- inside ---

    def _add(self, group: Group, worker: Worker) -> None:
        group.workers[worker.id] = worker
        group.living.add(worker.id)
        self._of_worker[worker.id] = group
        if worker.spec.claims:
            self._with_robots[group.key] = group

    def _start(self, node_id: str, group: Group, specs: list[WorkerSpec]) -> None:
        node = self._nodes.get(node_id)
        if specs and node is not None:
            self._emit(Notify(node.peer, StartWorkers(specs, group.owner, group.cls, group.detail)))

    def stop_group(self, group: Group, reason: str) -> None:
        """Stop a group that its owner does not stop."""
        self._stop(group, self._timing.orphan_grace_s, reason)

    def stop_workers(self, workers: Sequence[Worker], grace_s: float, reason: str = "") -> None:
        """Stop some workers; *reason* where their owner does not want it."""
        for worker in workers:
            self._step(worker, "stop")
        self._send_stop(workers, grace_s, reason)

    def _stop(self, group: Group, grace_s: float, reason: str = "") -> None:
        group.stopping = True
        self.stop_workers([worker for worker in group.workers.values() if not worker.gone], grace_s, reason)

    def _send_stop(self, workers: Sequence[Worker], grace_s: float, reason: str) -> None:
        for node_id in dict.fromkeys(worker.node_id for worker in workers):
            node = self._nodes.get(node_id)
            ids = [worker.id for worker in workers if worker.node_id == node_id]
            robots = [worker for worker in workers if worker.node_id == node_id and worker.spec.claims]
            for worker in robots:
                if not worker.gone:
                    self._stopping_robots.setdefault(node_id, {})[worker.id] = StopWorkers([worker.id], grace_s, reason)
            if node is not None:
                self._emit(Notify(node.peer, StopWorkers(ids, grace_s, reason)))

    def remind(self, node: Node) -> None:
        """An agent that is there is told again which robot workers are to stop: a message may have been lost."""
        for stop in self._stopping_robots.get(node.id, {}).values():
            self._emit(Notify(node.peer, stop))

    def _step(self, worker: Worker, event: str) -> None:
        before = worker.life
        worker.step(event)
        if worker.life is not before:
            group = self._of_worker[worker.id]
            group.changed[worker.id] = worker
            self._touched[group.key] = group
            if worker.gone:
                group.living.discard(worker.id)
                self._stopping_robots.get(worker.node_id, {}).pop(worker.id, None)
                if event == "exited":
                    self._claims.free(worker)
                self._on_worker_gone(worker.id)

    def _worker_on(self, node: Node, id: str) -> Worker | None:
        """A living worker of this node; None for one that has ended, or that another node speaks of."""
        group = self._of_worker.get(id)
        worker = group.workers[id] if group is not None else None
        return worker if worker is not None and worker.node_id == node.id and not worker.gone else None

    def _take_over(self, node: Node, running: RunningWorker, now: float) -> None:
        spec = running.spec
        known = self._of_worker.get(spec.id)
        unseen = self._unseen.get(spec.id)
        if unseen is not None:
            if running.exit is not None:
                self._claims.ended(spec.id)
            else:
                self._emit(Notify(node.peer, StopWorkers([spec.id], 0.0, unseen)))
            return
        if known is None:
            group = self._groups.get((spec.namespace, spec.group))
            if group is None:
                if running.exit is not None and self._clients.ended(running.owner) is not None:
                    return
                group = Group(spec.namespace, spec.group, running.cls, running.owner, running.detail)
                self._groups[group.key] = group
                self._clients.adopt_token(spec.namespace, spec.token)
            elif running.exit is not None and any(w.spec.rank == spec.rank for w in group.workers.values()):
                return  # an end that was told before: the name has been given again since
            elif group.owner != running.owner:
                self._emit(Notify(node.peer, StopWorkers([spec.id], self._timing.orphan_grace_s)))
                return
            worker = Worker(spec, node.id, node.report.ip)
            self._add(group, worker)
            group.changed[spec.id] = worker
            self._touched[group.key] = group
            if running.exit is None:
                other = self._claims.take(group, worker, node, now)
                if other is not None and not group.stopping:
                    self._emit(Record(contradiction(other, group)))
                    self._stop(group, self._timing.orphan_grace_s)
                elif group.stopping:
                    self._emit(Notify(node.peer, StopWorkers([spec.id], self._timing.orphan_grace_s)))
            self._clients.await_return(running.owner, now)
        elif known.workers[spec.id].gone and running.exit is None:
            self._emit(Notify(node.peer, StopWorkers([spec.id], 0.0)))  # we told its owner that it is gone
            return
        if running.exit is not None:
            self.exited(node, spec.id, running.exit)
        elif running.endpoint is not None:
            self.ready(node, WorkerReady(spec.id, running.pid, running.endpoint, running.port, running.master_port))
