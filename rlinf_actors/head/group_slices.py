"""Work on all workers of a group or node, in slices (head.slices): start, stop, lose and show them. Pure.

Between two slices workers may end, groups may be stopped and nodes may be lost. So each slice looks at a worker again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlinf_actors.head.commands import Notify
from rlinf_actors.head.records import Client, Group, Node, WorkerLife, WorkerRecord
from rlinf_actors.head.recovery import NO_NODE_HAS_IT
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.wire.client_messages import WorkerChanged
from rlinf_actors.wire.values import ExitReport, GroupState, WorkerSpec, WorkerState

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator


class GroupSlices:
    def __init__(self, head: Coordinator) -> None:
        self._head = head

    def tell_nodes(self, group: Group, workers: Sequence[WorkerRecord]) -> Sliced[None]:
        """Send the agentds the present specs of these workers, as far as they live."""
        for some, more in pieces(workers):
            placed: dict[str, list[WorkerSpec]] = {}
            for worker in some:
                if not worker.gone:
                    placed.setdefault(worker.node_id, []).append(worker.spec)
            for node_id, specs in placed.items():
                self._head.groups.start(node_id, group, specs)
            if more:
                yield

    def start_all(self, group: Group, workers: Sequence[WorkerRecord]) -> Sliced[None]:
        """Order the nodes of new workers to start them. A worker that is being stopped already has ended."""
        by_node: dict[str, list[WorkerRecord]] = {}
        for some, more in pieces(workers, 20 * PIECE):
            for worker in some:
                by_node.setdefault(worker.node_id, []).append(worker)
            if more:
                yield
        started = 0
        for node_id, there in by_node.items():
            for some, _ in pieces(there):
                self._head.groups.start(node_id, group, [one.spec for one in some if one.life is WorkerLife.STARTING])
                for worker in some:
                    if worker.life is WorkerLife.STOPPING:
                        self._head.groups.never_started(worker, group.orphaned)
                started += len(some)
                if started >= PIECE:
                    started = 0
                    yield

    def launch_failed(self, group: Group, reason: str) -> None:
        """End a group whose launch was given up before all its workers were added. None of them was started."""
        group.launching, group.stopping = False, True
        self._head.groups.look_at(group)
        workers = [worker for worker in group.workers.values() if not worker.gone]
        self._head.slices.start(self._never_started(workers, reason))

    def _never_started(self, workers: Sequence[WorkerRecord], reason: str) -> Sliced[None]:
        for some, more in pieces(workers):
            for worker in some:
                if not worker.gone:
                    self._head.groups.never_started(worker, reason)
            if more:
                yield

    def follow(self, client: Client, state: GroupState, rest: list[WorkerState]) -> Sliced[None]:
        """Send the states of further workers, as they are then: notices about changes may have left in between.

        *rest* is emptied, because it takes 10 ms to free the memory of 100,000 states at once.
        """
        group = self._head.groups.get(state.namespace, state.name)
        while rest:
            some, rest[: 10 * PIECE] = rest[: 10 * PIECE], []
            yield
            if self._head.clients.get(client.incarnation) is not client:
                return
            if self._head.groups.get(state.namespace, state.name) is not group:
                group = None  # it has ended, and another one may have its name
            present = [group.member(one.rank) if group is not None else None for one in some]
            states = [one if worker is None else worker.state() for one, worker in zip(some, present, strict=True)]
            message = WorkerChanged(state.namespace, state.name, states, state.world_size)
            self._head.emit(Notify(client.peer, message))

    def send_all(self, groups: Sequence[Group], client: Client) -> Sliced[None]:
        """Send a client the states of all workers of these groups."""
        for number, group in enumerate(groups, 1):
            if not group.launching and self._head.groups.get(*group.key) is group:
                yield from self._head.groups.notices.send_all(group, client)
            if not number % PIECE:
                yield

    def settle(self) -> Sliced[None]:
        """End the groups without living workers. Called when no node is awaited any more."""
        for some, more in pieces(self._head.groups.all()):
            for group in some:
                self._head.groups.look_at(group)
            if more:
                yield

    def stop_groups(self, groups: Sequence[Group], stop: Callable[[Group], object]) -> Sliced[None]:
        """Call *stop* for each of these groups that is still there. Those with robots come first, without a yield."""
        robots, done = self._head.groups.has_robots, 0
        for group in sorted(groups, key=lambda group: not robots(group)):
            if self._head.groups.get(*group.key) is group:
                stop(group)
            done += 1 + min(len(group.workers), PIECE)  # so many workers are stopped at once
            if done >= PIECE and not robots(group):
                done = 0
                yield

    def node_lost(self, node: Node, why: str, certain: bool) -> Sliced[None]:
        """Declare all workers lost whose node is gone, those with robots first; see GroupTable.node_lost."""
        groups = self._head.groups
        workers = sorted(groups.workers_on(node.id), key=lambda worker: not worker.spec.claims)
        for number, worker in enumerate(workers, 1):
            if not worker.gone:
                if not certain:  # it may outlive its agentd, and must not come back
                    groups.abandon(worker.id, why, node.member)
                    group = groups.of_worker(worker.id)
                    if worker.life is not WorkerLife.RESTARTING and group is not None:  # else its process has ended
                        groups.names.lost(group, worker, node)
                groups.lost(worker, why)
                groups.claims.lose(worker, certain)
            if not number % PIECE:
                yield

    def shown(self, sees: Callable[[str], bool]) -> Sliced[list[GroupState]]:
        """Return the states of the groups whose namespaces *sees* accepts, by name, without the jobs' tokens."""
        found = []
        for number, group in enumerate(sorted(self._head.groups.all(), key=lambda group: group.key), 1):
            if sees(group.namespace):
                states = yield from states_of(group)
                found.append(group.state("", states))
            if not number % PIECE:
                yield
        return found


def states_of(group: Group, added: range | None = None) -> Sliced[list[WorkerState]]:
    """Return the states of a group's members by rank, or of the *added* ranks, all as they are in the last slice.

    A notice about a change since the work began may have left before the answer, and a client takes no notice of a
    group that it does not know yet. So what has changed is looked at again.
    """
    changed: set[int] = set()
    group.watches.append(changed)
    try:
        states: dict[int, WorkerState] = {}
        for ranks, more in pieces(added or range(group.size), 5 * PIECE):
            workers = ((rank, group.at(rank)) for rank in ranks)
            states.update((rank, worker.state()) for rank, worker in workers if worker is not None)
            if more:
                yield
        while changed:
            for rank in itertools.islice(list(changed), 5 * PIECE):
                changed.discard(rank)
                if (worker := group.at(rank)) is not None:
                    states[rank] = worker.state()
            if changed:
                yield
        return list(filter(None, map(states.get, added or range(group.size))))  # it may have been resized meanwhile
    finally:
        group.watches.remove(changed)


def add_absent(group: Group, states: list[WorkerState]) -> Sliced[None]:
    """Add a worker state "gone" for each rank of the group for which a restarted head knows no worker."""
    exit = ExitReport("node_lost", reason=NO_NODE_HAS_IT)
    for some, more in pieces(range(group.world_size), 10 * PIECE):
        absent = (rank for rank in some if rank not in group.ranks)
        states += [WorkerState("", rank, -1, "unknown", "gone", exit=exit) for rank in absent]
        if more:
            yield
