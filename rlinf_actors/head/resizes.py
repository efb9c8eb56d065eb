"""Groups that grow and shrink: ranks that are being added, the number of ranks, and ranks that leave. Pure.

The ranks of a group are 0 to N - 1 at all times. A worker whose rank is not below N is no member: it is being added, or
it leaves. The number N is in the specs of all members, with the count of resizes that tells which number is the newest,
so that a restarted head learns it from the agentds.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rlinf_actors.head.commands import Answer, Refused, RequestReceived
from rlinf_actors.head.event_log import of_group
from rlinf_actors.head.group_slices import states_of
from rlinf_actors.head.records import Client, Group
from rlinf_actors.head.slices import PIECE, Sliced, pieces
from rlinf_actors.head.validation import own_namespace
from rlinf_actors.model.restart import launch_of
from rlinf_actors.plurals import counted
from rlinf_actors.wire.client_messages import Done, Launch, Launched
from rlinf_actors.wire.protocol import MAX_SIZE
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.values import WorkerSpec

if TYPE_CHECKING:
    from rlinf_actors.head.coordinator import Coordinator

REMOVED = "it was removed from its group"


class Resizes:
    """Carries out the requests to resize groups."""

    def __init__(self, head: Coordinator) -> None:
        self._head = head
        self._leaving: dict[str, list[tuple[bytes, int]]] = {}  # requests to answer, by group's launch
        self._to_end: Counter[str] = Counter()  # number of workers that they wait for at most, by group's launch

    def add(self, client: Client, asked: AddRanks) -> Sliced[Launched]:
        """Start the workers of the ranks to add. The new workers count as members only after `resize`.

        Raises:
            Refused: the request contradicts the group, a node takes no workers, or a robot is in use. Then no worker
                was started.
        """
        launch = launch_of(asked.workers[0].id) if asked.workers else ""
        group = self._group(client, asked.namespace, asked.group, launch)
        asked = self._head.launches.parts.added(client, asked, group)
        token, groups = self._head.jobs.token(asked.namespace), self._head.groups
        missing = yield from self._check(group, asked)
        robots = yield from self._head.launches.check_nodes(client, missing)
        self._group(client, asked.namespace, asked.group, launch)
        self._head.robots.check(Launch(asked.namespace, asked.group, group.cls, robots))
        groups.claims.check((claim for spec in robots for claim in spec.claims), group.namespace, group)
        added = yield from self._head.launches.adopt_all(group, missing, token, -1)
        yield from self._head.group_slices.start_all(group, added)
        states = yield from states_of(group, range(group.size, group.size + len(asked.workers)))
        if len(added) < len(missing) or len(states) < len(asked.workers):
            groups.stop_workers(added, 0.0, REMOVED)
            raise Refused("usage", f"group {group.name!r} was stopped, or a node was lost, while ranks were added")
        return self._head.launches.launched(client, group.state(token, states))

    def _check(self, group: Group, asked: AddRanks) -> Sliced[list[WorkerSpec]]:
        """Return the workers to add that the group does not have yet. Raise Refused if they contradict the group."""
        size, count = group.size, len(asked.workers)
        ids: dict[int, str] = {}  # by rank
        missing: list[WorkerSpec] = []
        if size + count > MAX_SIZE:
            raise Refused("usage", f"group {group.name!r} would have more than {MAX_SIZE:,} workers")
        for some, more in pieces(asked.workers, 5 * PIECE):
            for spec in some:
                known = self._head.groups.of_worker(spec.id)
                if known not in (None, group) or (spec.namespace, spec.group) != group.key:
                    raise Refused("usage", f"worker {spec.id} to add to group {group.name!r} belongs to another group")
                if size <= spec.rank < size + count:
                    ids[spec.rank] = spec.id
                if known is None:
                    missing.append(spec)
            if more:
                yield
        if len(ids) < count or len(set(ids.values())) < count:
            raise Refused("usage", f"ranks to add to group {group.name!r} must be {size}, {size + 1}, ..., each once")
        if any(worker.id != ids.get(worker.spec.rank) for worker in group.beyond):
            raise Refused("usage", f"ranks that leave group {group.name!r} have not ended yet: try again")
        return missing

    def resize(self, client: Client, event: RequestReceived, asked: ResizeGroup) -> Done | None:
        """Set the number of ranks of a group, and stop the workers of other ranks if *asked* says so.

        Returns:
            Done; None if workers must end first. Then the request is answered when they have ended.
        """
        group = self._group(client, asked.namespace, asked.group, asked.launch)
        if not 1 <= asked.world_size <= max(group.size - 1, max(group.ranks, default=0)) + 1:
            raise Refused("usage", f"group {group.name!r} cannot have {counted(asked.world_size, 'rank')}")
        if asked.world_size != group.world_size:
            text = f"was resized: {counted(group.world_size, 'rank')} before, {asked.world_size} now"
            self._head.emit(of_group("group_launched", group, text))
            group.detail = asked.detail or group.detail
            group.resized(asked.world_size)
            self._tell(group)
        if not asked.stop:
            return Done()
        self._head.launches.parts.drop(client.incarnation, *group.key)  # of ranks that are not added after all
        leaving = [worker for worker in group.beyond if not worker.gone]
        if not leaving:
            return Done()
        self._leaving.setdefault(asked.launch, []).append((event.peer, event.id))
        self._to_end[asked.launch] = len(leaving)
        self._head.groups.stop_workers(leaving, asked.grace_s, REMOVED)
        self._answer(group)  # workers that had no process are gone already
        return None

    def _tell(self, group: Group) -> None:
        """Send the new number of ranks to the clients that hold handles, and to the agentds of the members."""
        self._head.slices.start(self._tell_all(group, group.resizes))

    def _tell_all(self, group: Group, resizes: int) -> Sliced[None]:
        for some, _ in pieces(list(group.workers.values())):
            if group.resizes != resizes:
                return  # it was resized again, and that is told
            for worker in some:
                worker.spec = group.resized_spec(worker.spec)
                if self._head.groups.of_worker(worker.id) is group:
                    self._head.groups.changed(worker)
            yield from self._head.group_slices.tell_nodes(group, some)
            yield

    def left(self, group: Group) -> None:
        """Note that a worker that is no member of *group* has ended."""
        launch = next(iter(group.launches), "")
        if launch in self._leaving:
            self._to_end[launch] -= 1
            if self._to_end[launch] <= 0:
                self._answer(group)

    def _answer(self, group: Group) -> None:
        launch = next(iter(group.launches), "")
        if launch in self._leaving and all(worker.gone for worker in group.beyond):
            del self._to_end[launch]
            for peer, id in self._leaving.pop(launch):
                self._head.emit(Answer(peer, id, Done()))

    def forget(self, group: Group) -> None:
        """Answer the requests for a group that has ended."""
        for launch in list(group.launches):
            self._to_end.pop(launch, None)
            for peer, id in self._leaving.pop(launch, ()):
                self._head.emit(Answer(peer, id, Done()))

    def _group(self, client: Client, namespace: str, name: str, launch: str) -> Group:
        own_namespace(client, namespace)
        group = self._head.groups.get(namespace, name)
        if group is None or group.gone or launch not in group.launches:
            raise Refused("not_found", f"group {name!r} has ended and cannot be resized")
        if group.owner != client.incarnation:
            raise Refused("usage", f"group {name!r} can be resized only by the process that launched it")
        if group.stopping:
            raise Refused("usage", f"group {name!r} is being stopped and cannot be resized")
        return group
